"""The Job itself: what it refuses, how it calls a model, and how it adds up metrics."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shoal.job import (
    DatasetData,
    DecayMatrices,
    Job,
    JobError,
    StepDecay,
    Target,
    TensorData,
    WarmupCosine,
    cross_entropy,
    param_groups,
)
from shoal.job.losses import IGNORED, classifier_metrics, correct, perplexity

DATA = TensorData(x=torch.randn(10, 3), y=torch.arange(10) % 4)


def make(**changes: Any) -> Job:
    job = Job(
        name="toy",
        model=partial(nn.Linear, 3, 4),
        train=DATA,
        loss=cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        global_batch=4,
        steps=3,
    )
    return replace(job, **changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"global_batch": 0}, "global_batch is 0"),
        ({"global_batch": 2.0}, "global_batch is 2.0"),
        ({"global_batch": True}, "global_batch is True"),
        ({"steps": -1}, "steps is -1"),
        ({"seed": -3}, "seed is -3"),
        ({"evaluate_every": -1}, "evaluate_every"),
        ({"clip": 0.0}, "clip is 0.0"),
        ({"clip": math.nan}, "clip is nan"),
        ({"batch_norm": "global"}, "batch_norm is 'global'"),
        ({"last_batch": "drop"}, "last_batch is 'drop'"),
        ({"name": ""}, "name is empty"),
        ({"loss": None}, "loss is None"),
        ({"optimizer": "adam"}, "optimizer is 'adam'"),
        ({"model": nn.Linear(3, 4)}, "function that builds it"),
        ({"inputs": "x"}, "must be a tuple"),
        ({"train": [1, 2]}, "TensorData"),
        ({"train": None}, "train is a NoneType"),
        ({"validation": TensorData(x=torch.zeros(0, 3))}, "validation holds no samples"),
    ],
)
def test_a_job_that_cannot_be_trained_is_refused_with_the_field_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(JobError, match=named):
        make(**changes)


def test_inputs_reach_the_model_by_position_or_by_name() -> None:
    class TwoInputs(nn.Module):
        def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            return first - second

    batch = {"a": torch.tensor([5.0]), "b": torch.tensor([2.0])}
    assert make(inputs=("a", "b")).run_model(TwoInputs(), batch).item() == 3.0
    assert make(inputs={"second": "a", "first": "b"}).run_model(TwoInputs(), batch).item() == -3.0


def test_a_missing_batch_entry_is_named_with_those_there_are() -> None:
    with pytest.raises(JobError, match=r"'image'.*\['x', 'y'\]"):
        make(inputs=("image",)).run_model(nn.Identity(), DATA.batch(np.arange(2)))


def test_the_loss_is_the_sum_whose_mean_torch_gives() -> None:
    logits, y = torch.randn(6, 5, 4), torch.randint(4, (6, 5))
    y[0, :3] = IGNORED
    total, count = cross_entropy(logits, {"y": y})
    mean = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    assert int(count) == 27
    assert torch.allclose(total / count, mean)


def test_losses_of_uneven_pieces_add_up_to_the_whole() -> None:
    logits, y = torch.randn(7, 4, dtype=torch.float64), torch.randint(4, (7,))
    y[2] = IGNORED
    whole, count = cross_entropy(logits, {"y": y})
    pieces = [cross_entropy(logits[a:b], {"y": y[a:b]}) for a, b in ((0, 5), (5, 7), (7, 7))]
    assert torch.allclose(sum(total for total, _ in pieces), whole)
    assert sum(int(n) for _, n in pieces) == int(count) == 6


def test_an_empty_batch_has_loss_zero_that_can_be_differentiated() -> None:
    model = nn.Linear(3, 4)
    total, count = cross_entropy(model(torch.zeros(0, 3)), {"y": torch.zeros(0, dtype=torch.int64)})
    total.backward()
    assert total.item() == 0.0
    assert int(count) == 0
    assert model.weight.grad is not None
    assert not model.weight.grad.any()


def test_accuracy_counts_right_answers_and_leaves_ignored_ones_out() -> None:
    logits = torch.eye(4)
    total, count = correct(logits, {"y": torch.tensor([0, 1, 3, IGNORED])})
    assert (int(total), int(count)) == (2, 3)


def test_validation_values_are_total_sum_over_total_count_and_derived_follow() -> None:
    job = make(metrics=classifier_metrics, derived={"perplexity": perplexity})
    values = job.summarise({"loss": (6.0, 3), "accuracy": (1, 4)})
    assert values == {"loss": 2.0, "accuracy": 0.25, "perplexity": math.exp(2.0)}
    assert math.isnan(job.summarise({"loss": (0.0, 0)})["perplexity"])
    assert job.summarise({"loss": (1e9, 1)})["perplexity"] == math.inf


def test_without_metrics_validation_measures_the_loss() -> None:
    logits, batch = torch.zeros(2, 4), {"y": torch.tensor([0, 1])}
    assert set(make().measure(logits, batch)) == {"loss"}
    assert set(make(metrics=classifier_metrics).measure(logits, batch)) == {"loss", "accuracy"}


def test_a_target_knows_which_way_is_better_and_nan_never_reaches_it() -> None:
    assert Target(metric="loss", value=2.0).reached(1.9)
    assert not Target(metric="loss", value=2.0).reached(2.1)
    assert Target(metric="accuracy", value=0.9, better="higher").reached(0.95)
    assert not Target(metric="loss", value=2.0).reached(math.nan)
    with pytest.raises(JobError, match="'smaller'"):
        Target(metric="loss", value=1.0, better="smaller")  # type: ignore[arg-type]


def test_groups_hold_each_trainable_parameter_once_joined_by_equal_options() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    groups = param_groups(model, DecayMatrices(weight_decay=0.1))
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [len(group["params"]) for group in groups] == [1, 3]
    assert groups[1]["params"][0] is model[0].bias
    assert groups[1]["params"][1] is model[1].weight
    assert [list(group) for group in param_groups(model)] == [["params"]]


def test_options_reach_the_optimizer_and_others_take_its_default() -> None:
    model = nn.Linear(3, 4)
    job = make(options=lambda name, _: {"lr": 0.5} if name == "bias" else {})
    optimizer = job.optimizer(param_groups(model, job.options))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]


def test_warm_up_rises_then_falls_to_the_floor_and_stays() -> None:
    schedule = WarmupCosine(steps=100, warmup=10, floor=0.1)
    values = [schedule(step) for step in range(120)]
    assert values[0] == 0.1
    assert values[9] == 1.0
    assert values[10] == 1.0
    assert all(a >= b for a, b in itertools.pairwise(values[10:]))
    assert values[100:] == [0.1] * 20
    assert WarmupCosine(steps=0)(0) == 0.0
    assert WarmupCosine(steps=5, warmup=5)(4) == 1.0


def test_step_decay_multiplies_at_each_boundary() -> None:
    schedule = StepDecay(at=(2, 4), gamma=0.5)
    assert [schedule(step) for step in range(6)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


def test_tensor_data_takes_rows_by_index_also_none() -> None:
    data = TensorData(x=np.arange(12.0).reshape(6, 2), y=torch.arange(6))
    batch = data.batch(np.array([4, 1, 4]))
    assert batch["y"].tolist() == [4, 1, 4]
    assert batch["x"][0].tolist() == [8.0, 9.0]
    assert data.batch(np.array([], dtype=np.int64))["x"].shape == (0, 2)


def test_tensor_data_of_unequal_lengths_is_refused() -> None:
    with pytest.raises(JobError, match="'x': 3, 'y': 4"):
        TensorData(x=torch.zeros(3), y=torch.zeros(4))
    with pytest.raises(JobError, match="no tensors"):
        TensorData()
    with pytest.raises(JobError, match="2 without a name; name them"):
        TensorData(torch.zeros(3), torch.zeros(3))
    with pytest.raises(JobError, match="first dimension"):
        TensorData(x=torch.tensor(1.0))


def test_a_torch_dataset_becomes_named_batches_also_empty_ones() -> None:
    dataset = torch.utils.data.TensorDataset(torch.randn(5, 2), torch.arange(5))
    data = DatasetData(dataset)
    assert len(data) == 5
    assert data.batch(np.array([3, 0]))["y"].tolist() == [3, 0]
    empty = data.batch(np.array([], dtype=np.int64))
    assert empty["x"].shape == (0, 2)
    assert empty["y"].dtype == torch.int64


def test_a_dataset_of_mappings_keeps_its_names_and_collate_may_be_replaced() -> None:
    rows = [{"text": torch.tensor([i, i])} for i in range(4)]
    assert DatasetData(rows).batch(np.array([2]))["text"].tolist() == [[2, 2]]
    joined = DatasetData(rows, collate=lambda items: {"n": torch.tensor([len(items)] * len(items))})
    assert joined.batch(np.array([0, 1, 2]))["n"].tolist() == [3, 3, 3]


def test_a_dataset_that_cannot_be_indexed_or_named_is_refused() -> None:
    with pytest.raises(JobError, match="map-style"):
        DatasetData(iter([1]))
    with pytest.raises(JobError, match="3 parts"):
        DatasetData([(1, 2, 3)]).batch(np.array([0]))

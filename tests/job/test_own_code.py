"""What a job brings is run once before ranks start: what fails in it, or trains nothing, is a sentence."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shoal.job import Job, JobError, Target, TensorData, infer_facts
from shoal.job.own_code import require_runs
from shoal.layout.trace import CannotTrace, trace
from shoal.runtime.draws import places_of

X = torch.randn(12, 5, generator=torch.Generator().manual_seed(1))


def squares(output: Any, batch: Any) -> Any:
    return ((output - batch["y"]) ** 2).sum(), len(output)


def misspelt(output: Any, batch: Any) -> Any:
    return squares(output, {"y": batch["labels"]})


def job(**changes: Any) -> Job:
    data = TensorData(x=X, y=X[:, :1])
    given = {"model": lambda: nn.Linear(5, 1), "train": data, "validation": data, "loss": squares}
    return Job(
        name="own",
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
        global_batch=4,
        steps=2,
        **(given | changes),
    )


class Pairs:
    def __len__(self) -> int:
        return 8

    def batch(self, indices: np.ndarray) -> Any:
        return [X[:8], X[:8, :1]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": lambda: 3}, r"model\(\) returned a int, but must return an nn.Module"),
        ({"model": lambda: nn.Linear(5, 1).requires_grad_(False)}, "there is nothing to train"),
        ({"model": lambda: {}["size"]}, r"building the model raised KeyError: 'size' at .*test_own_code.py:\d+\n"),
        ({"model": lambda: nn.Linear(7, 1)}, "the model's forward raised RuntimeError: mat1 and mat2 shapes"),
        ({"loss": misspelt}, r"loss\(.*raised KeyError: 'labels' \(it is given 'x', 'y'\) at .*test_own_code.py:\d+\n"),
        ({"loss": lambda out, batch: (squares(out, batch)[0], -len(out))}, "a count of -4; expected how many"),
        ({"loss": lambda out, batch: squares(out.detach(), batch)}, "the loss carries no gradient"),
        ({"train": Pairs()}, r"train.batch\(indices\) returned a list, but must return a dictionary"),
        ({"metrics": lambda out, batch: {"mae": 0.5}}, "metric 'mae' is 0.5, but must be a pair"),
        ({"metrics": misspelt}, r"metrics\(output, batch\) raised KeyError: 'labels'"),
        ({"derived": {"twice": lambda values: 2 * values["los"]}}, r"derived raised KeyError: 'los' \(it is given"),
        ({"target": Target(metric="lss", value=1.0)}, "target names the validation value 'lss', .*mean 'loss'"),
    ],
)
def test_what_is_wrong_with_a_job_is_found_before_its_first_step(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        require_runs(job(**changes), samples=4)


def test_a_job_that_runs_leaves_random_states_as_they_were() -> None:
    def loss(output: Any, batch: Any) -> Any:
        random.random()
        np.random.rand()
        return squares(output + 0 * torch.rand(()), batch)

    before = random.getstate(), np.random.get_state()[2], torch.get_rng_state()
    require_runs(job(loss=loss), samples=4)
    assert random.getstate() == before[0]
    assert np.random.get_state()[2] == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_a_model_that_cannot_be_built_or_called_is_described_in_a_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JobError, match="building the model raised KeyError"):
        infer_facts(job(model=lambda: {}["size"]))
    with pytest.raises(CannotTrace, match="a forward on samples of its data raised RuntimeError: mat1"):
        trace(job(model=lambda: nn.Linear(7, 1)))
    assert "Traceback" not in capfd.readouterr().err


class Differentiating(nn.Module):
    """The derivative of a network by its input, sample by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(torch.func.grad(lambda row: torch.tanh(self.inner(row)).sum()))(x).sum(1, keepdim=True)


def test_modules_called_inside_torch_func_are_named_and_the_job_is_not_blamed() -> None:
    with pytest.raises(CannotTrace, match=r"the model calls its modules inside torch.func .* tp, cp, pp and ep cannot"):
        trace(job(model=Differentiating))


class Making(nn.Linear):
    """Makes state in its first forward."""

    def __init__(self, what: str) -> None:
        super().__init__(5, 1)
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "made"):
            if self.what == "parameter":
                self.made = nn.Parameter(torch.ones(5))
            elif self.what == "module":
                self.made = nn.Linear(5, 5)
            else:
                self.register_buffer("made", torch.ones(5), persistent=self.what == "buffer")
        return super().forward(self.made(x) if self.what == "module" else x * self.made)


@pytest.mark.parametrize("what", ["parameter", "buffer", "module"])
def test_what_the_first_forward_makes_is_refused_by_name(what: str) -> None:
    with pytest.raises(JobError, match=r"the model's first forward makes made.*, of which an optimizer .* knows noth"):
        require_runs(job(model=partial(Making, what)), samples=4)


def test_a_cache_that_the_first_forward_makes_is_not_made_by_what_is_tried_before() -> None:
    lazy = job(model=partial(Making, "cache"))
    require_runs(lazy, samples=4)
    model = lazy.model()
    places_of(lazy, model)
    assert not hasattr(model, "made")

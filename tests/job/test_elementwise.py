"""The probe that finds out whether an optimiser may be given slices, single parameters, or only all of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from distributed.optimizer_zoo import COUPLED, ELEMENTWISE, PARAMETERWISE, Net, Written
from shoal.job import Job, JobError, TensorData
from shoal.job.elementwise import LARGE, probe
from shoal.job.facts import infer_facts


def sgd(model: nn.Module) -> Any:
    return probe(partial(torch.optim.SGD, lr=0.1), model)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_optimizers_that_look_at_elements_alone_are_recognised(name: str) -> None:
    found = probe(ELEMENTWISE[name], Net())
    assert found.kind == "elementwise", found.why
    assert not found.opaque


@pytest.mark.parametrize("name", PARAMETERWISE)
def test_optimizers_that_look_at_a_full_parameter_are_recognised(name: str) -> None:
    found = probe(PARAMETERWISE[name], Net())
    assert found.kind == "parameter", found.why
    assert found.why


@pytest.mark.parametrize("name", COUPLED)
def test_optimizers_that_couple_parameters_are_recognised(name: str) -> None:
    found = probe(COUPLED[name], Net())
    assert found.kind == "coupled"
    assert found.needs_closure == (name == "LBFGS")


def test_muon_is_not_elementwise() -> None:
    assert probe(partial(torch.optim.Muon, lr=0.1), nn.Linear(20, 30, bias=False)).kind == "parameter"


class LargeOnes(Written):
    """Treats tensors of more than 300,000 elements otherwise: more than the engine's longest slice."""

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(group["lr"] * (0.5 if param.numel() > 300_000 else 1.0) * param.grad)


def test_a_branch_on_a_size_between_slices_and_parameters_is_found() -> None:
    assert LARGE > 300_000
    assert probe(LargeOnes, nn.Linear(700, 700)).kind == "parameter"
    assert probe(LargeOnes, nn.Linear(20, 20)).kind == "elementwise"


class Marked(Written):
    """Looks at a mark that the model sets on its parameters."""

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(group["lr"] * getattr(param, "speed", 1.0) * param.grad)


def test_marks_on_parameters_are_seen() -> None:
    model = nn.Linear(4, 4)
    model.weight.speed = 0.5  # type: ignore[assignment]
    assert probe(Marked, model).kind == "parameter"
    assert probe(Marked, nn.Linear(4, 4)).kind == "elementwise"


class Late(Written):
    """Couples parameters from its tenth step on."""

    calls = 0

    def begin(self) -> None:
        self.calls += 1

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(group["lr"] * param.grad / (param.grad.norm() if self.calls >= 10 else 1.0))


def test_what_starts_late_is_found() -> None:
    assert probe(Late, nn.Linear(4, 4)).kind == "parameter"


class Opaque(Written):
    """Keeps its count in an object."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups)
        self.counter = type("Counter", (), {})()
        self.counter.number = 0

    def begin(self) -> None:
        self.counter.number += 1

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(group["lr"] / self.counter.number * param.grad)


def test_objects_that_change_are_named() -> None:
    assert probe(Opaque, nn.Linear(4, 4)).opaque == {"attributes: 'counter'": "Counter"}


def test_a_models_shapes_are_enough() -> None:
    with torch.device("meta"):
        model = nn.Linear(5000, 5000)
    assert sgd(model).kind == "elementwise"


def test_the_probe_leaves_the_random_state_alone() -> None:
    model = nn.Linear(1, 1)
    before = torch.random.get_rng_state()
    sgd(model)
    assert torch.equal(before, torch.random.get_rng_state())


def test_an_optimizer_that_cannot_run_at_all_raises_its_own_error() -> None:
    with pytest.raises(ValueError, match="learning rate"):
        probe(partial(torch.optim.SGD, lr=-1.0), nn.Linear(2, 2))


def test_an_optimizer_of_sparse_gradients_is_refused_by_name() -> None:
    said = (
        "SparseAdam takes sparse gradients only, and Shoal sums gradients as dense tensors; use an optimiser that "
        "takes dense ones, such as torch.optim.Adam"
    )
    with pytest.raises(JobError) as refused:
        probe(torch.optim.SparseAdam, nn.Linear(2, 2))
    assert str(refused.value) == said


def test_an_optimizer_that_ignores_its_groups_is_refused() -> None:
    other = nn.Linear(2, 2)
    with pytest.raises(JobError, match="SGD does not hold the parameters that it was given"):
        probe(lambda groups: torch.optim.SGD(other.parameters(), lr=0.1), nn.Linear(2, 2))


def test_parameters_without_a_shape_are_refused_by_name() -> None:
    job = Job(
        name="lazy", model=lambda: nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2)),
        train=TensorData(x=torch.ones(4, 3)), loss=lambda out, batch: (out.sum(), len(out)),
        optimizer=partial(torch.optim.SGD, lr=0.1), global_batch=2, steps=1,
    )  # fmt: skip
    with pytest.raises(JobError) as refused:
        infer_facts(job)
    assert str(refused.value) == (
        "job 'lazy': 1 (LazyLinear) has a parameter without a shape (weight), which a first batch would give it; run "
        "one batch through the model in the function that builds it, or name the sizes"
    )

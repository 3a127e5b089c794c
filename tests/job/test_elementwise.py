"""The probe that finds out whether an optimiser may be given slices, single parameters, or only all of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distributed.optimizer_zoo import COUPLED, ELEMENTWISE, PARAMETERWISE, Net, Written
from shoal.job import Job, JobError, TensorData
from shoal.job.elementwise import KNOWN, probe
from shoal.job.facts import infer_facts


def sgd(model: nn.Module) -> Any:
    return probe(partial(torch.optim.SGD, lr=0.1), model)


@pytest.mark.long
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
    assert found.needs_closure == (name in ("LBFGS", "Sharpness"))


def test_muon_is_not_elementwise() -> None:
    assert probe(partial(torch.optim.Muon, lr=0.1), nn.Linear(20, 30, bias=False)).kind == "parameter"


class LargeOnes(Written):
    """Treats tensors of more than 300,000 elements otherwise: more than the engine's longest slice."""

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(group["lr"] * (0.5 if param.numel() > 300_000 else 1.0) * param.grad)


def test_a_branch_on_a_size_between_slices_and_parameters_is_found() -> None:
    assert probe(LargeOnes, nn.Linear(700, 700)).kind == "parameter"
    assert probe(LargeOnes, nn.Linear(20, 20)).kind == "elementwise"


class TallOnes(Written):
    """Treats matrices of more than 10,000 rows otherwise, as implementations of Muon do."""

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        tall = param.dim() == 2 and param.shape[0] > 10_000
        param.sub_(group["lr"] * torch.tensor(0.5 if tall else 1.0, dtype=param.dtype) * param.grad)


class LongOnes(Written):
    """Treats tensors of more than 100,000 elements otherwise: no parameter of a small model, but joined slices."""

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(group["lr"] * (0.5 if param.numel() > 100_000 else 1.0) * param.grad)


def test_branches_on_true_sizes_are_found_without_memory() -> None:
    with torch.device("meta"):
        huge = nn.Embedding(50_000, 4096)
    found = probe(TallOnes, huge)
    assert found.kind == "parameter"
    assert found.why == "its steps on weight of shape [50000, 4096] differ from those on slices of it"
    assert probe(TallOnes, nn.Linear(20, 20)).kind == "elementwise"
    assert probe(LongOnes, nn.Linear(20, 20)).kind == "parameter"


class RareClip(Written):
    """Limits the norm of each gradient to a number that it hardly ever reaches."""

    limit = 1e30

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(group["lr"] * param.grad * min(1.0, self.limit / (float(param.grad.norm()) + 1e-12)))


class RareGlobalClip(Written):
    def begin(self) -> None:
        nn.utils.clip_grad_norm_([param for group in self.param_groups for param in group["params"]], 1e6)

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(group["lr"] * param.grad)


def test_limits_that_are_hardly_ever_reached_are_found() -> None:
    found = probe(RareClip, nn.Linear(4, 4))
    assert (found.kind, found.why) == ("parameter", "an element is computed from others (linalg_vector_norm)")
    assert probe(RareGlobalClip, nn.Linear(4, 4)).kind == "coupled"


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


class Later(Written):
    """Takes norms from step 5,000 on, and those of all parameters in every 250th step; counts where it is asked to."""

    counts: str

    def begin(self) -> None:
        if self.counts == "group":
            for group in self.param_groups:
                group["n"] = group.get("n", 0) + 1
        elif self.counts == "attribute":
            self.n = getattr(self, "n", 0) + 1
        elif self.counts == "state":
            self.state["n"] = self.state.get("n", torch.zeros(1)) + 1

    def number(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        if self.counts == "parameter":
            state["n"] = state.get("n", torch.tensor(0.0)) + 1
        return float(
            {
                "group": group.get("n"),
                "attribute": getattr(self, "n", None),
                "state": self.state.get("n"),
                "parameter": state.get("n"),
            }[self.counts]
        )

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        late = self.number(group, state) >= 5000
        param.sub_(group["lr"] * param.grad / (param.grad.norm() if late else 1.0))


class EveryThousand(Written):
    def begin(self) -> None:
        self.n = getattr(self, "n", 0) + 1
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.size = float(sum(float(g.square().sum()) for g in gradients)) if self.n % 1000 == 0 else 1.0

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(group["lr"] * param.grad / self.size)


@pytest.mark.parametrize("counts", ["group", "attribute", "state", "parameter"])
def test_what_starts_after_thousands_of_steps_is_found_wherever_it_counts(counts: str) -> None:
    later = type("Later", (Later,), {"counts": counts})
    assert probe(later, nn.Linear(4, 4)).kind == "parameter"
    assert probe(EveryThousand, nn.Linear(4, 4)).kind == "coupled"


class Masked(Written):
    """Elements only, by a mask: what Rprop and cautious optimisers do."""

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        mean = state.setdefault("m", torch.zeros(param.shape, dtype=param.dtype)).lerp_(param.grad, 0.2)
        update = mean.clone()
        update[mean * param.grad < 0] = 0
        param.sub_(group["lr"] * torch.where(param.abs() > 1e-3, update, param.grad.sign()))


def test_masks_and_shapes_that_change_nothing_are_no_false_alarm() -> None:
    found = probe(Masked, Net())
    assert found.kind == "elementwise", found.why


class Sharpness(torch.optim.SGD):
    """As SAM is found in the wild: a closure it cannot do without, with a default."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is None:
            raise ValueError("SAM needs a closure")
        with torch.enable_grad():
            closure()
        super().step()


class Strict(Written):
    """Needs a call before its first step, as schedule-free optimisers do."""

    def begin(self) -> None:
        raise Exception("call train() before the first step")


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (
            partial(Sharpness, lr=0.1),
            "Sharpness cannot step without a closure (SAM needs a closure), and its step does not ask for one: declare "
            "it as step(self, closure), without a default, and Shoal passes one",
        ),
        (Strict, "Strict cannot step the model's parameters: Exception: call train() before the first step"),
        (
            partial(torch.optim.Muon, lr=0.1),
            "the function `optimizer` fails for the model's parameters: ValueError: Muon only supports 2D parameters "
            "whereas we found a parameter with size: torch.Size([2])",
        ),
    ],
)
def test_optimizers_that_cannot_step_are_answered_in_a_sentence(optimizer: Any, said: str) -> None:
    with pytest.raises(JobError) as refused:
        probe(optimizer, nn.Linear(2, 2))
    assert str(refused.value) == said


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
        name="lazy",
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2)),
        train=TensorData(x=torch.ones(4, 3)),
        loss=lambda out, batch: (out.sum(), len(out)),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        global_batch=2,
        steps=1,
    )
    with pytest.raises(JobError) as refused:
        infer_facts(job)
    assert str(refused.value) == (
        "job 'lazy': 1 (LazyLinear) has a parameter without a shape (weight), which a first batch would give it; run "
        "one batch through the model in the function that builds it, or name the sizes"
    )


@pytest.mark.long
@pytest.mark.parametrize("cls", sorted(KNOWN, key=lambda cls: cls.__name__), ids=lambda cls: cls.__name__)
def test_what_is_known_of_an_optimiser_is_what_trying_it_shows(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Conv1d(3, 5, 3), torch.nn.Linear(7, 300), torch.nn.BatchNorm1d(5))
    known = probe(lambda groups: cls(groups, lr=0.01), model)
    monkeypatch.setattr("shoal.job.elementwise.KNOWN", frozenset())
    tried = probe(lambda groups: cls(groups, lr=0.01), model)
    assert known.kind == tried.kind == "elementwise"
    assert known.kept.keys() == tried.kept.keys()
    assert (known.needs_closure, known.has_lr, known.opaque) == (tried.needs_closure, tried.has_lr, tried.opaque)
    assert not tried.forgets


def _normalises(optimizer: Any, args: Any, kwargs: Any) -> None:
    for param in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
        param.grad /= param.grad.norm() + 1e-9


@pytest.mark.parametrize("for_all", [False, True])
def test_an_optimiser_of_pytorch_with_a_hook_is_tried(for_all: bool) -> None:
    def hooked(groups: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(groups, lr=0.1)
        if not for_all:
            optimizer.register_step_pre_hook(_normalises)
        return optimizer

    handle = register_optimizer_step_pre_hook(_normalises) if for_all else None
    try:
        assert probe(hooked, torch.nn.Linear(5, 4)).kind == "parameter"
    finally:
        if handle is not None:
            handle.remove()

"""State that no module holds, parameters that a forward writes to, and what a checkpoint would lose."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed.jobs import coupled
from shoal.job import Job, JobError
from shoal.job.losses import cross_entropy
from shoal.layout.held_outside import Outside
from shoal.layout.layout import layout_of
from shoal.proof.gate import LayoutWrong
from shoal.proof.model_fails import naming_what_cut_it
from shoal.proof.reference import train_serially
from shoal.proof.resumable import follow_samples, require_resumable, require_state_averaged, require_state_in_pieces
from shoal.runtime.draws import places_of
from shoal.runtime.step import build_model
from shoal.strategy import parse

COUNT = [0]


class Counting(coupled.Plain):
    """Counts its calls in an attribute that the first of them sets."""

    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


class CountingInGlobal(coupled.Plain):
    def forward(self, x: Tensor) -> Any:
        COUNT[0] += 1
        return super().forward(x) * (1 + 0.1 * COUNT[0])


class CountingOnClass(coupled.Plain):
    seen = 0

    def forward(self, x: Tensor) -> Any:
        type(self).seen += 1
        return super().forward(x) * (1 + 0.1 * type(self).seen)


class Buffered(coupled.Plain):
    def __init__(self, *, persistent: bool = True, late: int = 0) -> None:
        super().__init__()
        self.late = late
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=persistent)

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * max(0, int(self.calls) - self.late))


class Remembering(coupled.Plain):
    """Keeps results that nothing reads again, as many models do."""

    def forward(self, x: Tensor) -> Any:
        self.last = super().forward(x)
        return self.last


class Following(coupled.Plain):
    """A frozen teacher follows its student in forward, past autograd's eyes."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(coupled.WIDTH, coupled.WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        self.teacher.weight.data.lerp_(self.head.weight.data, 0.1)
        return super().forward(x) + self.teacher(x)


class Averaging(coupled.Plain):
    """A buffer that is not saved starts as a copy of a weight and follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", self.head.weight.detach().clone(), persistent=False)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.average.lerp_(self.head.weight, 0.1)
        return super().forward(x) + nn.functional.linear(x, self.average)


class Keeping(coupled.Plain):
    """What the first forward makes of a weight is kept."""

    made: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        if self.made is None:
            self.made = self.weight()
        return super().forward(x) + nn.functional.linear(x, self.made)

    def weight(self) -> Tensor:
        return self.head.weight.detach().clone()


class KeepingTable(Keeping):
    """It is made of no weight."""

    def weight(self) -> Tensor:
        return torch.linspace(-1, 1, coupled.WIDTH**2).view(coupled.WIDTH, coupled.WIDTH)


class CountingLoss:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Any, batch: dict[str, Tensor]) -> Any:
        self.calls += 1
        total, count = cross_entropy(output, batch)
        return total * self.calls, count


class WeighingLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(coupled.WIDTH))

    def forward(self, output: Tensor, batch: dict[str, Tensor]) -> Any:
        total = nn.functional.cross_entropy(output, batch["y"], weight=self.weight.clone(), reduction="sum")
        self.weight.mul_(0.9).add_(torch.bincount(batch["y"], minlength=coupled.WIDTH))
        return total, len(output)


def counting_closure() -> Callable[..., Any]:
    calls = 0

    def loss(output: Any, batch: dict[str, Tensor]) -> Any:
        nonlocal calls
        calls += 1
        total, count = cross_entropy(output, batch)
        return total * calls, count

    return loss


STATEFUL: dict[str, Callable[[], Job]] = {
    "attribute": lambda: coupled.make(Counting),
    "global": lambda: coupled.make(CountingInGlobal),
    "class": lambda: coupled.make(CountingOnClass),
    "buffer that is not saved": lambda: coupled.make(lambda: Buffered(persistent=False)),
    "late": lambda: coupled.make(lambda: Buffered(persistent=False, late=50)),
    "copy that is not saved": lambda: coupled.make(Averaging),
    "kept": lambda: coupled.make(Keeping),
    "loss": lambda: coupled.make(coupled.Plain, loss=CountingLoss()),
    "loss module": lambda: coupled.make(coupled.Plain, loss=WeighingLoss()),
    "closure": lambda: coupled.make(coupled.Plain, loss=counting_closure()),
}


def loss_now(job: Job, model: nn.Module) -> float:
    batch = job.train.batch(job.order().indices(0))
    return float(job.loss_of(job.run_model(model, batch), batch)[0].detach())


@pytest.mark.parametrize("name", sorted(STATEFUL))
def test_what_is_tried_before_training_leaves_no_trace(name: str) -> None:
    job, untouched = STATEFUL[name](), STATEFUL[name]()
    COUNT[0] = CountingOnClass.seen = 0
    expected = loss_now(untouched, build_model(untouched))
    COUNT[0] = CountingOnClass.seen = 0
    model = build_model(job)
    places_of(job, model)
    assert loss_now(job, model) == expected


def test_parameters_that_a_forward_writes_to_are_put_back() -> None:
    job = coupled.make(Following)
    model = build_model(job)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    places_of(job, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Unfreezing(coupled.Plain):
    """A part learns, and leaves evaluation, from the third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.blocks[0].requires_grad_(bool(self.calls > 2)).train(bool(self.calls > 2))
        return super().forward(x)


def test_what_a_forward_freezes_is_not_frozen_by_what_is_tried_before() -> None:
    job = coupled.make(Unfreezing)
    model = build_model(job)
    places_of(job, model)
    assert all(param.requires_grad for param in model.parameters())
    assert all(module.training for module in model.modules())


def test_a_part_that_learns_later_learns_as_in_a_plain_loop() -> None:
    job = coupled.make(Unfreezing, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), clip=None)
    torch.manual_seed(job.seed)
    model, order, at = job.model().double(), job.order(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.blocks[0][0].weight.detach().clone()
    for _ in range(4):
        optimizer.zero_grad()
        batch = job.train.batch(order.indices(at))
        total, count = job.loss_of(model(batch["x"].double()), batch)
        (total / count).backward()
        optimizer.step()
        at = order.next(at)
    found = train_serially(job, steps=4).parameters["blocks.0.0.weight"]
    assert torch.allclose(found, model.blocks[0][0].weight, atol=1e-12)
    assert not torch.allclose(found, before, atol=1e-3)


def test_a_parameter_that_the_first_forward_makes_is_not_made_by_what_is_tried_before() -> None:
    class Making(coupled.Plain):
        def forward(self, x: Tensor) -> Any:
            if not hasattr(self, "gain"):
                self.gain = nn.Parameter(torch.ones(coupled.WIDTH))
            return super().forward(x) * self.gain

    job = coupled.make(Making)
    model = build_model(job)
    places_of(job, model)
    assert "gain" not in dict(model.named_parameters())


@pytest.mark.parametrize("name", sorted(STATEFUL))
def test_what_a_checkpoint_would_lose_is_refused_by_name(name: str) -> None:
    named = {"attribute": "calls", "buffer that is not saved": "calls", "late": "calls", "kept": "made"}
    named["copy that is not saved"] = "average"
    with pytest.raises(JobError, match=f"a forward changes .*{named.get(name, 'the loss, a closure or a global')}"):
        require_resumable(STATEFUL[name]())


@pytest.mark.parametrize("model", [coupled.Plain, Buffered, Remembering, Following, KeepingTable])
def test_what_a_checkpoint_holds_or_nothing_reads_is_no_reason(model: Callable[[], nn.Module]) -> None:
    require_resumable(coupled.make(model))


class Stacked(nn.Module):
    """Three pieces; `where` its own forward advances an attribute, `read` where it reads it. `late`: only once it is
    large. It is a float: 1.0, 2.0, ..."""

    def __init__(self, where: str, read: str, *, late: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(coupled.WIDTH, coupled.WIDTH) for _ in range(3))
        self.where, self.read, self.late, self.count = where, read, late, 0.0

    def forward(self, x: Tensor) -> Any:
        for at in ("front", "0", "1", "2"):
            if self.read == at:
                x = x * ((2.0 if self.count > 50 else 1.0) if self.late else 1 + self.count)
            if self.where == at:
                self.count += 1
            if at != "2":
                x = torch.tanh(self.layers[0 if at == "front" else int(at) + 1](x))
        return x


def staged(model: Callable[[], nn.Module], strategy: str = "pp(2, micro=2)") -> None:
    job, parsed = coupled.make(model), parse(strategy)
    require_state_in_pieces(job, parsed, layout_of(job, parsed).chain)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("where", ["0", "1", "2"])
def test_an_attribute_that_goes_stale_on_earlier_stages_is_refused_by_name(where: str, late: bool) -> None:
    sentence = r"the model's own forward changes count behind layers\.0, and the next forward reads it, but a stage"
    with pytest.raises(JobError, match=sentence):
        staged(lambda: Stacked(where, "front", late=late))


def test_an_attribute_that_every_stage_advances_or_nothing_reads_is_no_reason() -> None:
    staged(lambda: Stacked("front", "front"))
    staged(lambda: Stacked("2", "nowhere"))
    staged(lambda: Stacked("2", "front"), "dp(2)")


class Teacher(nn.Module):
    """A frozen copy that follows what learns; `buffer`: as buffers."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.student, self.head = nn.Linear(coupled.WIDTH, coupled.WIDTH), nn.Linear(coupled.WIDTH, coupled.WIDTH)
        start = self.student.weight.detach().clone()
        if buffer:
            self.register_buffer("teacher", start)
        else:
            self.teacher = nn.Parameter(start, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.lerp_(self.student.weight, 0.1)
        return self.head(torch.tanh(self.student(x)) + x @ self.teacher.T)


def test_a_frozen_parameter_that_islands_would_not_average_is_refused_by_name() -> None:
    frozen, loose = coupled.make(lambda: Teacher(buffer=False)), parse("dp(2, sync=local(2))")
    with pytest.raises(JobError, match="a forward changes the frozen parameter teacher, and islands average only"):
        require_state_averaged(frozen, loose)
    require_state_averaged(frozen, parse("dp(2)"))
    require_state_averaged(coupled.make(lambda: Teacher(buffer=True)), loose)


def test_a_write_into_what_is_not_gathered_gets_a_sentence() -> None:
    given_back = torch.zeros(()).expand(3)  # As zero=3 leaves a parameter outside of its block.
    sentence = "the model writes into parameters outside of the forward of the block that they belong to"
    with pytest.raises(LayoutWrong, match=sentence), naming_what_cut_it(parse("dp(2, zero=3)")):
        given_back.clamp_(-1, 1)
    with pytest.raises(RuntimeError), naming_what_cut_it(parse("dp(2, zero=2)")):
        given_back.clamp_(-1, 1)


class Buffers(coupled.Plain):
    """Of one buffer each: a mean of what it sees, a count, and a mean of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("slow", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.seen.lerp_(x.mean(), 0.1)
            self.calls += 1
            self.slow.lerp_(next(self.parameters()).mean(), 0.1)
        return super().forward(x)


def test_only_buffers_that_follow_the_samples_are_suspected_of_a_failed_proof() -> None:
    assert follow_samples(coupled.make(Buffers), ["calls", "seen", "slow"]) == ["seen"]


class Makes(OrderedDict):
    """Answers with an object of the class that it keeps, as the registry of activations of transformers does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


class AppendsTwice(list):
    def __iter__(self) -> Any:
        return (value for value in [*super().__iter__()] for _ in range(2))


ACTIVATIONS = Makes(relu=nn.ReLU, tanh=nn.Tanh)
LISTED = AppendsTwice([1, 2])


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.activation, self.listed = nn.Linear(4, 2), ACTIVATIONS["relu"], list(LISTED)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x))


def test_containers_that_answer_with_something_else_than_they_hold_are_left_as_they_are() -> None:
    job = coupled.make(Activated)
    outside = Outside(job)
    for _ in range(2):
        with outside.kept():
            Activated()
    assert list(dict.values(ACTIVATIONS)) == [nn.ReLU, nn.Tanh]
    assert list(ACTIVATIONS) == ["relu", "tanh"]
    with outside.kept():
        dict.__setitem__(ACTIVATIONS, "relu", nn.GELU)
        LISTED[:] = [3]
    assert list(dict.values(ACTIVATIONS)) == [nn.ReLU, nn.Tanh]
    assert list.__getitem__(LISTED, slice(None)) == [1, 2]

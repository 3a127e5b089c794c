"""What a job declares of its layout: it is obeyed, and what cannot be is refused with what there is instead."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.job import Job, JobError, LayoutHints, TensorData, cross_entropy, load_job
from shoal.layout.blocks import blocks, units
from shoal.layout.layout import facts_of, layout_of
from shoal.strategy import check, parse


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Named(nn.Module):
    """Blocks with names of their own, in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 8)
        self.step1, self.step2, self.step3 = Step(), Step(), Step()
        self.leave = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.step3(self.step2(self.step1(self.enter(x)))))


class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.leave = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().squeeze(-1)
            if len(mine):
                mixed = mixed.index_add(0, mine, expert(x[mine]) * weights[mine, number : number + 1])
        return self.leave(mixed)


def make(model: type[nn.Module] = Named, **hints: Any) -> Job:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    return Job(
        name="named",
        model=model,
        train=TensorData(x=x, y=torch.arange(32) % 3),
        loss=cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        global_batch=8,
        steps=1,
        layout=LayoutHints(**hints) if hints else None,
    )


def paths(job: Job, num: int) -> list[str]:
    layout = layout_of(job, parse(f"pp({num})"))
    assert layout.chain is not None
    return [layout.chain.links[first].path for first, _ in layout.stages(num)]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"roles": {"a.*": "rows"}}, "'a.*' is declared 'rows', but a role is one of column, row, whole. Did you mean"),
        ({"roles": {"a": None}}, "'a' is declared None"),
        ({"roles": {"": "row"}}, "the pattern ''"),
        ({"roles": ["a"]}, "roles is ['a'], but must map patterns to roles"),
        ({"stages": "blocks.1"}, "write ('blocks.1',)"),
        ({"stages": ()}, "at least one"),
        ({"stages": (3,)}, "stages is (3,)"),
        ({"stages": 3}, "stages is 3"),
        ({"stages": ("a", "b", "a")}, "names 'a' twice"),
        ({"blocks": "step*"}, "write ('step*',)"),
        ({"balanced": 1}, "balanced is 1, but must be True or False"),
        ({"experts": "no"}, "experts is 'no'"),
    ],
)
def test_hints_refuse_what_they_cannot_mean(given: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError) as refused:
        LayoutHints(**given)
    assert told in str(refused.value)


def test_a_job_refuses_a_layout_that_is_none() -> None:
    with pytest.raises(JobError, match=r"job 'named': layout is \{'roles': \{\}\}, but must be LayoutHints"):
        replace(make(), layout={"roles": {}})  # type: ignore[arg-type]


def test_hints_are_values_that_later_changes_of_their_arguments_do_not_reach() -> None:
    roles: dict[str, Any] = {"a": "row"}
    hints = LayoutHints(roles=roles, stages=["x"])  # type: ignore[arg-type]
    roles["b"] = "column"
    assert hints == LayoutHints(roles={"a": "row"}, stages=("x",))
    assert shoal.LayoutHints is LayoutHints


@pytest.mark.processes
def test_hints_need_no_torch() -> None:
    code = "import sys, shoal; shoal.LayoutHints(stages=('a',)); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_declared_stages_are_the_stages_in_whatever_order_they_are_named() -> None:
    assert paths(make(stages=("step3",)), 2) == ["enter", "step3"]
    assert paths(make(stages=("leave", "step1")), 3) == ["enter", "step1", "leave"]


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        (("step9",), "'step9', which is not a piece of the model; it can be cut before step1, step2, step3, leave"),
        (("step1.up",), "'step1.up', which is not a piece"),
        (("enter",), "'enter', which is the first piece"),
        (("step1", "step2"), "the cuts step1, step2, which make 3 stages, but the strategy has 2"),
    ],
)
def test_declared_stages_that_do_not_fit_are_refused(stages: tuple[str, ...], told: str) -> None:
    with pytest.raises(ValueError) as refused:
        layout_of(make(stages=stages), parse("pp(2)"))
    assert told in str(refused.value)


def test_a_stage_where_no_cut_can_be_is_refused_with_the_reason() -> None:
    class Twice(Named):
        def forward(self, x: Tensor) -> Tensor:
            x = self.step1(self.enter(x))
            return self.leave(self.step1(self.step2(x)))

    with pytest.raises(ValueError, match="but the model cannot be cut before it: it lies between two uses of step1"):
        layout_of(make(Twice, stages=("step2",)), parse("pp(2)"))


def test_stages_by_count_are_not_those_by_cost() -> None:
    class Uneven(Named):
        def __init__(self) -> None:
            super().__init__()
            self.step3 = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 8))  # type: ignore[assignment]

    def counts(job: Job) -> list[int]:
        return [stop - first for first, stop in layout_of(job, parse("pp(2)")).stages(2)]

    assert counts(make(Uneven, balanced=False))[0] in (2, 3)
    assert counts(make(Uneven))[0] > counts(make(Uneven, balanced=False))[0]


def test_declared_roles_are_obeyed_and_a_false_one_is_refused() -> None:
    plain = layout_of(make(), parse("tp(2)")).tensor
    assert plain is not None
    assert [region.columns for region in plain.regions][:1] == [("step1.up",)]
    whole = layout_of(make(roles={"step1.up": "whole"}), parse("tp(2)")).tensor
    assert whole is not None
    assert "step1.up" in whole.whole
    assert not any("step1.up" in region.columns for region in whole.regions)
    with pytest.raises(ValueError, match=r"'step9\.\*' is declared 'whole', but matches no projection"):
        layout_of(make(roles={"step9.*": "whole"}), parse("tp(2)"))


def test_declared_blocks_are_the_blocks_for_every_axis_and_for_zero() -> None:
    assert blocks(make().model()) == []
    job = make(blocks=("step*",))
    found = ["step1", "step2", "step3"]
    assert [path for path, _ in blocks(job.model())] == found
    assert [unit.name for unit in units(job.model())] == ["", *found]
    layout = layout_of(job, parse("pp(2)"))
    assert layout.chain is not None
    assert [link.path for link in layout.chain.links if link.is_block] == found
    assert [path for path, _ in blocks(replace(job, steps=5).model())] == found, "a changed job keeps them"
    assert blocks(replace(job, layout=None).model()) == []


@pytest.mark.parametrize(
    ("patterns", "told"),
    [
        (("stap*",), "blocks names 'stap*', but no module with parameters has that name; the model has enter, step1"),
        (("step*", "step1.up"), "'step1.up', which lies within the block step1"),
    ],
)
def test_blocks_that_are_not_there_are_refused(patterns: tuple[str, ...], told: str) -> None:
    with pytest.raises(JobError) as refused:
        layout_of(make(blocks=patterns), parse("pp(2)"))
    assert told in str(refused.value)


def test_declared_blocks_may_not_be_containers_that_are_never_called() -> None:
    job = replace(load_job("language:tiny"), layout=LayoutHints(blocks=("blocks*",)))
    assert [path for path, _ in blocks(job.model())] == ["blocks.0", "blocks.1"]


def test_experts_that_the_job_keeps_together_are_not_dealt_out() -> None:
    strategy = parse("ep(2)")
    job = make(Choice)
    assert check(strategy, facts=facts_of(job, layout_of(job, strategy))) == ()
    job = make(Choice, experts=False)
    [refusal] = check(strategy, facts=facts_of(job, layout_of(job, strategy)))
    assert "experts: the job declares experts=False" in refusal.reason


def test_layout_of_is_there_for_people() -> None:
    layout = shoal.layout_of(load_job("language:tiny"))
    assert layout.chain is not None
    assert layout.tensor is not None
    assert layout.context is not None
    assert layout.experts is not None

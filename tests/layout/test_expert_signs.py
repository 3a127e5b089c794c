"""A trace rules experts out only where there can be none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from shoal.job import Job, TensorData, cross_entropy
from shoal.layout.experts.signs import may_hold_experts
from shoal.layout.layout import layout_of
from shoal.layout.trace import trace


class Parts(nn.Module):
    def __init__(self, how: Callable[[list[nn.Module], Tensor], Tensor]) -> None:
        super().__init__()
        self.how = how
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.router, self.leave = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return self.leave(self.how(list(self.parts), x) * weights[:, :1])


def chain(parts: list[nn.Module], x: Tensor) -> Tensor:
    for part in parts:
        x = part(x)
    return x


def side_by_side(parts: list[nn.Module], x: Tensor) -> Tensor:
    return sum((part(x) for part in parts), torch.zeros_like(x))


def twice(parts: list[nn.Module], x: Tensor) -> Tensor:
    return chain(parts, chain(parts, x))


def broken_chain(parts: list[nn.Module], x: Tensor) -> Tensor:
    return parts[1](parts[0](x)) + parts[2](x)


def job_of(how: Callable[[list[nn.Module], Tensor], Tensor]) -> Job:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    return Job(
        name="parts",
        model=partial(Parts, how),
        train=TensorData(x=x, y=torch.arange(16) % 3),
        loss=cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        global_batch=4,
        steps=1,
    )


@pytest.mark.parametrize(("how", "may"), [(chain, False), (side_by_side, True), (twice, True), (broken_chain, True)])
def test_only_a_chain_rules_experts_out(how: Callable[[list[nn.Module], Tensor], Tensor], may: bool) -> None:
    assert may_hold_experts(trace(job_of(how))) is may


def test_a_model_that_looks_at_values_is_never_ruled_out() -> None:
    def looking(parts: list[nn.Module], x: Tensor) -> Tensor:
        return chain(parts, x) if bool((x.sum() < 1e9).item()) else x

    found = trace(job_of(looking))
    assert not found.fake
    assert may_hold_experts(found)


def test_a_chain_is_not_built_for_real_to_be_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a run of real samples")

    monkeypatch.setattr("shoal.layout.layout.survey_experts", refuse)
    assert layout_of(job_of(chain)).experts is not None
    with pytest.raises(AssertionError, match="real samples"):
        layout_of(job_of(side_by_side))

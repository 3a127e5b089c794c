"""Sharded L-BFGS in one process makes the steps of torch.optim.LBFGS."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal.job import ShardedLBFGS
from shoal.job.elementwise import probe


def run(kind: Any, options: dict[str, Any], steps: int = 6) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    x = torch.randn(64, 6, dtype=torch.float64)
    optimizer = kind(model.parameters(), **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(steps)]
    return losses, [param.detach() for param in model.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.3, "max_iter": 5, "history_size": 3},
        {"lr": 1.0, "max_iter": 6},
        {"lr": 1.0, "max_iter": 30, "max_eval": 7, "tolerance_grad": 1e-2},
        {"lr": 0.5, "max_iter": 4, "tolerance_change": 1e-3},
    ],
)
def test_steps_are_those_of_pytorch(options: dict[str, Any]) -> None:
    (losses, values), (wanted, there) = run(ShardedLBFGS, options), run(torch.optim.LBFGS, options)
    assert losses == pytest.approx(wanted, rel=1e-10)
    for one, other in zip(values, there, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-11)


def test_it_may_be_given_slices() -> None:
    model = nn.Linear(4, 3)
    found = probe(lambda groups: ShardedLBFGS(groups, lr=0.1, max_iter=2), model)
    assert found.elementwise
    assert found.needs_closure
    assert probe(lambda groups: torch.optim.LBFGS(groups, lr=0.1, max_iter=2), model).coupled


def test_several_groups_are_refused() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(2))], "lr": 2.0}]
    with pytest.raises(ValueError, match="one group"):
        ShardedLBFGS(groups)

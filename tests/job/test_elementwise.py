"""The probe that tells whether an optimiser may be cut at any element."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from shoal.job.elementwise import elementwise


class Normalised(torch.optim.Optimizer):
    """Divides the step by the norm of the whole parameter, as LARS and LAMB do."""

    def __init__(self, groups: Any, lr: float = 0.1) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.norm() / parameter.grad.norm() * parameter.grad)


class RowNormalised(Normalised):
    """Refuses anything but matrices, as Muon does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad / parameter.grad.norm(dim=1, keepdim=True))


@pytest.mark.parametrize(
    "factory",
    [
        partial(torch.optim.SGD, lr=0.1),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        partial(torch.optim.Adam, lr=0.1),
        partial(torch.optim.Adam, lr=0.1, amsgrad=True),
        partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1),
        partial(torch.optim.AdamW, lr=0.1, fused=True),
        partial(torch.optim.RMSprop, lr=0.01, centered=True),
        partial(torch.optim.Adagrad, lr=0.1),
        partial(torch.optim.Adadelta, lr=0.1),
        partial(torch.optim.Adamax, lr=0.1),
        partial(torch.optim.NAdam, lr=0.1),
        partial(torch.optim.Rprop, lr=0.1),
    ],
    ids=lambda factory: factory.func.__name__,
)
def test_optimizers_that_look_at_elements_alone_are_recognised(factory: Any) -> None:
    assert elementwise(factory)


@pytest.mark.parametrize(
    "factory",
    [Normalised, RowNormalised, partial(torch.optim.Adafactor, lr=0.1)],
    ids=["norm", "rows", "Adafactor"],
)
def test_optimizers_that_look_at_a_whole_parameter_are_recognised(factory: Any) -> None:
    assert not elementwise(factory)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_is_not_elementwise() -> None:
    assert not elementwise(partial(torch.optim.Muon, lr=0.1))


def test_the_probe_leaves_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    elementwise(partial(torch.optim.SGD, lr=0.1))
    assert torch.equal(before, torch.random.get_rng_state())


def test_an_optimizer_that_cannot_run_at_all_raises_its_own_error() -> None:
    with pytest.raises(ValueError, match="learning rate"):
        elementwise(partial(torch.optim.SGD, lr=-1.0))

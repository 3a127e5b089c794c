"""A rehearsal changes nothing: buffers, attributes, lists and new names are as they were, and the run sees copies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal.layout.experts.rehearsal import random_state, rehearsing, set_random_state


class Untidy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("nothing", None)
        self.plain = torch.zeros(2)
        self.seen: list[int] = [1]
        self.by_name: dict[str, int] = {}
        self.number = 0
        self.child = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.plain += 1
        self.seen.append(2)
        self.by_name["x"] = 1
        self.number += 1
        self.fresh = x.sum()
        self.register_buffer("late", torch.ones(1))
        return self.child(x) * self.number + self.count.sum() + self.plain.sum()


def test_a_rehearsal_leaves_no_trace_and_the_objects_are_the_same_ones() -> None:
    module = Untidy()
    buffer, plain, seen = module.count, module.plain, module.seen
    state = {name: value.clone() for name, value in module.state_dict().items()}
    x = torch.randn(4, 3)
    with rehearsing(module):
        rehearsed = module(x)
    assert module.count is buffer
    assert module.plain is plain
    assert module.seen is seen
    assert (seen, module.by_name, module.number) == ([1], {}, 0)
    assert not hasattr(module, "fresh")
    assert not hasattr(module, "late")
    assert plain.sum() == 0
    assert {name: value.tolist() for name, value in module.state_dict().items()} == {
        name: value.tolist() for name, value in state.items()
    }
    # The run that counts starts from the same state, so it comes to the same.
    assert torch.equal(module(x), rehearsed)
    assert module.number == 1


def test_an_exception_in_a_rehearsal_leaves_no_trace_either() -> None:
    module = Untidy()
    # Batch norm refuses what has the wrong width, after all else was changed.
    with pytest.raises(RuntimeError), rehearsing(module):
        module(torch.randn(4, 5))
    assert module.number == 0
    assert module.count.sum() == 0


def test_a_module_that_is_left_out_keeps_what_it_did() -> None:
    module = Untidy()
    with rehearsing(module, but=[module.child]):
        module(torch.randn(4, 3))
    assert module.child.num_batches_tracked == 1
    assert module.count.sum() == 0


def test_a_buffer_may_be_used_and_changed_in_a_rehearsal_that_carries_gradients() -> None:
    module = Untidy()
    x = torch.randn(4, 3, requires_grad=True)
    with rehearsing(module):
        early = module(x) * module.count[0]
    (early.sum() + module(x).sum()).backward()
    assert x.grad is not None


def test_random_numbers_go_back_to_where_they_were() -> None:
    before = random_state(torch.device("cpu"))
    drawn = torch.rand(3)
    set_random_state(before, torch.device("cpu"))
    assert torch.equal(torch.rand(3), drawn)

"""What stands for the results of pieces that belong to earlier stages: tensors of the right shapes, of zeros."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import tree_map

from shoal.layout.experts.rehearsal import random_state, set_random_state
from shoal.layout.held_state import results_held
from shoal.parallel.pipeline.arrival import Arrival

WRITTEN = "more than one element of the written-to tensor refers to a single memory location"
"""What PyTorch reports where code writes into a parameter that has no memory of its own at the time."""

LOOKS_AT_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""What a fake raises when it is asked for a value."""


def learning(placeholder: Any, learns: bool) -> Any:
    """A placeholder that requires a gradient where the tensor would: the model's code may hang a hook on it."""
    return Arrival(placeholder, learns=True).enter() if learns else placeholder


class Like:
    """The shape and type of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = tuple(tensor.shape), tensor.dtype, tensor.device


def zeros(like: Any) -> Any:
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device) if isinstance(like, Like) else like


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of the model as it was built, of fakes: it computes nothing but shapes."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    known: dict[int, Any] = {}
    with mode:
        for tensor in [*model.parameters(), *model.buffers()]:
            like = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            known[id(tensor)] = nn.Parameter(like, requires_grad=False) if isinstance(tensor, nn.Parameter) else like
        for tensor in results_held(model):
            known[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    # Copied around its tensors: each is known already, as its fake.
    return copy.deepcopy(model, known)


def shapes_of(piece: nn.Module, args: Any, kwargs: Any) -> Any:
    """What a piece would give back, found on fakes: nothing is computed. A piece whose code looks at values (which
    tokens chose an expert) cannot run on fakes; it runs once on zeros."""
    fakes = [p for p in piece.parameters() if isinstance(p, FakeTensor)]
    mode = fakes[0].fake_mode if fakes else FakeTensorMode(allow_non_fake_inputs=True)
    faked = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
    device = next((p.device for p in piece.parameters()), torch.device("cpu"))
    before = random_state(device)
    with torch.no_grad():
        try:
            with mode:
                output = piece(*faked[0], **faked[1])
        except LOOKS_AT_VALUES:
            given = tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, (args, kwargs))
            output = _of_zeros(piece)(*given[0], **given[1])
        finally:
            set_random_state(before, device)
    return tree_map(lambda x: Like(x) if isinstance(x, torch.Tensor) else x, output)


def _of_zeros(piece: nn.Module) -> nn.Module:
    """A copy of a piece of fakes, with zeros in their place."""
    known: dict[int, Any] = {}
    for tensor in [*piece.parameters(), *piece.buffers()]:
        zeros = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device)
        known[id(tensor)] = nn.Parameter(zeros, requires_grad=False) if isinstance(tensor, nn.Parameter) else zeros
    known |= {id(tensor): tensor.detach() for tensor in results_held(piece)}
    return copy.deepcopy(piece, known)

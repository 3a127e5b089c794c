"""Experts in a list: identical modules, each called on its own tokens by an owner that routes.

A trial distinguishes them from a chain of layers: the owner runs again with every member returning zeros. If the
members receive the same inputs as before, no input depends on an output, so all of them can be computed elsewhere and
at once. `parallel/expert/listed.py` relies on the same condition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from shoal.layout.experts.rehearsal import rehearsing, set_random_state
from shoal.layout.experts.watch import ExpertWatch, Frame, MemberCall, copied, device_of

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Relative tolerance for results that must agree up to the order of sums; coarser dtypes get 0.05."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """A list of experts."""

    owner: str
    width: int
    result_width: int
    keeps_dtype: bool


def like_members(module: nn.Module) -> tuple[str, ...]:
    """The keys of a list's members, if there are two or more, of one class, with parameters of the same shapes."""
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return ()
    held = {key: child for key, child in module._modules.items() if child is not None and _has_parameters(child)}
    shapes = {(type(child), *((name, p.shape) for name, p in child.named_parameters())) for child in held.values()}
    alike = len(held) >= 2 and len(shapes) == 1 and len({id(child) for child in held.values()}) == len(held)
    return tuple(held) if alike else ()


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def only_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The tokens, if they are the only argument of an expert."""
    given = [*args, *kwargs.values()]
    if len(given) != 1 or not isinstance(given[0], torch.Tensor):
        return None
    return given[0] if given[0].is_floating_point() and given[0].dim() >= 1 else None


@contextmanager
def replaced(container: nn.Module, placeholders: Mapping[str, nn.Module]) -> Iterator[None]:
    """Inside, the container holds the placeholders under the same keys. Hooks of the real members do not run."""
    real = {key: container._modules[key] for key in placeholders}
    container._modules.update(placeholders)
    try:
        yield
    finally:
        container._modules.update(real)


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two results are the same up to rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.numel() or torch.equal(a, b):
        return True
    size = float(b.abs().max())
    return float((a - b).abs().max()) <= TOLERANCE.get(a.dtype, 0.05) * max(size, 1e-30)


def why_not_listed(model: nn.Module, path: str, watch: ExpertWatch) -> Listed | str | None:
    """The experts of this list; a reason why they cannot be distributed; or None if they are not experts."""
    frame, calls = _owner(watch.list_calls[path])
    if frame is None:
        return None
    container = model.get_submodule(path)
    members = {key: container._modules[key] for key in watch.lists[path]}
    if not _is_routed(frame, list(members.values()), len(members)):  # type: ignore[arg-type]
        return None
    asked = [only_tensor(call.args, call.kwargs) for call in calls]
    answers = [call.output for call in calls]
    simple = all(
        x is not None and isinstance(y, torch.Tensor) and y.is_floating_point() and y.shape[:-1] == x.shape[:-1]
        for x, y in zip(asked, answers, strict=True)
    )
    notes = _rehearsed(frame, container, watch.lists[path], calls)
    if notes is None:
        return None
    if not notes:
        return "its members look like experts, but are also called from elsewhere, not only through the list"
    if not _asked_alike(notes, calls):
        return None
    if not simple:
        return (
            f"its {len(members)} members are called like experts, but take more than one tensor of tokens, or do not "
            "return one tensor with a row for each token; call them as expert(tokens)"
        )
    first, answer = asked[0], answers[0]
    assert first is not None
    widths = {(x.shape[-1], y.shape[-1]) for x, y in zip(asked, answers, strict=True)}  # type: ignore[union-attr]
    if len(widths) != 1:
        return "its experts are called with tokens of different widths"
    expert = members[watch.lists[path][calls[0].member]]
    assert expert is not None
    if any(isinstance(part, _BatchNorm) for part in expert.modules()) or not _row_by_row(expert, first):
        return (
            "an expert does not treat rows of tokens one by one: it fails on them, or its result for one token "
            "depends on the others (attention, batch norm), so tokens of several ranks cannot be batched together"
        )
    owner = next(name for name, module in model.named_modules() if module is frame.module)
    return Listed(
        owner=owner, width=first.shape[-1], result_width=answer.shape[-1], keeps_dtype=answer.dtype == first.dtype
    )


def _owner(calls: list[MemberCall]) -> tuple[Frame | None, list[MemberCall]]:
    """The innermost module that encloses all calls, in its first run, and the calls of that run."""
    depth = min(len(call.around) for call in calls)
    while depth and len({id(call.around[depth - 1].module) for call in calls}) > 1:
        depth -= 1
    if not depth:
        return None, []
    frame = calls[0].around[depth - 1]
    # A module that does not contain the list (a base class's forward, say) was not recorded in enough detail to rerun.
    return (frame if frame.random else None), [call for call in calls if call.around[depth - 1] is frame]


def _is_routed(frame: Frame, members: list[nn.Module], count: int) -> bool:
    """Whether the owner can choose among `count` experts: it has a parameter with such a dimension outside the experts,
    or an argument that carries the choice (a weight for each expert, or indices of experts)."""
    of_experts = {id(part) for member in members for part in member.modules()}
    for module in frame.module.modules():
        if id(module) not in of_experts and any(count in p.shape for p in module.parameters(recurse=False)):
            return True
    for value in tree_leaves((frame.args, frame.kwargs)):
        if isinstance(value, torch.Tensor) and value.dim():
            numbers = not value.is_floating_point() and value.dim() >= 2 and value.numel()
            if value.shape[-1] == count or (numbers and int(value.max()) <= count and int(value.min()) >= 0):
                return True
    return False


class _Silent(nn.Module):
    """Records its inputs and returns zeros."""

    def __init__(self, place: int, like: Any, notes: list[tuple[int, Any]]) -> None:
        super().__init__()
        self.place = place
        self.like = like
        self.notes = notes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.notes.append((self.place, copied((args, kwargs))))
        tokens = only_tensor(args, kwargs)
        if tokens is not None and isinstance(self.like, torch.Tensor):
            return self.like.new_zeros(*tokens.shape[:-1], self.like.shape[-1])
        return tree_map(lambda x: x * 0 if isinstance(x, torch.Tensor) else x, self.like)


def _rehearsed(
    frame: Frame, container: nn.Module, keys: tuple[str, ...], calls: list[MemberCall]
) -> list[tuple[int, Any]] | None:
    """The inputs of members when all of them return zeros; None if the owner cannot run like that."""
    notes: list[tuple[int, Any]] = []
    placeholders = {key: _Silent(place, calls[0].output, notes) for place, key in enumerate(keys)}
    set_random_state(frame.random, device_of(frame.module))
    members = [module for key in keys if (module := container._modules[key]) is not None]
    try:
        with torch.no_grad(), rehearsing(frame.module, but=members), replaced(container, placeholders):
            frame.module.forward(*copied(frame.args), **copied(frame.kwargs))
    except Exception:
        # If the owner's code fails on zeros, it cannot be run in two parts either.
        return None
    return notes


def _asked_alike(notes: list[tuple[int, Any]], calls: list[MemberCall]) -> bool:
    """Whether members received the same inputs in the rehearsal as in the run: then no input depends on an output."""
    if [place for place, _ in notes] != [call.member for call in calls]:
        return False
    for (_, given), call in zip(notes, calls, strict=True):
        before, after = tree_leaves((call.args, call.kwargs)), tree_leaves(given)
        if len(before) != len(after):
            return False
        for a, b in zip(after, before, strict=True):
            if isinstance(b, torch.Tensor) and not (isinstance(a, torch.Tensor) and alike(a, b)):
                return False
    return True


def _row_by_row(expert: nn.Module, asked: torch.Tensor) -> bool:
    """Whether an expert treats each token independently."""
    was_training = expert.training
    width = asked.shape[-1]
    expert.eval()
    try:
        with torch.no_grad(), rehearsing(expert):
            # Copies: an expert may change what it is given.
            rows = torch.cat([asked.reshape(-1, width)[:4], torch.randn(4, width).to(asked)])
            whole = expert(rows.clone())
            if not alike(expert(rows.flip(0)[:-1]), whole.flip(0)[:-1]):
                return False
            flat = expert(asked.reshape(-1, width).clone())
            return not asked.numel() or alike(expert(asked.clone()).reshape(-1, whole.shape[-1]), flat)
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
        return False
    finally:
        expert.train(was_training)

"""Runs an optimiser in one layout: builds it for every rank, steps it, reads the parameters and its state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from shoal.job.errors import JobError
from shoal.job.kept import common, copied, exact, holders, holds_parameters, is_plain, layers, put_state, state_of
from shoal.job.pointwise import OptimizerFactory, PointwiseCheck
from shoal.job.probe_layouts import Copy, Layout, ProbeSlice, Row, start_of

TOLERANCE = 1e-12
LOW_PRECISION = 1e-5
"""Tolerance for state of lower precision than float64: the last bit depends on where a vectorised loop ends."""
MIDDLE = 8
"""Number of steps after which a run can be resumed."""


class ProbeRun:
    """Optimisers over one layout of the copies, all starting from the same values."""

    def __init__(self, factory: OptimizerFactory, copies: Sequence[Copy], layout: Layout) -> None:
        self.copies, self.layout = copies, layout
        self.params = [[_param(tensor, copies) for tensor in rank] for rank in layout]
        self.placeholders: list[list[tuple[int, nn.Parameter]]] = []
        self.groups: list[list[dict[str, Any]]] = []
        self.optimizers = []
        for rank, params in zip(layout, self.params, strict=True):
            groups, empty = _groups(copies, rank, params)
            self.placeholders.append(empty)
            self.groups.append([dict(group) for group in groups])
            self.optimizers.append(factory(groups))
        given = {id(param) for group in self.groups[0] for param in group["params"]}
        held = {id(param) for group in self.optimizers[0].param_groups for param in group["params"]}
        self.name = type(self.optimizers[0]).__name__
        if given != held:
            raise JobError(
                f"{self.name} does not hold the parameters that it was given: the function `optimizer` must pass its "
                "groups on, as in lambda groups: torch.optim.AdamW(groups, lr=1e-3)"
            )
        self.needs_closure = needs_closure(self.optimizers[0])
        self.counters: set[str] = set()
        """Locations of numbers that grew by one in each of the first steps."""
        self.snapshot: tuple[Any, ...] = ()
        self._before = {where: exact(value) for where, value in self.common(0).items()}

    def train(self, rows: Sequence[Row], **how: Any) -> list[list[Tensor]]:
        """The copies after every step; see `stepping`."""
        return list(self.stepping(rows, **how))

    def stepping(
        self,
        rows: Sequence[Row],
        *,
        jumps: Mapping[int, int] | None = None,
        watch: PointwiseCheck | None = None,
        sparse: bool = False,
        closure: bool = False,
    ) -> Iterator[list[Tensor]]:
        """Steps once per row of gradients and yields the copies. `jumps`: step -> value to which counters are set;
        `watch` sees every operation; `closure`: pass one although the signature does not require it."""
        seen: list[dict[str, float]] = []
        for number, row in enumerate(rows):
            if jumps and number in jumps:
                self._set_counters(jumps[number])
            for optimizer, rank, params, empty in zip(
                self.optimizers, self.layout, self.params, self.placeholders, strict=True
            ):
                for tensor, param in zip(rank, params, strict=True):
                    gradient = _joined(row, tensor)
                    param.grad = gradient if gradient is None or not sparse else gradient.to_sparse()
                for which, param in empty:
                    has = any(g is not None for g, each in zip(row, self.copies, strict=True) if each.which == which)
                    param.grad = torch.zeros_like(param) if has else None
                if watch is not None:
                    watch.follow(params)
                    watch.follow(param.grad for param in params)
                with watch or nullcontext():
                    if self.needs_closure or closure:
                        optimizer.step(_closure(params))
                    else:
                        optimizer.step()
            if watch is not None and number < 3:
                seen.append({key: number for key, number, _ in self._numbers()})
                self.counters = {key for key in seen[-1] if all(key in each for each in seen)}
                self.counters = {key for key in self.counters if all(b[key] - a[key] == 1 for a, b in pairwise(seen))}
            if number + 1 == MIDDLE:
                self.snapshot = self._kept()
            yield self.values()

    def _kept(self) -> tuple[Any, ...]:
        """What a checkpoint would hold now, for one optimiser over full parameters."""
        (optimizer,), (params,) = self.optimizers[:1], self.params[:1]
        ids = {id(param) for param in params}
        shared = {
            where: {
                key: value
                for key, value in entries.items()
                if is_plain(value)
                and not holds_parameters(value, ids)
                and self._before.get(f"{where}: {key!r}") != exact(value)
            }
            for where, entries in common(optimizer).items()
        }
        return copied(([param.detach() for param in params], [state_of(optimizer, p) for p in params], shared))

    def resumed(self, factory: OptimizerFactory) -> ProbeRun:
        """A new optimiser that is restored from what a checkpoint in the middle would hold."""
        fresh = ProbeRun(factory, self.copies, self.layout)
        values, states, shared = copied(self.snapshot)
        optimizer = fresh.optimizers[0]
        for param, value, state in zip(fresh.params[0], values, states, strict=True):
            param.data.copy_(value)
            if state:
                put_state(optimizer, param, state)
        holding = holders(optimizer)
        for where, entries in shared.items():
            if where in holding:
                holding[where].update(entries)
        return fresh

    def _numbers(self) -> Iterator[tuple[str, float, Callable[[float], Any]]]:
        """Numbers in the optimisers' state: location (the same for every group and parameter), value, setter."""
        for optimizer in self.optimizers:
            holders_of: list[tuple[str, Any]] = [
                (where.rstrip("0123456789"), holder) for where, holder in holders(optimizer).items()
            ]
            for prefix, each in layers(optimizer):
                holders_of += [(f"{prefix}parameter", kept) for kept in each.state.values() if isinstance(kept, dict)]
            for where, holder in holders_of:
                for key, value in list(holder.items()):
                    if not isinstance(key, str):
                        continue
                    if type(value) in (int, float):
                        yield f"{where}: {key}", value, partial(_put, holder, key, type(value))
                    elif isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
                        yield f"{where}: {key}", value.item(), value.detach().fill_

    def _set_counters(self, following: int) -> None:
        """Sets step counters so that `following` is the next number."""
        for key, _, put in list(self._numbers()):
            if key in self.counters:
                put(following - 1)

    def values(self) -> list[Tensor]:
        found = [torch.empty(each.numel, dtype=each.dtype) for each in self.copies]
        for rank, params in zip(self.layout, self.params, strict=True):
            for tensor, param in zip(rank, params, strict=True):
                flat, at = param.detach().reshape(-1), 0
                for place, start, stop in tensor.sources:
                    found[place][start:stop] = flat[at : at + stop - start]
                    at += stop - start
        return found

    def common(self, rank: int) -> dict[str, Any]:
        kept = common(self.optimizers[rank])
        return {f"{where}: {key!r}": value for where, entries in kept.items() for key, value in entries.items()}

    def group_counts(self, rank: int) -> dict[str, int]:
        """Groups of an optimiser and of those that it wraps."""
        return {prefix: len(each.param_groups) for prefix, each in layers(self.optimizers[rank])}

    def states(self) -> Iterator[tuple[str, nn.Parameter, Any]]:
        for optimizer, params in zip(self.optimizers, self.params, strict=True):
            for param in params:
                for key, value in state_of(optimizer, param).items():
                    yield key, param, value

    def described(self) -> dict[str, Any]:
        """The fields of a `Probe` that do not depend on other layouts."""
        kept, opaque = {}, {}
        params = {id(param) for row in self.params for param in row}
        for where, value in self.common(0).items():
            if holds_parameters(value, params) and is_plain(value):
                continue
            changed = self._before.get(where) != exact(value)
            if changed and is_plain(value):
                kept[where] = value
            elif changed:
                opaque[where] = type(value).__name__
        for key, _, value in self.states():
            if is_plain(value):
                kept.setdefault(f"state of a parameter: {key!r}", value)
            else:
                opaque[f"state of a parameter: {key!r}"] = type(value).__name__
        has_lr = all("lr" in group for group in self.optimizers[0].param_groups)
        return {
            "name": self.name,
            "needs_closure": self.needs_closure,
            "has_lr": has_lr,
            "kept": kept,
            "opaque": opaque,
        }

    def unsliceable(self) -> str:
        """Why parameters cannot be replaced by slices, other than different results; empty if they can."""
        wanted = [[id(param) for param in group["params"]] for group in self.groups[0]]
        for _, each in layers(self.optimizers[0]):
            if [[id(param) for param in group["params"]] for group in each.param_groups] != wanted:
                return "it arranges its parameters in groups of its own"
        params = {id(param) for row in self.params for param in row}
        for where, value in self.common(0).items():
            if holds_parameters(value, params):
                return f"it keeps a list of its parameters ({where})"
        return ""

    def tolerance(self) -> float:
        tensors = (leaf for _, _, value in self.states() for leaf in tensors_in(value))
        low = any(leaf.is_floating_point() and leaf.dim() and leaf.dtype != torch.float64 for leaf in tensors)
        return LOW_PRECISION if low else TOLERANCE


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` requires a function that computes the loss. The class is inspected, because a learning-rate
    scheduler replaces `step` on the instance."""
    try:
        parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    except (TypeError, ValueError):
        return False
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(each.default is inspect.Parameter.empty and each.kind not in free for each in parameters)


def _put(holder: Any, key: str, kind: type, value: float) -> None:
    holder[key] = kind(value)


def _param(tensor: ProbeSlice, copies: Sequence[Copy]) -> nn.Parameter:
    parts = [start_of(copies[place], place)[start:stop] for place, start, stop in tensor.sources]
    param = nn.Parameter(torch.cat(parts).view(tensor.shape))
    vars(param).update(tensor.attributes)
    return param


def _joined(row: Row, tensor: ProbeSlice) -> Tensor | None:
    parts = [(row[place], start, stop) for place, start, stop in tensor.sources]
    found = [gradient[start:stop] for gradient, start, stop in parts if gradient is not None]
    return torch.cat(found).view(tensor.shape) if len(found) == len(parts) else None


def _groups(
    copies: Sequence[Copy], rank: list[ProbeSlice], params: list[nn.Parameter]
) -> tuple[list[dict[str, Any]], list[tuple[int, nn.Parameter]]]:
    """The groups of one rank. One without parameters of a group has a placeholder there, as in the engine: with slices
    one without elements."""
    options: dict[int, dict[str, Any]] = {each.which: each.options for each in copies}
    sliced = any(tensor.shape != copies[tensor.sources[0][0]].shape or len(tensor.sources) > 1 for tensor in rank)
    groups, empty = [], []
    for which in sorted(options):
        mine = [param for tensor, param in zip(rank, params, strict=True) if tensor.which == which]
        if sliced:
            placeholder = nn.Parameter(torch.zeros(0, dtype=torch.float64))
            empty.append((which, placeholder))
            mine.append(placeholder)
        else:
            mine += _lacking([each for each in copies if each.which == which], rank)
        groups.append({"params": mine, **options[which]})
    return groups, empty


def _lacking(copies: Sequence[Copy], rank: list[ProbeSlice]) -> list[nn.Parameter]:
    """Of every number of dimensions that a rank has no parameter of in this group: the smallest, which never has a
    gradient, as in the engine."""
    held = {(tensor.which, len(tensor.shape)) for tensor in rank}
    kinds: dict[int, Copy] = {}
    for each in sorted(copies, key=lambda copy: copy.numel):
        kinds.setdefault(len(each.shape), each)
    return [
        nn.Parameter(torch.zeros(each.shape, dtype=each.dtype))
        for dims, each in kinds.items()
        if (each.which, dims) not in held
    ]


def _closure(params: list[nn.Parameter]) -> Callable[[], Tensor]:
    """A loss whose minimum lies in the direction of the given gradients."""
    goals = [param.detach() - (0 if param.grad is None else param.grad) for param in params]

    def closure() -> Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for param, goal in zip(params, goals, strict=True):
            param.grad = param.detach() - goal
            loss = loss + 0.5 * param.grad.abs().square().sum()
        return loss

    return closure


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(entry)

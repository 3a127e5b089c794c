"""A region at work: how tensors get into its columns and out of its rows.

Between regions the stream is full on every rank, or cut along the sequence, or along the samples. Columns that are
given the same tensor share its way in, so that their gradients are summed on this rank before anything is sent.

Uncut parameters applied to cut values inside a region (a norm over the width of a head) get part of their gradient
on each rank. Which they are shows in the graph of the first forward; unless the caller sums them anyway, a hook does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.weak import TensorWeakRef

from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Members
from shoal.layout.crossings import Crossing, Tally
from shoal.parallel.collectives import copy_in, gather, scatter_sum, sum_out
from shoal.parallel.context.global_view import outside_global_view
from shoal.parallel.recompute import recomputing

Between = Literal["whole", "sequence", "batch"]

WAYS_IN = ("_CopyInBackward", "_GatherBackward")
"""Nodes of autograd's graph at which a region begins."""
OUTSIDE = ("_SumOutBackward", "_ScatterSumBackward", "_SplitBackward", "_GatherWholeBackward")
"""Nodes that lie between regions, never inside one."""


@dataclass(slots=True)
class _Entered:
    """A tensor that columns were given, and what they were given in its place. The tensor itself is not kept alive."""

    given: TensorWeakRef
    version: int | None
    with_gradient: bool
    inside: torch.Tensor

    def is_of(self, x: torch.Tensor) -> bool:
        same = self.given() is x and self.version == _version(x)
        return same and self.with_gradient == torch.is_grad_enabled()


class RunningRegion:
    """What the columns and rows of one region have in common."""

    def __init__(
        self,
        members: Members,
        *,
        name: str,
        kind: str,
        between: Between,
        dim: int,
        tally: Tally,
        summed: set[int],
        whole: Mapping[int, str],
    ) -> None:
        """`dim` is where the stream is cut outside the region. `summed` are identities of whole parameters whose
        gradients are summed over the ranks anyway or by now; `whole` are those of all whole parameters, with names."""
        self.members, self.name, self.kind, self.tally = members, name, kind, tally
        self.between, self.dim = between, dim
        self.gathered_at_entry = False
        self._summed, self._whole = summed, whole
        self._entered: list[_Entered] = []
        self._producers: list[Any] = []
        self._looked_into = False

    @outside_global_view
    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """What a column computes on in place of its input."""
        for known in self._entered:
            if known.is_of(x):
                return known.inside
        inside = working_precision(x)
        if not self.gathered_at_entry:
            inside = self.bring_in(inside)
        self._entered.append(_Entered(TensorWeakRef(x), _version(x), torch.is_grad_enabled(), inside))
        return inside

    @outside_global_view
    def bring_in(self, x: torch.Tensor) -> torch.Tensor:
        gradient = torch.is_grad_enabled() and x.requires_grad
        if gradient and not self._looked_into:
            self._producers.append(x.grad_fn)
        if self.between == "whole":
            note(self.tally, "copy_in", x, gradient=gradient)
            return copy_in(x, self.members)
        note(self.tally, "gather", x, times=self.members.size, gradient=gradient)
        return gather(x, self.members, self._dim_of(x))

    @outside_global_view
    def leave(self, partial_sum: torch.Tensor) -> torch.Tensor:
        """A row's result, from this rank's partial sum of it."""
        # Whatever comes next into the columns belongs to another pass.
        self._entered = []
        if torch.is_grad_enabled() and partial_sum.requires_grad and not self._looked_into:
            self._look_into(partial_sum)
        gradient = torch.is_grad_enabled() and partial_sum.requires_grad
        if self.between == "whole":
            note(self.tally, "sum_out", partial_sum, gradient=gradient)
            return sum_out(partial_sum, self.members)
        note(self.tally, "scatter_sum", partial_sum, gradient=gradient)
        return scatter_sum(partial_sum, self.members, self._dim_of(partial_sum))

    def _dim_of(self, x: torch.Tensor) -> int:
        """Where the stream is cut. Samples and positions may have been flattened into one: features are computed row
        by row, so that rows come and go in any order; heads need them separate."""
        if self.between != "sequence" or x.dim() >= 3:
            return self.dim
        if self.kind == "features":
            return 0
        raise ValueError(
            f"{self.name}: it was given {list(x.shape)}, but with sequence=True positions must have a dimension of "
            "their own besides samples and features; the model flattens them"
        )

    def _look_into(self, result: torch.Tensor) -> None:
        """Finds uncut parameters applied to cut values, from the graph between the ways in and a row's product."""
        self._looked_into = True
        producers, self._producers = self._producers, []
        nodes = _ancestors([result.grad_fn], stop=WAYS_IN)
        found = [node.variable for node in nodes if hasattr(node, "variable") and id(node.variable) in self._whole]
        found = [param for param in found if id(param) not in self._summed]
        leaks = any(type(node).__name__ in OUTSIDE for node in nodes)
        if found and not leaks:
            upstream = {node for node in _ancestors(producers, stop=()) if not hasattr(node, "variable")}
            leaks = bool(upstream & nodes)
        if leaks:
            names = sorted(self._whole[id(param)] for param in found)
            origin = f" that depends on {names[0]!r}" if names else ""
            raise ValueError(
                f"{self.name}: an uncut value{origin} enters the region's cut values, so that each rank would get "
                "only part of its gradient; declare the region's projections whole"
            )
        for param in found:
            self._summed.add(id(param))
            param.register_hook(partial(_summed_gradient, self.members, self.tally))


def _summed_gradient(members: Members, tally: Tally, gradient: torch.Tensor) -> torch.Tensor:
    note(tally, "copy_in", gradient, gradient=True)
    total = gradient.clone(memory_format=torch.contiguous_format)
    with BOOK.during("backward"):
        dist.all_reduce(total, group=members.group)
    return total


def _ancestors(nodes: list[Any], *, stop: tuple[str, ...]) -> set[Any]:
    """All nodes that a gradient reaches from the given ones, those beyond `stop` left out."""
    seen: set[Any] = set()
    ahead = [node for node in nodes if node is not None]
    while ahead:
        node = ahead.pop()
        if node in seen or type(node).__name__ in stop:
            continue
        seen.add(node)
        ahead += [following for following, _ in node.next_functions if following is not None]
    return seen


def _version(x: torch.Tensor) -> int | None:
    return None if x.is_inference() else x._version


def working_precision(x: torch.Tensor) -> torch.Tensor:
    """As autocast would give it to a matrix product; once for all columns, and before it crosses the wire."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype == torch.float32:
        return x.to(torch.get_autocast_dtype(kind))
    return x


def note(tally: Tally, how: str, x: torch.Tensor, *, times: int = 1, gradient: bool) -> None:
    """Notes a crossing of training; evaluation is not part of a step."""
    if BOOK.phase != "evaluate":
        whole_bytes = times * x.numel() * x.element_size()
        tally.note(Crossing(how=how, whole_bytes=whole_bytes, gradient=gradient, again=recomputing()))


def with_first_tensor(args: Any, kwargs: Any, change: Callable[[Any], Any], *, dims: int) -> tuple[Any, Any]:
    """The arguments with the first floating-point tensor of at least `dims` dimensions changed."""
    for place, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() >= dims:
            if isinstance(place, int):
                return (*args[:place], change(value), *args[place + 1 :]), kwargs
            return args, {**kwargs, place: change(value)}
    raise ValueError(f"among the arguments there is no floating-point tensor of {dims} dimensions or more to be cut")

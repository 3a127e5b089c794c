"""Collectives that autograd knows: what each sends in forward, and what its gradient sends in backward.

    copy_in        identity                    all-reduce of the gradient      full -> each rank's own use of it
    sum_out        all-reduce                  identity                        partial sums -> full
    gather         all-gather along dim        reduce-scatter                  parts -> each rank's own use of all
    scatter_sum    reduce-scatter along dim    all-gather                      partial sums -> parts
    split          the own part                all-gather                      full -> parts
    gather_whole   all-gather along dim        the own part                    parts -> full, used by all ranks alike

Each is entered in the ledger under the phase it happens in. Among one rank all of them are the identity.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Members
from shoal.layout.cuts import Cut
from shoal.parallel.recompute import forward_phase


class UnevenParts(ValueError):
    """Something was to be split evenly and does not divide."""


def copy_in(x: torch.Tensor, members: Members) -> torch.Tensor:
    """Each rank goes on with its own use of a full tensor; backward sums what the uses give back."""
    if members.group is None or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return _CopyIn.apply(x, members)


def sum_out(x: torch.Tensor, members: Members) -> torch.Tensor:
    """The sum of all ranks' partial sums, on every rank."""
    return x if members.group is None else _SumOut.apply(x, members)


def gather(x: torch.Tensor, members: Members, dim: int) -> torch.Tensor:
    """All equal parts along `dim`, for a use that differs among ranks: backward sums over them."""
    return x if members.group is None else _Gather.apply(x, members, _positive(dim, x))


def scatter_sum(x: torch.Tensor, members: Members, dim: int) -> torch.Tensor:
    """This rank's part, along `dim`, of the sum of all ranks' partial sums."""
    if members.group is None:
        return x
    dim = _positive(dim, x)
    require_even(x.size(dim), members, what=f"dimension {dim} of {list(x.shape)}")
    return _ScatterSum.apply(x, members, dim)


def split(x: torch.Tensor, members: Members, dim: int) -> torch.Tensor:
    """This rank's part of a full tensor; parts may differ by one."""
    return x if members.group is None else _Split.apply(x, members, _positive(dim, x))


def gather_whole(x: torch.Tensor, members: Members, dim: int, size: int | None = None) -> torch.Tensor:
    """The full tensor from its parts, for a use that is the same on every rank. `size` is that of the full one along
    `dim`, where parts may differ by one."""
    if members.group is None:
        return x
    dim = _positive(dim, x)
    return _GatherWhole.apply(x, members, dim, x.size(dim) * members.size if size is None else size)


def require_even(size: int, members: Members, *, what: str) -> None:
    if size % members.size:
        raise UnevenParts(
            f"{what}: {size} does not divide among the {members.size} ranks of {members.axis}; "
            f"make it a multiple of {members.size}"
        )


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, members: Members) -> torch.Tensor:
        ctx.members = members
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _all_reduce(gradient, ctx.members, "backward"), None


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, members: Members) -> torch.Tensor:
        return _all_reduce(x, members, forward_phase())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, members: Members, dim: int) -> torch.Tensor:
        ctx.members, ctx.dim = members, dim
        return _all_gather(x, members, dim, forward_phase())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _reduce_scatter(gradient, ctx.members, ctx.dim, "backward"), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, members: Members, dim: int) -> torch.Tensor:
        ctx.members, ctx.dim = members, dim
        return _reduce_scatter(x, members, dim, forward_phase())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _all_gather(gradient, ctx.members, ctx.dim, "backward"), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, members: Members, dim: int) -> torch.Tensor:
        ctx.members, ctx.dim, ctx.size = members, dim, x.size(dim)
        # A copy: a view would keep the full tensor alive for as long as its part is.
        return _own_part(x, members, dim).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _all_gather_uneven(gradient, ctx.members, ctx.dim, ctx.size, "backward"), None, None


class _GatherWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, members: Members, dim: int, size: int) -> torch.Tensor:
        ctx.members, ctx.dim = members, dim
        return _all_gather_uneven(x, members, dim, size, forward_phase())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _own_part(gradient, ctx.members, ctx.dim), None, None, None


def _positive(dim: int, x: torch.Tensor) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"a tensor of shape {list(x.shape)} has no dimension {dim}")
    return dim % x.dim()


def _own_part(x: torch.Tensor, members: Members, dim: int) -> torch.Tensor:
    return Cut(dim, (x.size(dim),)).part(x, members.size, members.index)


def _all_reduce(x: torch.Tensor, members: Members, phase: str) -> torch.Tensor:
    # A copy: selective recomputation may have kept x, a matrix product, for later.
    total = x.clone(memory_format=torch.contiguous_format)
    with BOOK.during(phase):
        dist.all_reduce(total, group=members.group)
    return total


def _lies_in_order(x: torch.Tensor, dim: int) -> bool:
    """Whether parts along `dim` laid end to end in memory are the full tensor: nothing before `dim` counts."""
    return all(size == 1 for size in x.shape[:dim])


def _all_gather(x: torch.Tensor, members: Members, dim: int, phase: str) -> torch.Tensor:
    mine = x.contiguous()
    parts = mine.new_empty(members.size, *x.shape)
    with BOOK.during(phase):
        dist.all_gather_single(parts, mine, group=members.group)
    shape = [*x.shape[:dim], members.size * x.size(dim), *x.shape[dim + 1 :]]
    return parts.view(shape) if _lies_in_order(x, dim) else parts.movedim(0, dim).reshape(shape)


def _reduce_scatter(x: torch.Tensor, members: Members, dim: int, phase: str) -> torch.Tensor:
    part = [*x.shape[:dim], x.size(dim) // members.size, *x.shape[dim + 1 :]]
    if _lies_in_order(x, dim):
        parts = x.contiguous()
    else:
        parts = x.unflatten(dim, (members.size, -1)).movedim(dim, 0).contiguous()
    result = x.new_empty(part)
    with BOOK.during(phase):
        dist.reduce_scatter_single(result, parts, group=members.group)
    return result


def _all_gather_uneven(x: torch.Tensor, members: Members, dim: int, size: int, phase: str) -> torch.Tensor:
    if size % members.size == 0:
        return _all_gather(x, members, dim, phase)
    # Parts differ by one, collectives want them alike: the shorter ones are sent with one more row of zeros.
    cut = Cut(dim, (size,))
    longest = cut.local_size(members.size, 0)
    filled = x.new_zeros([*x.shape[:dim], longest, *x.shape[dim + 1 :]])
    filled.narrow(dim, 0, x.size(dim)).copy_(x)
    padded = _all_gather(filled, members, dim, phase)
    rows = [padded.narrow(dim, r * longest, cut.local_size(members.size, r)) for r in range(members.size)]
    return torch.cat(rows, dim)

"""Tokens on their way to the ranks that hold their experts, and the answers on their way back.

One run of a layer is three all-to-alls: how many rows go where (a few integers), the rows themselves, the answers.
Backward mirrors the last two. They must be entered by all ranks in one order, also by a rank that sends nothing,
receives nothing or computes nothing. Autograd skips what nothing depends on, so a scalar, the *thread*, runs through
all of a layer's exchanges and is tied to its output: what goes back through the output goes back through all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Members
from shoal.layout.experts.find import ExpertError
from shoal.layout.routed import Routed
from shoal.parallel.recompute import forward_phase

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""A rank that routes no token learns the type of the others' from its place here."""


def first_thread(device: torch.device) -> torch.Tensor:
    return torch.zeros((), device=device, requires_grad=torch.is_grad_enabled())


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, thread: torch.Tensor, sent: list[int], received: list[int], members: Members
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.sent, ctx.received, ctx.members = sent, received, members
        with BOOK.during(forward_phase()):
            return _all_to_all(rows, sent, received, members), torch.zeros_like(thread)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, thread: torch.Tensor) -> Any:
        with BOOK.during("backward"):
            back = _all_to_all(gradient, ctx.received, ctx.sent, ctx.members)
        return back, torch.zeros_like(thread), None, None, None


def _all_to_all(rows: torch.Tensor, sent: list[int], received: list[int], members: Members) -> torch.Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=members.group)
    return arrived


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, thread: torch.Tensor, num: int, *tensors: torch.Tensor) -> Any:
        # Saved and read, though of no use: recomputation stops at the last tensor that was saved, and starts at the
        # first that is read. So it runs through all exchanges, and before any of backward's, on every rank alike.
        ctx.save_for_backward(thread)
        ctx.set_materialize_grads(False)
        ctx.left_out = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors[num:]]
        # Copies: what follows may change them in place, which a view from here would not allow.
        return tuple(tensor.clone() for tensor in tensors[:num])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        (thread,) = ctx.saved_tensors
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.left_out]
        return torch.zeros_like(thread), None, *gradients, *zeros


def tied(
    thread: torch.Tensor, tensors: Sequence[torch.Tensor], left_out: Sequence[torch.Tensor] = ()
) -> tuple[torch.Tensor, ...]:
    """The same tensors, with backward through them reaching the thread; `left_out` get a gradient of zeros."""
    return _Tie.apply(thread, len(tensors), *tensors, *left_out)


class Round:
    """One exchange of tokens and answers for `count` experts of which each rank holds an equal share, in order."""

    def __init__(self, members: Members, count: int, *, path: str) -> None:
        self.members = members
        self.share = count // members.size
        self.path = path

    def announce(self, rows: list[int], calls: list[int], dtype: torch.dtype | None, device: torch.device) -> None:
        """Sends every rank what is coming: rows for each expert, and whether it is called at all, if for no row."""
        ranks, share = self.members.size, self.share
        if dtype is not None and dtype not in DTYPES:
            raise ExpertError(f"{self.path}: tokens are {dtype}, but must be one of {', '.join(map(str, DTYPES))}")
        mine = torch.empty(ranks, 2 * share + 2, dtype=torch.int64)
        mine[:, :share] = torch.tensor(rows, dtype=torch.int64).view(ranks, share)
        mine[:, share : 2 * share] = torch.tensor(calls, dtype=torch.int64).view(ranks, share)
        mine[:, -2] = 0 if dtype is None else DTYPES.index(dtype) + 1
        mine[:, -1] = sum(rows)
        mine = mine.to(device)
        theirs = torch.empty_like(mine)
        with BOOK.during(forward_phase()):
            dist.all_to_all_single(theirs, mine, group=self.members.group)
        self.counts_bytes = mine.numel() * mine.element_size()
        self.sent = [sum(rows[rank * share : (rank + 1) * share]) for rank in range(ranks)]
        table = theirs.tolist()
        self.arriving: list[list[int]] = [line[:share] for line in table]
        """For each rank, the rows it has for each of this rank's experts."""
        self.received = [sum(line) for line in self.arriving]
        self.called = [any(line[share + expert] for line in table) for expert in range(share)]
        """Which of this rank's experts anyone calls."""
        self.any_rows = any(line[-1] for line in table)
        """Whether any rank routes any token."""
        types = {line[-2] for line in table} - {0}
        if len(types) > 1:
            names = sorted(str(DTYPES[code - 1]) for code in types)
            raise ExpertError(f"{self.path}: ranks call its experts with tokens of different types: {', '.join(names)}")
        self.dtype = DTYPES[types.pop() - 1] if types else dtype or torch.get_default_dtype()

    def there(self, rows: torch.Tensor, thread: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows, sorted by expert, to the ranks of their experts."""
        return _Exchange.apply(rows, thread, self.sent, self.received, self.members)

    def back(self, answers: torch.Tensor, thread: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Answers, in the order in which rows arrived, to where the rows came from."""
        return _Exchange.apply(answers, thread, self.received, self.sent, self.members)

    def routed(self, *, rows: torch.Tensor, answers: torch.Tensor, weight_bytes: int = 0) -> Routed:
        now = forward_phase()
        return Routed(
            axis=self.members.axis,
            index=self.members.index,
            phase=now,
            trained=now == "forward" and torch.is_grad_enabled(),
            counts_bytes=self.counts_bytes,
            sent_rows=tuple(self.sent),
            received_rows=tuple(self.received),
            weight_bytes=weight_bytes,
            row_bytes=rows.shape[1] * rows.element_size(),
            answer_bytes=answers.shape[1] * answers.element_size(),
        )

"""Cross entropy on logits that are cut along the classes: three numbers for each row cross the wire, not the logits.

For row z with target t, class weights w (1 where none are given), smoothing e and K classes, W the sum of w, as
PyTorch defines it:

    loss = (1 - e) w_t (lse - z_t) + e/K (W lse - sum_c w_c z_c)
    d loss / d z_c = (1 - e) w_t (p_c - [c = t]) + e/K (W p_c - w_c)

Forward needs the largest logit of all ranks, then their sums of exponentials, target logits and (with smoothing)
weighted sums, which travel together. Backward needs nothing from anyone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Members
from shoal.layout.crossings import Tally
from shoal.layout.cuts import Cut
from shoal.parallel.recompute import forward_phase
from shoal.parallel.tensor.regions import note


def cross_entropy(
    part: torch.Tensor,
    target: torch.Tensor,
    *,
    classes: int,
    members: Members,
    tally: Tally,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """As `F.cross_entropy` on full logits. `part` is [N, this rank's classes, ...] (or one sample without N), `target`
    holds class numbers."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction!r} is not a valid value for reduction; it is 'none', 'mean' or 'sum'")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}, but must be between 0 and 1")
    rows = part.movedim(1, -1) if part.dim() > 1 else part
    if rows.shape[:-1] != target.shape:
        raise ValueError(f"logits for targets of shape {list(rows.shape[:-1])} were given targets {list(target.shape)}")
    kind = part.device.type
    if torch.is_autocast_enabled(kind) and rows.dtype != torch.float64:
        rows = rows.float()  # As autocast does for every cross entropy.
    flat = target.reshape(-1).long()
    counted = flat != ignore_index
    if kind == "cpu" and bool(((flat < 0) | (flat >= classes))[counted].any()):
        wrong = flat[counted & ((flat < 0) | (flat >= classes))][0].item()
        raise IndexError(f"Target {wrong} is out of bounds: there are {classes} classes")
    wide = torch.promote_types(rows.dtype, torch.float32)
    w = None if weight is None else weight.detach().to(wide)
    losses = _CutCrossEntropy.apply(
        rows.reshape(-1, rows.shape[-1]), flat, counted, w, classes, label_smoothing, members, tally
    )
    if reduction == "none":
        return losses.to(rows.dtype).view(target.shape)
    if reduction == "sum":
        return losses.sum().to(rows.dtype)
    total = counted.sum() if w is None else (w[flat.where(counted, 0)] * counted).sum()
    return (losses.sum() / total).to(rows.dtype)


class _CutCrossEntropy(torch.autograd.Function):
    """Rows [M, local classes] -> losses [M]."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Any,
        target: Any,
        counted: Any,
        weight: Any,
        classes: int,
        smoothing: float,
        members: Members,
        tally: Tally,
    ) -> torch.Tensor:
        ((low, high),) = Cut(1, (classes,)).intervals(members.size, members.index)
        wide = torch.promote_types(rows.dtype, torch.float32)
        top = rows.amax(1).to(wide)
        _reduce(top, members, tally, dist.ReduceOp.MAX)
        shifted = rows.to(wide) - top[:, None]
        here = counted & (target >= low) & (target < high)
        place = (target - low).where(here, 0)
        sums = shifted.new_empty(3 if smoothing else 2, len(rows))
        sums[1] = shifted.gather(1, place[:, None])[:, 0].masked_fill_(~here, 0)
        local_weight = None if weight is None else weight[low:high]
        if smoothing:
            sums[2] = (shifted if local_weight is None else shifted * local_weight).sum(1)
        shares = shifted.exp_()
        sums[0] = shares.sum(1)
        _reduce(sums, members, tally, dist.ReduceOp.SUM)
        shares /= sums[0][:, None]
        log_sum = sums[0].log()
        own = 1.0 if weight is None else weight[target.where(counted, 0)]
        losses = (1 - smoothing) * own * (log_sum - sums[1])
        if smoothing:
            all_weights = classes if weight is None else weight.sum()
            losses += smoothing / classes * (all_weights * log_sum - sums[2])
        ctx.save_for_backward(shares, place, here, counted, weight)
        ctx.own, ctx.smoothing, ctx.classes, ctx.low_high, ctx.dtype = own, smoothing, classes, (low, high), rows.dtype
        return losses.masked_fill_(~counted, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        shares, place, here, counted, weight = ctx.saved_tensors
        low, high = ctx.low_high
        gradient = gradient.masked_fill(~counted, 0)
        target_share = (1 - ctx.smoothing) * ctx.own * gradient
        spread = ctx.smoothing / ctx.classes * gradient
        of_shares = target_share
        if ctx.smoothing:
            of_shares = of_shares + spread * (ctx.classes if weight is None else weight.sum())
        result = shares * of_shares[:, None]
        if ctx.smoothing:
            result -= spread[:, None] * (1.0 if weight is None else weight[low:high])
        result.scatter_add_(1, place[:, None], (-target_share).where(here, 0)[:, None])
        # A row that does not count has no gradient, even where its logits are no numbers.
        return (result.masked_fill_(~counted[:, None], 0).to(ctx.dtype), *[None] * 7)


def _reduce(values: torch.Tensor, members: Members, tally: Tally, how: Any) -> None:
    note(tally, "sum_out", values, gradient=True)
    with BOOK.during(forward_phase()):
        dist.all_reduce(values, op=how, group=members.group)

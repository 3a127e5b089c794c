"""Ring attention: each rank keeps its queries, and the keys and values of all ranks pass by (Liu et al. 2023).

A rank attends to the chunk at hand while the next is on its way and merges the results by their log-sum-exp, so none
holds more than two chunks of keys and values. Backward sends keys and values around once more and, behind them, the
sums of their gradients: these start at the first rank visited and come home after n - 1 hops, while that rank computes
what its own queries owe its own keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from shoal.comm.mesh import Members
from shoal.parallel.context.attention_call import as_autocast, check, mask_in_four
from shoal.parallel.context.chunk_attention import attend, attend_backward, wide_type
from shoal.parallel.context.ring_hops import GRADIENTS_TAG, KEYS_TAG, Hop, around, packed, unpacked
from shoal.parallel.context.ring_parts import RingPlan
from shoal.parallel.context.sequence import chunks_of
from shoal.parallel.recompute import forward_phase


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    members: Members,
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
    balanced: bool = True,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` where q, k and v [B, H, L/n, D] hold this rank's positions only.

    `balanced` says how the sequence was cut (`chunks_of`). `attn_mask`, bool or added, broadcasts to [B, H, L/n, L]:
    this rank's rows, all columns in the order of the sequence. It may require a gradient, which is that of these rows.
    Collective: all members must call it, and run its backward, in the same order.
    """
    if members.size == 1:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, dropout_p=dropout_p
        )
    q, k, v = as_autocast(q, k, v)
    check(q, k, v, members, enable_gqa=enable_gqa, dropout_p=dropout_p)
    length = q.shape[2]
    chunks_of(length * members.size, members.size, members.index, balanced=balanced)
    plan = RingPlan(ranks=members.size, index=members.index, length=length, causal=is_causal, balanced=balanced)
    if attn_mask is not None:
        attn_mask = mask_in_four(
            attn_mask, q, rows=length, columns=length * members.size, whose="the rows that this rank holds"
        )
    kept = _kept(q, length * members.size, dropout_p) if dropout_p else None
    return _Ring.apply(q, k, v, attn_mask, members, plan, q.shape[3] ** -0.5 if scale is None else scale, kept)


def _kept(q: torch.Tensor, columns: int, dropout_p: float) -> torch.Tensor:
    """What each attention weight is multiplied by: [B, H, rows of this rank, columns in the sequence's own order]."""
    kept = torch.empty(*q.shape[:3], columns, dtype=wide_type(q.dtype), device=q.device).bernoulli_(1.0 - dropout_p)
    return kept.div_(1.0 - dropout_p) if dropout_p < 1.0 else kept


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        members: Members,
        plan: RingPlan,
        scale: float,
        kept: torch.Tensor | None,
    ) -> torch.Tensor:
        merged = _Merged(q, v.shape[3])
        effective = plan.effective(mask)
        with torch.autocast(q.device.type, enabled=False):
            for source, parcel in around(packed(k, v), members, tag=KEYS_TAG, phase=forward_phase()):
                work = plan.work(source, effective)
                if work is None:
                    continue
                part = work.part
                keys, values = (tensor[:, :, part.columns] for tensor in unpacked(parcel, k, v))
                out, lse = attend(
                    q[:, :, part.rows],
                    keys,
                    values,
                    mask=work.mask,
                    causal=part.causal,
                    scale=scale,
                    kept=plan.kept(kept, source, part),
                )
                merged.add(part.rows, out, lse)
            out, lse = merged.result(q.dtype)
        # The mask as it was given: layers usually share one.
        ctx.save_for_backward(q, k, v, mask, out, lse, kept)
        ctx.members, ctx.plan, ctx.scale = members, plan, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        q, k, v, mask, out, lse, kept = ctx.saved_tensors
        saved = _Saved(
            grad_out=grad_out,
            q=q,
            k=k,
            v=v,
            mask=ctx.plan.effective(mask),
            out=out,
            lse=lse,
            plan=ctx.plan,
            scale=ctx.scale,
            kept=kept,
            grad_q=torch.zeros_like(q, dtype=wide_type(q.dtype)),
            grad_mask=torch.zeros_like(mask) if ctx.needs_input_grad[3] else None,
        )
        with torch.autocast(q.device.type, enabled=False):
            grad_k, grad_v = _backward(saved, ctx.members)
        return saved.grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), saved.grad_mask, None, None, None, None


class _Merged:
    """Outputs over several sets of keys, merged into the output over all: sums relative to the highest so far."""

    def __init__(self, q: torch.Tensor, value_dim: int) -> None:
        batch, heads, rows, _ = q.shape
        dtype = wide_type(q.dtype)
        # Laid out as the library does it: the heads of a position lie side by side for what comes next.
        self._sums = torch.zeros(batch, rows, heads, value_dim, dtype=dtype, device=q.device).transpose(1, 2)
        # Finite from the start: rows that see nothing give exp(-inf) = 0, never inf - inf.
        self._top = torch.full((batch, heads, rows), torch.finfo(dtype).min, dtype=dtype, device=q.device)
        self._weight = torch.zeros_like(self._top)

    def add(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        sums, top, weight = self._sums[:, :, rows], self._top[:, :, rows], self._weight[:, :, rows]
        highest = torch.maximum(top, lse)
        kept, added = torch.exp(top - highest), torch.exp(lse - highest)
        sums.mul_(kept[..., None]).addcmul_(out.to(sums.dtype), added[..., None])
        weight.mul_(kept).add_(added)
        top.copy_(highest)

    def result(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Output, 0 for rows that saw nothing, and log-sum-exp, finite for them too."""
        weight = self._weight.masked_fill(self._weight == 0, 1.0)
        return (self._sums / weight[..., None]).to(dtype), self._top + weight.log()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Saved:
    """What backward starts from, and the two gradients that stay on the rank."""

    grad_out: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    plan: RingPlan
    scale: float
    kept: torch.Tensor | None
    grad_q: torch.Tensor
    grad_mask: torch.Tensor | None


_Share = tuple[slice, torch.Tensor, torch.Tensor]
"""Columns of a visitor, and what this rank adds to the gradients of k and v there."""


def _backward(saved: _Saved, members: Members) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of this rank's k and v; those of q and the mask are added up in `saved`."""
    k, v = saved.k, saved.v
    own, moving = packed(k, v), None
    for source, parcel in around(own, members, tag=KEYS_TAG, phase="backward"):
        if source == members.index:
            continue
        share = _share(saved, source, *unpacked(parcel, k, v))
        # The rank before has just added its share to the gradients of the same visitor.
        total = moving.wait() if moving else torch.zeros_like(own, dtype=saved.grad_q.dtype)
        _add(total, share, saved)
        moving = Hop(total, torch.empty_like(total), members, tag=GRADIENTS_TAG, phase="backward")
    share = _share(saved, members.index, k, v)
    assert moving is not None
    home = moving.wait()
    _add(home, share, saved)
    return unpacked(home, k, v)


def _share(saved: _Saved, source: int, keys: torch.Tensor, values: torch.Tensor) -> _Share | None:
    work = saved.plan.work(source, saved.mask)
    if work is None:
        return None
    rows, columns = work.part.rows, work.part.columns
    grad_q, grad_k, grad_v, grad_scores = attend_backward(
        saved.grad_out[:, :, rows],
        saved.q[:, :, rows],
        keys[:, :, columns],
        values[:, :, columns],
        saved.out[:, :, rows],
        saved.lse[:, :, rows],
        mask=work.mask,
        causal=work.part.causal,
        scale=saved.scale,
        mask_gradient=saved.grad_mask is not None,
        kept=saved.plan.kept(saved.kept, source, work.part),
    )
    saved.grad_q[:, :, rows] += grad_q
    if saved.grad_mask is not None and grad_scores is not None:
        saved.plan.add_mask_gradient(saved.grad_mask, source, work, grad_scores)
    return columns, grad_k, grad_v


def _add(total: torch.Tensor, share: _Share | None, saved: _Saved) -> None:
    if share is not None:
        columns, grad_k, grad_v = share
        sum_k, sum_v = unpacked(total, saved.k, saved.v)
        sum_k[:, :, columns] += grad_k
        sum_v[:, :, columns] += grad_v

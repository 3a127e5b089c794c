"""Ulysses attention: an all-to-all turns a part of every sequence into full sequences of some heads, and back.

In between the library's own attention runs, with whatever mask (Jacobs et al. 2023). Heads must divide by the ranks;
queries, keys and values travel in one message, the output in another, and in backward their gradients likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Members
from shoal.parallel.context.attention_call import AttentionError, as_autocast, check, mask_in_four
from shoal.parallel.recompute import forward_phase


def ulysses_attention(
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
    balanced: bool = False,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` where q, k and v [B, H, L/n, D] hold this rank's positions only.

    The cut must be contiguous (`balanced=False`). `attn_mask`, bool or added, broadcasts to [B, H, L, L]: unlike with
    the ring all rows are needed here, and all heads, of which each rank takes its own; a mask that requires a gradient
    gets the share of this rank's heads. Collective: all members must call it, and run its backward, in the same order.
    """
    if members.size == 1:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, dropout_p=dropout_p
        )
    q, k, v = as_autocast(q, k, v)
    check(q, k, v, members, enable_gqa=enable_gqa, dropout_p=dropout_p)
    if balanced:
        raise AttentionError("Ulysses needs a contiguous cut of the sequence; cut it with balanced=False.")
    for heads, whose in ((q.shape[1], "queries"), (k.shape[1], "keys and values")):
        if heads % members.size:
            raise AttentionError(
                f"{heads} heads of {whose} do not divide by {members.size} ranks, as Ulysses needs; "
                "use another number of ranks, or the ring."
            )
    if attn_mask is not None:
        length, own = q.shape[2] * members.size, q.shape[1] // members.size
        attn_mask = mask_in_four(attn_mask, q, rows=length, columns=length, whose="the rows of the full sequence")
        if attn_mask.shape[1] > 1:
            attn_mask = attn_mask[:, members.index * own : (members.index + 1) * own]
    whole_q, whole_k, whole_v = _Swap.apply(members, _heads_out, _heads_back, q, k, v)
    out = F.scaled_dot_product_attention(
        whole_q,
        whole_k,
        whole_v,
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        dropout_p=dropout_p,
    )
    (mine,) = _Swap.apply(members, _heads_back, _heads_out, out)
    return mine


class _Swap(torch.autograd.Function):
    """One exchange there, and for the gradients its reverse back."""

    @staticmethod
    def forward(ctx: Any, members: Members, there: Any, back: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.members, ctx.back = members, back
        return there(tensors, members, phase=forward_phase())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (None, None, None, *ctx.back(grads, ctx.members, phase="backward"))


def _heads_out(tensors: Sequence[torch.Tensor], members: Members, *, phase: str) -> tuple[torch.Tensor, ...]:
    """[B, H, L/n, D] to [B, H/n, L, D]: each rank gets its heads of every other rank's positions."""
    n = members.size
    arrived = _exchange([x.unflatten(1, (n, -1)).transpose(0, 1) for x in tensors], members, phase=phase)
    return tuple(x.permute(1, 2, 0, 3, 4).flatten(2, 3) for x in arrived)


def _heads_back(tensors: Sequence[torch.Tensor], members: Members, *, phase: str) -> tuple[torch.Tensor, ...]:
    """[B, H/n, L, D] to [B, H, L/n, D], laid out as the library's attention does it: [B, L/n, H, D] in memory."""
    n = members.size
    arrived = _exchange([x.unflatten(2, (n, -1)).permute(2, 0, 1, 3, 4) for x in tensors], members, phase=phase)
    return tuple(x.permute(1, 3, 0, 2, 4).contiguous().flatten(2, 3).transpose(1, 2) for x in arrived)


def _exchange(tensors: Sequence[torch.Tensor], members: Members, *, phase: str) -> list[torch.Tensor]:
    """Each tensor's i-th part goes to member i; the parts that come take their places, in the order of members."""
    sizes = [tensor[0].numel() for tensor in tensors]
    parcel = tensors[0].new_empty(members.size, sum(sizes))
    for slot, tensor in zip(parcel.split(sizes, 1), tensors, strict=True):
        slot.view(tensor.shape).copy_(tensor)
    arrived = torch.empty_like(parcel)
    with BOOK.during(phase):
        dist.all_to_all_single(arrived, parcel, group=members.group)
    return [slot.view(tensor.shape) for slot, tensor in zip(arrived.split(sizes, 1), tensors, strict=True)]

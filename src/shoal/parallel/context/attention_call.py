"""What a call of attention over a cut sequence must look like, whichever way the ranks reach across the cuts.

Ring and Ulysses replace `F.scaled_dot_product_attention` and take the same arguments; what they cannot do they
refuse here, before anything is sent, so that no rank waits for one that has raised.
"""

from __future__ import annotations

import torch

from shoal.comm.mesh import Members


class AttentionError(ValueError):
    """A call of attention that cannot be carried out on a cut sequence."""


def check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, members: Members, *, enable_gqa: bool, dropout_p: float
) -> None:
    """Refuses what neither way can do; afterwards q is [B, H, L/n, D], k and v [B, H_kv, L/n, D]."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not 0.0 <= dropout_p <= 1.0:
        raise AttentionError(f"dropout_p is a probability from 0 to 1, not {dropout_p:g}.")
    if not q.dim() == k.dim() == v.dim() == 4:
        raise AttentionError(f"Attention over a cut sequence takes [batch, heads, positions, head_dim], not {shapes}.")
    if not (q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        raise AttentionError(
            f"q, k and v must share one floating-point type, but they have {q.dtype}, {k.dtype} and {v.dtype}."
        )
    if not q.shape[2] == k.shape[2] == v.shape[2]:
        raise AttentionError(
            f"Each rank holds the same positions of queries as of keys and values, but lengths differ: {shapes}. "
            "Cross attention and cached keys cannot be cut along the sequence."
        )
    if not (q.shape[0] == k.shape[0] == v.shape[0] and q.shape[3] == k.shape[3] and k.shape[1] == v.shape[1]):
        raise AttentionError(f"Batch, head dimension and heads of keys and values must agree: {shapes}.")
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads != kv_heads and not (enable_gqa and kv_heads and heads % kv_heads == 0):
        hint = "a multiple of it is needed" if enable_gqa else "pass enable_gqa=True if they are grouped"
        raise AttentionError(f"{heads} heads of queries do not go with {kv_heads} of keys and values; {hint}.")


def as_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As autocast gives them to the library's attention, which it computes in the lower precision."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    # As PyTorch does: what is double stays so.
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)


def mask_in_four(mask: torch.Tensor, q: torch.Tensor, *, rows: int, columns: int, whose: str) -> torch.Tensor:
    """The mask as [B or 1, H or 1, rows or 1, columns], `whose` saying in an error which rows are expected."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise AttentionError(f"A mask is bool (True: may be seen) or floating-point (added), not {mask.dtype}.")
    full = (q.shape[0], q.shape[1], rows, columns)
    if 2 <= mask.dim() <= 4:
        wide = mask if mask.dtype == torch.bool else mask.to(torch.promote_types(q.dtype, torch.float32))
        wide = wide[(None,) * (4 - mask.dim())]
        if all(size in (1, most) for size, most in zip(wide.shape, full, strict=True)):
            return wide.expand(*wide.shape[:3], columns)
    raise AttentionError(
        f"A mask of shape {list(mask.shape)} does not fit; expected is one that broadcasts to [{q.shape[0]} batch, "
        f"{q.shape[1]} heads, {rows} rows, {columns} columns]: {whose}, and all columns in the sequence's own order."
    )

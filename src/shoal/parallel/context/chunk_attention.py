"""Attention of some queries to some of the keys, so that results over different keys can be merged into one.

Besides the output each product gives the log-sum-exp of its scores: with it outputs merge exactly (Milakov & Gimelshein
2018), and backward computes any chunk's share of the gradients from the merged output and log-sum-exp alone (Dao et
al. 2022). The library's fused kernel for CPUs does both where it serves; elsewhere matrix products and a softmax do.

B batch, H heads, G heads of queries per head of keys, R rows (queries), C columns (keys), D head dimension
"""

from __future__ import annotations

import torch

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
MINUS_INFINITY = float("-inf")

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """What sums over chunks are kept in: float32 for the half precisions, else the type itself."""
    return torch.promote_types(dtype, torch.float32)


def _fused_serves(q: torch.Tensor, v: torch.Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and q.numel() > 0 and v.numel() > 0


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    # The fused kernel reads the last dimension as if its elements lay side by side, and does not check.
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _additive(mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return None if mask is None else _dense(mask)
    return torch.zeros(mask.shape, dtype=like.dtype, device=mask.device).masked_fill_(~mask, MINUS_INFINITY)


def seen(mask: torch.Tensor) -> torch.Tensor:
    """Which entries of a mask, bool or additive, let anything through."""
    return mask if mask.dtype == torch.bool else mask != MINUS_INFINITY


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, H, R, D] and log-sum-exp [B, H, R]; a row that sees nothing has output 0 and log-sum-exp -inf.
    `kept` [B, H, R, C] are the factors that dropout gives the weights."""
    if kept is not None or not _fused_serves(q, v):
        return _plain(q, k, v, mask=mask, causal=causal, scale=scale, kept=kept)
    additive = _additive(mask, q)
    out, lse = _flash(_dense(q), _dense(k), _dense(v), 0.0, causal, attn_mask=additive, scale=scale)
    if mask is not None:
        # The kernel returns 0 for rows that see nothing, which would count as a score when merged.
        lse = lse.masked_fill(~seen(mask).any(-1), MINUS_INFINITY)
    return out, lse


def attend_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    mask_gradient: bool,
    kept: torch.Tensor | None = None,
) -> Gradients:
    """This chunk's share of the gradients of q, k, v and (on demand, [B, H, R, C]) of an additive mask.

    `out` and `lse` are those of the rows over all keys, `lse` finite also for rows that see nothing.
    """
    if mask_gradient or kept is not None or not _fused_serves(q, v):
        return _plain_backward(grad_out, q, k, v, out, lse, mask=mask, causal=causal, scale=scale, kept=kept)
    tensors = [_dense(tensor) for tensor in (grad_out, q, k, v, out)]
    return (*_flash_backward(*tensors, lse, 0.0, causal, attn_mask=_additive(mask, q), scale=scale), None)


def _rows_by_key_head(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[B, H, R, D] as [B, H_kv, G * R, D], in float32 or wider: grouped heads share their keys without a copy."""
    batch, heads, rows, width = x.shape
    return x.to(wide_type(x.dtype)).reshape(batch, kv_heads, heads // kv_heads * rows, width)


def _scores(q: torch.Tensor, k: torch.Tensor, *, mask: torch.Tensor | None, causal: bool, scale: float) -> torch.Tensor:
    batch, heads, rows, _ = q.shape
    columns = k.shape[2]
    products = _rows_by_key_head(q, k.shape[1]) @ k.to(wide_type(k.dtype)).transpose(-1, -2)
    # Never in place: selective recomputation keeps the products themselves.
    scores = products.reshape(batch, heads, rows, columns) * scale
    if causal:
        future = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, MINUS_INFINITY)
    if mask is not None:
        scores = scores.masked_fill(~mask, MINUS_INFINITY) if mask.dtype == torch.bool else scores + mask
    return scores


def _plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    kept: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(q, k, mask=mask, causal=causal, scale=scale)
    lse = torch.logsumexp(scores, -1)
    # Not from the log-sum-exp: where all scores are about the lowest number there is, it cannot tell how many they are.
    weights = torch.softmax(scores, -1).masked_fill(lse[..., None] == MINUS_INFINITY, 0.0)
    weights = weights if kept is None else weights * kept
    out = _rows_by_key_head(weights, v.shape[1]) @ v.to(weights.dtype)
    return out.reshape(*q.shape[:3], v.shape[3]), lse


def _plain_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    kept: torch.Tensor | None,
) -> Gradients:
    kv_heads, wide = k.shape[1], wide_type(q.dtype)
    weights = torch.exp(_scores(q, k, mask=mask, causal=causal, scale=scale) - lse[..., None])
    grad = _rows_by_key_head(grad_out, kv_heads)
    grad_weights = (grad @ v.to(wide).transpose(-1, -2)).reshape(weights.shape)
    if kept is not None:
        grad_weights = grad_weights * kept
    # Softmax: ds = p * (dp - sum over all columns of p dp), and that sum is grad_out . out.
    offset = (grad_out.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - offset)
    by_key_head = _rows_by_key_head(grad_scores, kv_heads)
    weights = weights if kept is None else weights * kept
    grad_v = _rows_by_key_head(weights, kv_heads).transpose(-1, -2) @ grad
    grad_k = by_key_head.transpose(-1, -2) @ _rows_by_key_head(q, kv_heads) * scale
    grad_q = (by_key_head @ k.to(wide) * scale).reshape(q.shape)
    return grad_q, grad_k, grad_v, grad_scores

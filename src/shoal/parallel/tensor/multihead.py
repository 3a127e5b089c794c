"""`nn.MultiheadAttention` with some of its heads: the same call, computed from this rank's part of the projections.

The library's own forward takes the width of the input for the number of heads times their width, so it cannot run on
a part; this one reads the number of heads off the projections that it finds.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn

from shoal.parallel.context.global_view import attention_of_library
from shoal.parallel.tensor.parameters import PlanDoesNotFit
from shoal.parallel.tensor.regions import RunningRegion

MASKED = "-inf"


def require_plain(module: nn.MultiheadAttention, path: str) -> None:
    """Refuses what cannot be computed head by head on parts."""
    if type(module).forward is not nn.MultiheadAttention.forward:
        raise PlanDoesNotFit(f"{path}: {type(module).__name__} has a forward of its own, which cannot be cut by heads")
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        raise PlanDoesNotFit(
            f"{path}: attention with add_bias_kv or add_zero_attn cannot be cut by heads; build it without"
        )


class WeightsNotKept:
    """Returned in place of attention weights. Most callers drop them; using them raises what to do instead."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        _no_weights()

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __float__ = __array__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __truediv__ = __matmul__ = _refuse

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        _no_weights()


def _no_weights() -> NoReturn:
    raise ValueError(
        "the attention weights of nn.MultiheadAttention are spread over the ranks of tp and are not kept; "
        "call the attention with need_weights=False, or declare it whole"
    )


def forward(
    module: nn.MultiheadAttention,
    region: RunningRegion,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, Any]:
    """As the module's own. Shapes: B samples, L queries, S keys, H heads of this rank, each D wide."""
    if is_causal and attn_mask is None:
        raise ValueError(f"{region.name}: is_causal is a hint about attn_mask, so attn_mask must be given with it")
    q, k, v = _projected(module, region, query, key, value)
    batched = q.dim() == 3
    batch_first = module.batch_first or not batched
    if not batched:
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    elif not module.batch_first:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    q_BHLD, k_BHSD, v_BHSD = (x.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for x in (q, k, v))
    causal = is_causal and key_padding_mask is None
    mask = None
    if not causal:
        mask = _mask(region, attn_mask, key_padding_mask, q_BHLD, k_BHSD.shape[2])
    with attention_of_library():
        mixed = F.scaled_dot_product_attention(
            q_BHLD, k_BHSD, v_BHSD, mask, dropout_p=module.dropout if module.training else 0.0, is_causal=causal
        )
    mixed = mixed.transpose(1, 2).flatten(-2)
    if not batched:
        mixed = mixed.squeeze(0)
    elif not batch_first:
        mixed = mixed.transpose(0, 1)
    out = module.out_proj
    result = region.leave(F.linear(mixed, out.weight))
    if out.bias is not None:
        result = result + out.bias.to(result.dtype)
    return result, WeightsNotKept() if need_weights else None


def _projected(
    module: nn.MultiheadAttention, region: RunningRegion, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inside = [region.enter(x) for x in (query, key, value)]
    if module.in_proj_weight is not None and inside[0] is inside[1] is inside[2]:
        q, k, v = F.linear(inside[0], module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
        return q, k, v
    if module.in_proj_weight is not None:
        weights: Any = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip(inside, weights, biases, strict=True))
    return q, k, v


def _mask(
    region: RunningRegion,
    attn_mask: torch.Tensor | None,
    padding: torch.Tensor | None,
    q_BHLD: torch.Tensor,
    keys: int,
) -> torch.Tensor | None:
    """Both masks as one that is added to the scores: [B or 1, H or 1, L or 1, S]."""
    samples, heads, queries, _ = q_BHLD.shape
    total = None
    if attn_mask is not None:
        total = _added(attn_mask, q_BHLD)
        all_heads = heads * region.members.size
        if total.dim() == 3 and total.shape == (samples * all_heads, queries, keys):
            total = total.view(samples, all_heads, queries, keys).narrow(1, region.members.index * heads, heads)
        elif total.dim() != 2 or total.shape != (queries, keys):
            raise ValueError(
                f"{region.name}: attn_mask has shape {list(attn_mask.shape)}, but must be [{queries}, {keys}] or "
                f"[{samples * all_heads}, {queries}, {keys}]"
            )
    if padding is not None:
        if padding.shape not in ((samples, keys), (keys,)):
            raise ValueError(
                f"{region.name}: key_padding_mask has shape {list(padding.shape)}, but must be [{samples}, {keys}]"
            )
        wide = _added(padding, q_BHLD).view(-1, 1, 1, keys)
        total = wide if total is None else total + wide
    return total


def _added(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A mask of truth values (True: not seen) as one that is added."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float(MASKED))

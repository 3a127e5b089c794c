"""Batch norm over the samples of all replicas, and batch norm that recomputation does not count twice.

Synchronised statistics equal those of one rank at the full batch: each rank gives its count, mean and sum of
squared deviations, and these are combined without cancellation (Chan, Golub & LeVeque 1979). Backward needs two
sums per channel from everyone. PyTorch's SyncBatchNorm runs on accelerators only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Members
from shoal.parallel.recompute import forward_phase, recomputing


def batch_norms(model: nn.Module) -> list[tuple[str, _BatchNorm]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]


def synchronise(model: nn.Module, replicas: Members) -> None:
    """Every batch norm of the model now sees the whole (micro-)batch of all replicas."""
    for _, module in batch_norms(model):
        module.forward = partial(_forward, module, replicas)  # type: ignore[method-assign]


def release(model: nn.Module) -> None:
    """Takes `synchronise` back: every batch norm sees its own batch again."""
    for _, module in batch_norms(model):
        forward = vars(module).get("forward")
        if isinstance(forward, partial) and forward.func is _forward:
            del module.forward


def count_once(model: nn.Module) -> None:
    """Batch norm that stays local: its running statistics take no notice of recomputation, nor of empty batches."""
    for _, module in batch_norms(model):
        module.forward = partial(_forward_alone, module, module.forward)  # type: ignore[method-assign]


def _forward_alone(module: _BatchNorm, forward: Any, x: torch.Tensor) -> torch.Tensor:
    seen = x.numel() and not recomputing()
    if seen or not module.training or module.running_mean is None:
        return forward(x)
    # Copies, not None: recomputation must save the same tensors for backward as the first forward did.
    mean, var = module.running_mean.clone(), module.running_var.clone()  # type: ignore[union-attr]
    return F.batch_norm(x, mean, var, module.weight, module.bias, training=True, eps=module.eps)


def _forward(module: _BatchNorm, replicas: Members, x: torch.Tensor) -> torch.Tensor:
    module._check_input_dim(x)
    if not module.training and module.running_mean is not None:
        return F.batch_norm(x, module.running_mean, module.running_var, module.weight, module.bias, eps=module.eps)
    y, mean, var, count = _Synchronised.apply(x, module.weight, module.bias, module.eps, replicas)
    if module.training and module.track_running_stats and module.running_mean is not None and not recomputing():
        with torch.no_grad():
            # A micro-batch may be empty on every rank (the short one at an epoch's end): then nothing was seen.
            seen = (count > 0).to(module.running_mean.dtype)
            module.num_batches_tracked.add_(seen.to(torch.long))
            share = module.momentum if module.momentum is not None else 1 / module.num_batches_tracked.clamp(min=1)
            rate = seen * share
            unbiased = var * (count / (count - 1).clamp(min=1))
            module.running_mean.lerp_(mean.to(module.running_mean.dtype), rate)
            module.running_var.lerp_(unbiased.to(module.running_var.dtype), rate)  # type: ignore[union-attr]
    return y


def statistics_numel(channels: int) -> int:
    """Elements that each rank contributes to the forward exchange: mean, squared deviations, count."""
    return 2 * channels + 1


class _Synchronised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float, replicas: Members) -> Any:
        channels = x.shape[1]
        wide = torch.promote_types(x.dtype, torch.float32)
        mine = x.new_zeros(statistics_numel(channels), dtype=wide)
        count = x.numel() // channels
        if count:
            mean, var = torch.batch_norm_update_stats(x.to(wide), None, None, 0.0)
            mine[:channels], mine[channels:-1], mine[-1] = mean, var * count, count
        everyone = mine.new_empty(replicas.size, mine.numel())
        with BOOK.during(forward_phase()):
            dist.all_gather_single(everyone, mine, group=replicas.group)
        counts = everyone[:, -1:]
        count_of_all = counts.sum()
        total = count_of_all.clamp(min=1)
        mean = (everyone[:, :channels] * counts).sum(0) / total
        squares = everyone[:, channels:-1] + counts * (everyone[:, :channels] - mean) ** 2
        var = squares.sum(0) / total
        y = F.batch_norm(x, mean.to(x.dtype), var.to(x.dtype), weight, bias, training=False, eps=eps)
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps), total)
        ctx.replicas = replicas
        ctx.mark_non_differentiable(mean, var, count_of_all)
        return y, mean, var, count_of_all

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, *_: Any) -> Any:
        x, weight, mean, inverse, total = ctx.saved_tensors
        shape = [1, x.shape[1]] + [1] * (x.dim() - 2)
        wide_x, wide_dy = x.to(mean.dtype), dy.to(mean.dtype).contiguous()
        if x.numel():
            # The library's own kernel for two sums, about the mean of all replicas: of dy * normalised x, and of dy.
            _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
                wide_dy, wide_x, torch.ones_like(mean), None, None, mean, inverse, True, 0.0, [False, True, True]
            )
        else:
            grad_weight, grad_bias = torch.zeros_like(mean), torch.zeros_like(mean)
        sums = torch.stack([grad_weight, grad_bias])
        with BOOK.during("backward"):
            dist.all_reduce(sums, group=ctx.replicas.group)
        # dx = scale * (dy - mean dy - normalised x * mean(dy * normalised x)), as one line in x and dy per channel.
        scale = inverse if weight is None else inverse * weight.to(mean.dtype)
        slope = -scale * inverse * sums[0] / total
        offset = -scale * sums[1] / total - slope * mean
        dx = wide_x * slope.view(shape)
        dx += offset.view(shape)
        dx.addcmul_(wide_dy, scale.view(shape))
        if weight is None:
            return dx.to(x.dtype), None, None, None, None
        return dx.to(x.dtype), grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), None, None

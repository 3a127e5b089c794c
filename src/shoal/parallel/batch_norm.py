"""Batch norm over the samples of all replicas, whatever module asks for it.

Synchronised statistics equal those of one rank at the full batch: each rank gives its count, mean and sum of
squared deviations, and these are combined without cancellation (Chan, Golub & LeVeque 1979). Backward needs two
sums per channel from everyone. PyTorch's SyncBatchNorm runs on accelerators only.

Modules keep their own forward. While one of the model's modules computes, `torch.batch_norm`, which
`nn.functional.batch_norm` calls, is the synchronised one: so subclasses of batch norm and hand-written modules that
call the function are synchronised as PyTorch's own layers are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Members
from shoal.parallel.recompute import forward_phase, recomputing


class NotSynchronised(ValueError):
    """A batch norm that takes its statistics in a way of its own."""


def batch_norms(model: nn.Module) -> list[tuple[str, _BatchNorm]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]


@dataclass
class _Scope:
    """The replicas of a model whose modules compute, and what they have asked for."""

    replicas: Members | None
    """None: statistics are those of this rank's samples."""
    asked: int = 0
    """Calls of batch norm so far."""
    counting: list[_Seen] = field(default_factory=list)
    """The batch norms under way."""
    by_others: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """(channels, bytes of a statistic) -> forwards and repetitions in this step that other modules asked for."""
    couples: bool = False
    """Whether a module that is no batch norm has ever asked."""


_scope: _Scope | None = None
_across: Members | None = None
_scopes: WeakKeyDictionary[nn.Module, _Scope] = WeakKeyDictionary()
_plain_batch_norm = torch.batch_norm
_plain_check = F._verify_batch_size
_plain_sync_forward = SyncBatchNorm.forward


def synchronise(model: nn.Module, replicas: Members) -> None:
    """Every batch norm of the model now sees the full (micro-)batch of all replicas."""
    _install(model, _Scope(replicas))


def count_once(model: nn.Module) -> None:
    """Batch norm that stays local: its running statistics take no notice of empty batches."""
    _install(model, _Scope(None))


@contextmanager
def across(members: Members) -> Iterator[None]:
    """Batch norms in here are of planes that these ranks hold parts of, samples included."""
    global _across
    before, _across = _across, members
    try:
        yield
    finally:
        _across = before


def couples_samples(model: nn.Module) -> bool:
    """Whether samples see each other in batch norm, as far as the model has shown."""
    return bool(batch_norms(model)) or (model in _scopes and _scopes[model].couples)


def take_calls_by_others(model: nn.Module) -> dict[tuple[int, int], list[int]]:
    """What modules that are no batch norms have synchronised since this was last asked: (channels, bytes of a
    statistic) -> calls in forward, calls in repetitions."""
    if model not in _scopes:
        return {}
    taken, _scopes[model].by_others = _scopes[model].by_others, {}
    return taken


def release(model: nn.Module) -> None:
    """Takes `synchronise` back: every batch norm sees its own batch again."""
    if model in _scopes:
        _scopes.pop(model).replicas = None  # Also for wrappers that are inside of others by now.
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, partial) and forward.func in (_inside, _norm):
            del module.forward
            if getattr(forward.args[-1], "__self__", None) is not module:
                module.forward = forward.args[-1]  # It had been replaced before.


def _install(model: nn.Module, scope: _Scope) -> None:
    torch.batch_norm, F._verify_batch_size = _batch_norm, _check_size
    SyncBatchNorm.forward = _sync_forward  # type: ignore[method-assign]
    _scopes[model] = scope
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            wrapper = partial(_norm, scope, name, module, module.forward)
        elif not type(module).__module__.startswith("torch.nn."):
            wrapper = partial(_inside, scope, module.forward)
        else:
            continue
        module.forward = update_wrapper(wrapper, module.forward)


@contextmanager
def _entered(scope: _Scope) -> Iterator[None]:
    global _scope
    before, _scope = _scope, scope
    try:
        yield
    finally:
        _scope = before


def _inside(scope: _Scope, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module that may call batch norm as a function."""
    if _scope is scope:
        return forward(*args, **kwargs)
    with _entered(scope):
        return forward(*args, **kwargs)


def _norm(scope: _Scope, name: str, module: _BatchNorm, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a batch norm, its own or a subclass's."""
    counter, asked = module.num_batches_tracked, scope.asked
    before = None if counter is None else counter._version
    means = None if module.running_mean is None else module.running_mean._version
    seen = _Seen(counter, before)
    scope.counting.append(seen)
    try:
        with _entered(scope):
            result = forward(*args, **kwargs)
    finally:
        scope.counting.pop()
    changed = means is not None and module.running_mean is not None and module.running_mean._version != means
    if scope.replicas is not None and module.training and scope.asked == asked and changed:
        raise NotSynchronised(
            f"{name or 'the model'} ({type(module).__name__}) takes the statistics of its batch without "
            "torch.nn.functional.batch_norm, so they cannot be taken over all replicas; call that function in its "
            'forward, or declare batch_norm="local" in the job'
        )
    return result


class _Seen:
    """A batch norm's counter of batches, and its version before the forward."""

    def __init__(self, counter: torch.Tensor | None, version: int | None) -> None:
        self.counter, self.version = counter, version

    def take_back(self, empty: torch.Tensor | int) -> None:
        """A micro-batch may be empty on every rank (the short one at an epoch's end): it is not counted."""
        if self.counter is not None and self.counter._version != self.version:
            self.counter.sub_(empty)


def _check_size(size: Any) -> None:
    """One value per channel on this rank is enough where other ranks have more."""
    if _scope is None or (_scope.replicas is None and _across is None):
        _plain_check(size)


def _sync_forward(module: SyncBatchNorm, x: torch.Tensor) -> torch.Tensor:
    """PyTorch's own asks for an accelerator and takes the job's ranks for replicas of each other."""
    return _plain_sync_forward(module, x) if _scope is None else _BatchNorm.forward(module, x)


def _batch_norm(
    input: torch.Tensor,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    """In place of `torch.batch_norm`."""
    scope = _scope
    if scope is not None:
        scope.asked += 1
    if scope is None or not training:
        return _plain_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)
    if not scope.counting:
        scope.couples = True
    replicas = scope.replicas if _across is None else _across
    if replicas is None:
        if not input.numel():
            # Copies, not None: recomputation must save the same tensors for backward as the first forward did.
            running_mean, running_var = (None if t is None else t.clone() for t in (running_mean, running_var))
            if scope.counting:
                scope.counting[-1].take_back(1)
        return _plain_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)
    if not scope.counting and _across is None and BOOK.phase != "evaluate":
        key = (input.shape[1], torch.promote_types(input.dtype, torch.float32).itemsize)
        scope.by_others.setdefault(key, [0, 0])[recomputing()] += 1
    y, mean, var, count = _Synchronised.apply(input, weight, bias, eps, replicas)
    with torch.no_grad():
        if scope.counting:
            scope.counting[-1].take_back((count == 0).to(torch.long))
        if running_mean is not None:
            rate = (count > 0).to(running_mean.dtype) * momentum
            unbiased = var * (count / (count - 1).clamp(min=1))
            running_mean.lerp_(mean.to(running_mean.dtype), rate)
            running_var.lerp_(unbiased.to(running_var.dtype), rate)
    return y


def normalised(x: torch.Tensor, eps: float, members: Members) -> torch.Tensor:
    """[1, rows, elements] with mean zero and variance one in each row, of which each rank holds some elements."""
    y: torch.Tensor = _Synchronised.apply(x, None, None, eps, members)[0]
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
        # Under autocast narrow activations meet wide weights, and statistics are then as wide as these.
        kept = x.dtype if weight is None else weight.dtype
        y = F.batch_norm(x, mean.to(kept), var.to(kept), weight, bias, training=False, eps=eps)
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps), total)
        ctx.replicas, ctx.bias_dtype = replicas, None if bias is None else bias.dtype
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
        _, learns_weight, learns_bias, _, _ = ctx.needs_input_grad
        for_weight = grad_weight.to(weight.dtype) if learns_weight else None
        for_bias = grad_bias.to(ctx.bias_dtype) if learns_bias else None
        return dx.to(x.dtype), for_weight, for_bias, None, None

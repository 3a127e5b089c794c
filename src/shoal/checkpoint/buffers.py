"""A model's buffers over replicas: which belong to its state, and their mean if replicas differ.

With local batch norm every replica has running statistics of its own samples; their mean is evaluated and saved.
With synchronised batch norm they are equal, and the mean is that value to the bit.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from shoal.comm.mesh import Members


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The persistent buffers of the model: without those that it recomputes when it is built."""
    passing = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    return {name: buffer.detach() for name, buffer in model.named_buffers() if name not in passing}


def averaged_buffers(model: nn.Module, members: Members) -> dict[str, torch.Tensor]:
    """The buffers, floating-point ones averaged over all members; the model is unchanged. Collective."""
    buffers = persistent_buffers(model)
    floating = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point() and buffer.numel()}
    if members.group is None or not floating:
        return buffers
    mine = torch.cat([buffer.reshape(-1).double() for buffer in floating.values()])
    # The first member's value plus the mean difference from it: where all are equal the difference is zero,
    # so the mean is exact for any number of members, and a mask's infinities do not turn into NaN.
    first = mine.clone()
    dist.broadcast(first, src=members.ranks[0], group=members.group)
    difference = torch.where(mine == first, 0.0, mine - first)
    dist.all_reduce(difference, group=members.group)
    means = (first + difference / members.size).split([buffer.numel() for buffer in floating.values()])
    for (name, buffer), mean in zip(floating.items(), means, strict=True):
        buffers[name] = mean.to(buffer.dtype).view(buffer.shape)
    return buffers


def average_buffers(model: nn.Module, members: Members) -> None:
    """Averages the floating-point buffers over all members, in place. Collective."""
    own = persistent_buffers(model)
    with torch.no_grad():
        for name, mean in averaged_buffers(model, members).items():
            if mean is not own[name]:
                own[name].copy_(mean)

"""Functions that tests run on real ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shoal.train.channel import Channel


def add_up(arguments: dict[str, Any], channel: Channel) -> dict[str, Any]:
    value = torch.tensor(float(channel.rank + arguments.get("plus", 0)))
    dist.all_reduce(value)
    channel.say({"rank": channel.rank})
    return {"rank": channel.rank, "world": channel.world, "sum": value.item()}

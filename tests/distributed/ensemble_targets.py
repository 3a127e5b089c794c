"""What the tests of ensembles let ranks do."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from shoal.launch.join import join, leave


def meet(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Sums a number over this world, and tells where it stands."""
    me = join(backend="gloo")
    value = torch.tensor([arguments["value"] + me.rank])
    dist.all_reduce(value)
    channel.say({"event": "note", "text": f"{arguments['value']}.{me.rank}"})
    leave()
    return {"rank": me.rank, "world": me.world, "sum": int(value), "local": int(os.environ["LOCAL_RANK"])}

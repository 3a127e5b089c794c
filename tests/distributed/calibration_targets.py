"""Functions that the tests of calibrations run on real ranks."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.network import agreed
from shoal.launch.channel import Channel
from shoal.launch.join import current, join, leave

SIZES = (4, 1 << 14, 1 << 18)


def by_own_file(arguments: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Joins with a calibration file of this rank's own, reduces, and says by what it chose."""
    os.environ.update(arguments["each"][channel.rank])
    try:
        me = join(emulate=arguments.get("emulate"))
    except ValueError as error:
        return {"error": str(error), "joined": current() is not None}
    network = agreed()
    assert network is not None
    pair: Any = dist.new_group([me.world - 2, me.world - 1], backend=me.backend)
    group: Any = dist.new_group(backend=me.backend)
    sums, algorithms = [], []
    for size in SIZES:
        value = torch.ones(size)
        dist.all_reduce(value, group=group)
        if me.rank >= me.world - 2:
            dist.all_reduce(value, group=pair)
            algorithms.append(pair.algorithm_of("all_reduce", 4 * size))
        sums.append(value.mean().item())
        algorithms.append(group.algorithm_of("all_reduce", 4 * size))
    leave()
    return {
        "network": asdict(network),
        "backend": me.backend,
        "algorithms": algorithms,
        "sums": sums,
        "after": agreed() is None,
    }

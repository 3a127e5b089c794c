"""Which kind of owner a strategy asks for."""

from __future__ import annotations

from shoal.parallel.owner.base import Owner
from shoal.parallel.owner.fully_sharded import FullySharded
from shoal.parallel.owner.hogwild import HogwildOwner
from shoal.parallel.owner.replicated import ReplicatedOwner
from shoal.parallel.owner.sharded import ShardedOwner
from shoal.parallel.owner.shared_memory import SharedMemoryOwner
from shoal.parallel.placement import Placement


def owner_kind(placement: Placement) -> type[Owner]:
    if placement.hogwild is not None:
        return HogwildOwner
    if placement.shared_memory:
        return SharedMemoryOwner
    return {0: ReplicatedOwner, 1: ShardedOwner, 2: ShardedOwner, 3: FullySharded}[placement.zero]

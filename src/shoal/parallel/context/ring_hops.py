"""Tensors that go around a ring of ranks: each hop sends to the next rank while it receives from the one before.

A hop is started before the work it shall hide behind and waited for after it. Waiting has a price of its own (a third
of a millisecond over Gloo), so what travels together is laid end to end in one message.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Members

KEYS_TAG, GRADIENTS_TAG = 1, 2
"""Messages of the two kinds are in flight between the same ranks at the same time."""


class Hop:
    """One message to the next rank and one of the same size from the rank before, in flight until `wait`."""

    def __init__(self, leaving: torch.Tensor, arriving: torch.Tensor, ring: Members, *, tag: int, phase: str) -> None:
        # Both are held until they are through: memory given back under way would be sent as something else.
        self._leaving, self._arriving = leaving, arriving
        after, before = (ring.index + 1) % ring.size, (ring.index - 1) % ring.size
        both = [
            dist.P2POp(dist.isend, leaving, group=ring.group, tag=tag, group_peer=after),
            dist.P2POp(dist.irecv, arriving, group=ring.group, tag=tag, group_peer=before),
        ]
        with BOOK.during(phase):
            # Backends that run one message after the other need neighbours to take turns.
            self._works = dist.batch_isend_irecv(both if ring.index % 2 else both[::-1])

    def wait(self) -> torch.Tensor:
        """What arrived. The memory of what left may be used again."""
        for work in self._works:
            work.wait()
        return self._arriving


def around(parcel: torch.Tensor, ring: Members, *, tag: int, phase: str) -> Iterator[tuple[int, torch.Tensor]]:
    """(rank, its parcel) for every rank, this one first; the next is on its way while one is in use.

    A parcel may be used until the next is asked for; afterwards its memory holds another.
    """
    spare = torch.empty_like(parcel)
    for hops in range(ring.size - 1):
        moving = Hop(parcel, spare, ring, tag=tag, phase=phase)
        yield (ring.index - hops) % ring.size, parcel
        parcel, spare = moving.wait(), parcel
    yield (ring.index + 1) % ring.size, parcel


def packed(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def unpacked(parcel: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a parcel, shaped like k and v."""
    keys, values = parcel.split([k.numel(), v.numel()])
    return keys.view(k.shape), values.view(v.shape)

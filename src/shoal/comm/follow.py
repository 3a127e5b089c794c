"""Ranks outside of a mesh: torch.distributed makes a group only if every rank of the job takes part.

The first rank of the mesh announces each group in the job's store before it is made; the others follow.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch.distributed as dist

from shoal.comm.counted import CountedGroup
from shoal.comm.transport.signed_store import SignedStore

ANNOUNCED_S = 600.0


class Announcer:
    """On the first rank of the mesh. `session`: both sides count the meshes of a job."""

    def __init__(self, store: SignedStore, session: int) -> None:
        self._store, self._session, self._groups = store, session, 0

    def __call__(self, ranks: Sequence[int]) -> None:
        """No ranks: a group of all."""
        self._store.set(f"groups/{self._session}/{self._groups}", json.dumps(list(ranks)))
        self._groups += 1


def follow(store: SignedStore, session: int, backend: str | None, labels: Sequence[str]) -> list[dist.ProcessGroup]:
    """On a rank outside of the mesh: takes part until the groups of all ranks with these labels are made."""
    found: list[dist.ProcessGroup] = []
    number = 0
    while len(found) < len(labels):
        ranks = json.loads(store.get(f"groups/{session}/{number}", ANNOUNCED_S))
        number += 1
        group = dist.new_group(ranks or None, backend=backend)
        if not ranks:
            if isinstance(group, CountedGroup):
                group.axis = labels[len(found)]
            found.append(group)
    return found

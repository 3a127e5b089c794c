"""A barrier that names the ranks that did not arrive, as Gloo's `monitored_barrier` does.

Every rank sends rank 0 a point-to-point message, and rank 0 replies to those that arrived with a list of those that did
not. Messages of a late rank disturb neither other collectives nor the next barrier, which has other tags.
"""

from __future__ import annotations

import contextlib
import time

import torch

from shoal.comm.point_to_point import PointToPoint
from shoal.comm.progress import TimedOut
from shoal.comm.transport.link import PeerLost
from shoal.comm.vector import Vector

ANSWER_S = 1.0
"""Seconds to wait for rank 0's reply."""


class NotAllArrived(RuntimeError):
    """Ranks that did not reach a monitored barrier in time."""


def monitored_barrier(
    messages: PointToPoint, rank: int, size: int, *, number: int, timeout_s: float, wait_all_ranks: bool
) -> None:
    """`number` counts the monitored barriers of this group. Raises NotAllArrived.

    Without `wait_all_ranks` rank 0 reports the first missing rank; with it, all of them.
    """
    arrive, answer = -2 * number, -2 * number - 1  # Negative, because users' tags are not.
    deadline = time.monotonic() + timeout_s
    in_time = f"in {1000 * timeout_s:.0f} ms"
    nothing, missing = Vector(torch.empty(0)), Vector(torch.zeros(size, dtype=torch.int64))
    if rank:
        messages.send(0, arrive, nothing, background=True)
        try:
            # Rank 0 may itself arrive this late, and replies only after waiting for the others.
            messages.wait(messages.receive(0, answer, missing, background=False), 2 * timeout_s + ANSWER_S)
        except (TimedOut, PeerLost) as error:
            raise NotAllArrived(
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                f"from rank 0: it did not reply {in_time} ({error}). It may wait for another rank, or be late itself."
            ) from error
        late = _listed(missing)
        if late:
            raise NotAllArrived(
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                f"from rank 0: {_named(late)} failed to pass monitoredBarrier {in_time}"
            )
        return
    arrivals = {other: messages.receive(other, arrive, nothing, background=False) for other in range(1, size)}
    for other, arrival in arrivals.items():
        try:
            messages.wait(arrival, max(0.0, deadline - time.monotonic()))
        except (TimedOut, PeerLost):
            missing.tensor[other] = 1
            if not wait_all_ranks:
                break
    late = _listed(missing)
    answers = [messages.send(other, answer, missing, background=True) for other in arrivals if other not in late]
    for each in answers:
        with contextlib.suppress(TimedOut, PeerLost):
            messages.wait(each, max(1.0, deadline - time.monotonic()))
    if late:
        raise NotAllArrived(f"[Rank 0]: {_named(late)} failed to pass monitoredBarrier {in_time}")


def _listed(missing: Vector) -> list[int]:
    return [int(rank) for rank in missing.tensor.nonzero().flatten()]


def _named(ranks: list[int]) -> str:
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

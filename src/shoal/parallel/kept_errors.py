"""What compression has kept back, to and from checkpoints.

Every replica writes its error of each parameter, element by element like the parameter itself, so that any strategy can
read it. As many replicas as there were take up their own; where there are more or fewer, each takes an equal part of
the sum: what was held back for all reaches all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from shoal.parallel.average import AVERAGE
from shoal.parallel.bucket import Bucket
from shoal.parallel.compression import Compression, Fragment, working_type
from shoal.parallel.flat_slice import Piece
from shoal.parallel.placement import Route

ERRORS = "error "
"""What the names of errors begin with; optimisers name no state so."""
ISLANDS = "island "
"""What the names of an island's own state begin with (`checkpoint/islands.py`)."""
PRIVATE = (ERRORS, ISLANDS, AVERAGE)


class SavedErrors(Protocol):
    """What a checkpoint offers of what was not sent."""

    def errors(self, name: str, what: str) -> Sequence[str]:
        """The keys of the replicas' errors of a parameter, in the order of replicas; none if nothing was kept."""

    def read(self, name: str, key: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of one of them, of this rank's part of the parameter laid out flat."""

    def extra(self, name: str, key: str) -> torch.Tensor | None:
        """A tensor of another size that was saved for this rank's part of a parameter."""


def error_key(what: str, replica: int, replicas: int) -> str:
    """How a checkpoint names one replica's error."""
    return f"{ERRORS}{what} {replica} of {replicas}"


def errors(compression: Compression) -> Iterator[tuple[str, Piece]]:
    """What this rank writes: its error of each parameter, as (state key, piece)."""
    for bucket in compression.buckets:
        if not bucket.writes_errors or not compression.step:
            continue
        part, dtype = bucket.compressed, working_type(bucket.buffer.dtype)
        compressed = {each.slot.name: each for each in compression.fragments[id(bucket)]}
        for slot in bucket.buffer.slots:
            low, high = max(slot.start, part.start) - slot.start, min(slot.stop, part.stop) - slot.start
            # Also of what is too small to be compressed: another rank's part of it may not be.
            if low >= high or len(slot.shape) < 2:
                continue
            each = compressed.get(slot.name)
            for what in compression.method.keeps:
                values = torch.zeros(high - low, dtype=dtype)
                if each is not None and what in each.state:
                    values[each.start - low : each.stop - low] = each.state[what].cpu()
                yield error_key(what, *_replica(bucket.route)), Piece(slot.name, tuple(slot.shape), low, values)


def extras(compression: Compression) -> Iterator[tuple[str, str, torch.Tensor]]:
    """State of another size, the same on all that compress, as (parameter, key, values)."""
    for bucket in compression.buckets:
        if bucket.writes_errors and bucket.route.between.index == 0:
            for each in compression.fragments[id(bucket)]:
                for what in compression.method.extras:
                    if what in each.state:
                        yield each.slot.name, _extra_key(what, bucket, each), each.state[what]


def load(compression: Compression, saved: SavedErrors, *, step: int) -> None:
    """Takes up the errors that a checkpoint of `step` steps holds. State of another size is not taken up where it was
    made of other rows: it is only a starting point (PowerSGD's query)."""
    compression.step = step
    for bucket in compression.buckets:
        replica, replicas = _replica(bucket.route)
        dtype, device = working_type(bucket.buffer.dtype), bucket.buffer.device
        for each in compression.fragments[id(bucket)]:
            each.state.clear()
            name = each.slot.name
            for what in compression.method.keeps:
                keys = saved.errors(name, what)
                if len(keys) == replicas:
                    each.state[what] = saved.read(name, keys[replica], each.start, each.stop).to(device, dtype)
                elif keys:
                    total = sum(saved.read(name, key, each.start, each.stop).to(device, dtype) for key in keys)
                    each.state[what] = total / replicas  # type: ignore[assignment]
            for what in compression.method.extras:
                extra = saved.extra(name, _extra_key(what, bucket, each))
                if extra is not None:
                    each.state[what] = extra.to(device, dtype)


def _extra_key(what: str, bucket: Bucket, each: Fragment) -> str:
    return f"{what} [{each.start}:{each.stop}] {bucket.route.outside.index}"


def _replica(route: Route) -> tuple[int, int]:
    """This rank's place among those with errors of their own, and how many there are."""
    return route.outside.index * route.between.size + route.between.index, route.between.size * route.outside.size

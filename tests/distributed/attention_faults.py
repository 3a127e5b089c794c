"""Wrong ring attention, planted on purpose: each function changes one internal step in the process it is called in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shoal.parallel.context import ring_parts
from shoal.parallel.context.ring_parts import RingPart


def forget_one_causal_mask(*, index: int) -> None:
    """Rank `index` of a ring computes its own diagonal chunk as if nothing in it lay in the future."""
    honest = ring_parts.part_of

    def faulty(**where: Any) -> RingPart | None:
        part = honest(**where)
        return replace(part, causal=False) if part and part.causal and where["index"] == index else part

    ring_parts.part_of = faulty


def attend_to_one_future_chunk(*, index: int) -> None:
    """Rank `index` also attends to the later chunk of the ranks before it, which it should leave out."""
    honest = ring_parts.part_of

    def faulty(**where: Any) -> RingPart | None:
        part = honest(**where)
        if part and where["index"] == index and where["source"] < index:
            return replace(part, columns=slice(0, where["length"]))
        return part

    ring_parts.part_of = faulty

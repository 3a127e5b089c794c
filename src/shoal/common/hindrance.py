"""What slows or kills ranks on purpose, as options say it: the same words for training and for simulation.

    rank 2: 3x            this rank computes three times as long
    random 10%: 5x        in every step each rank is slow with this chance, drawn from the seed
    all: 20 ms            every rank computes this much longer in a step (also with `rank` and `random`)
    rank 3 at step 40     this rank kills itself before it makes the step

Several are separated by ";". A factor applies to what is measured and to added time alike.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

_WHO = re.compile(r"(?:rank\s+(?P<rank>\d+)|random\s+(?P<percent>[\d.]+)\s*%|(?P<all>all))\s*:\s*(?P<how>.*)")
_HOW = re.compile(r"(?P<number>[\d.]+)\s*(?P<unit>x|ms|s)")
_FAIL = re.compile(r"rank\s+(?P<rank>\d+)\s+at\s+step\s+(?P<step>\d+)")


class BadHindrance(ValueError):
    """A slow or failing rank that cannot be meant, in one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowRanks:
    """Ranks that compute longer."""

    rank: int | None = None
    """None: any of them."""
    chance: float = 1.0
    """That a rank is slow in a step."""
    factor: float = 1.0
    added_s: float = 0.0

    def strikes(self, rank: int, step: int, seed: int) -> bool:
        """Whether a rank is slow in a step: a function of these numbers, so a resumed run is hindered alike."""
        if self.rank not in (None, rank):
            return False
        return self.chance >= 1 or random.Random(f"{seed} {step} {rank}").random() < self.chance


@dataclass(frozen=True, kw_only=True, slots=True)
class KilledRank:
    """A rank that kills itself before it makes a step, counted from 1."""

    rank: int
    step: int


def read_slow_ranks(text: str | None, *, world: int, option: str = "--straggler") -> tuple[SlowRanks, ...]:
    """Of an option's text; a BadHindrance says what is wrong with it."""
    found = []
    for part in _parts(text):
        who = _WHO.fullmatch(part)
        how = _HOW.fullmatch(who["how"].strip()) if who else None
        if who is None or how is None:
            raise BadHindrance(
                f'{option} {part!r}: expected who and how much, such as "rank 2: 3x", "random 10%: 5x" or "all: 20 ms"'
            )
        amount, chance = _number(how["number"], option, part), 1.0
        if who["percent"] is not None:
            chance = _number(who["percent"], option, part) / 100
            if not 0 < chance <= 1:
                raise BadHindrance(f"{option} {part!r}: {who['percent']}% of steps; expected above 0% and up to 100%")
        rank = None if who["rank"] is None else _rank(who["rank"], world, option, part)
        if how["unit"] == "x":
            if amount < 1:
                raise BadHindrance(f"{option} {part!r}: a factor of {amount:g}; expected at least 1x")
            found.append(SlowRanks(rank=rank, chance=chance, factor=amount))
        else:
            found.append(SlowRanks(rank=rank, chance=chance, added_s=amount / (1000 if how["unit"] == "ms" else 1)))
    return tuple(found)


def read_killed_ranks(text: str | None, *, world: int, option: str = "--fail") -> tuple[KilledRank, ...]:
    """Of an option's text; a BadHindrance says what is wrong with it."""
    found = []
    for part in _parts(text):
        match = _FAIL.fullmatch(part)
        if match is None:
            raise BadHindrance(f'{option} {part!r}: expected a rank and a step, such as "rank 3 at step 40"')
        step = int(match["step"])
        if step < 1:
            raise BadHindrance(f"{option} {part!r}: steps are counted from 1")
        found.append(KilledRank(rank=_rank(match["rank"], world, option, part), step=step))
    return tuple(found)


def without_killed(text: str | None, rank: int) -> str | None:
    """An option's text without the first entry that kills a rank: what has happened does not happen again when ranks
    are started anew."""
    parts = _parts(text)
    at = {int(match["step"]): part for part in parts if (match := _FAIL.fullmatch(part)) and int(match["rank"]) == rank}
    if at:
        parts.remove(at[min(at)])
    return "; ".join(parts) or None


def _parts(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(";") if part.strip()]


def _rank(text: str, world: int, option: str, part: str) -> int:
    if int(text) >= world:
        raise BadHindrance(f"{option} {part!r}: the strategy has ranks 0 to {world - 1}")
    return int(text)


def _number(text: str, option: str, part: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadHindrance(f"{option} {part!r}: {text!r} is no number") from None

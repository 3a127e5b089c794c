"""What the causes of a run's speed are read from: times of its ranks, its ledger, its links, and a probe of its job.

Everything but the probe is in the record. Nothing here imports torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.comm.emulate import WrongEmulation, parse_emulation
from shoal.comm.ledger import Ledger
from shoal.strategy import Strategy, StrategyError, parse

GRADIENTS = ("gradient", "optimizer", "outer", "loss")
"""Phases whose traffic is that of parameters: it does not grow with the batch."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One thing that held a run back."""

    name: str
    """late-rank, imbalance, communication, small-messages, bubble, data, recompute, small-batch or off-core."""
    text: str
    gain_s: float
    """Seconds of a step that are saved without it."""
    step_s: float

    @property
    def share(self) -> float:
        """Of the step."""
        return self.gain_s / self.step_s if self.step_s else 0.0

    @property
    def line(self) -> str:
        """In one line."""
        return f"{self.share:.0%} of the step is {self.text}"


@dataclass(frozen=True)
class RankTimes:
    """The median step of one rank."""

    rank: int
    wall_s: float
    wait_s: float
    data_s: float
    forward_s: float
    cpu_s: float

    @property
    def own_s(self) -> float:
        """What it does itself, data left out."""
        return max(0.0, self.wall_s - self.wait_s - self.data_s)

    @property
    def busy_s(self) -> float:
        return self.wall_s - self.wait_s


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """The slowest link of a run, as far as it is known."""

    latency_s: float
    byte_s: float


@dataclass(frozen=True, kw_only=True)
class Probed:
    """What `probe.py` measured of the job alone: one micro-batch of one rank, seconds of a core."""

    samples: int
    fixed_s: float
    """Of forward and backward, what does not grow with the samples."""
    growing_s: float
    update_s: float
    forward_s: float
    kept_bytes: int
    """Activations that backward needs."""
    parameters: Sequence[tuple[str, int]] = ()
    """The largest, with their bytes."""
    parameter_bytes: int = 0
    memory_bytes: int = 0
    """Of the host."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All of a run that a cause may be read from."""

    ranks: Sequence[RankTimes]
    strategy: Strategy | None
    ledger: Ledger = field(default_factory=Ledger)
    link: LinkSpeed | None = None
    probed: Probed | None = None
    memory_bytes: int | None = None
    """Peak of the rank that needs most."""

    @property
    def step_s(self) -> float:
        return statistics.fmean(each.wall_s for each in self.ranks)

    @property
    def micro(self) -> int:
        return self.strategy.micro_batches if self.strategy is not None else 1

    @property
    def wait_s(self) -> float:
        """Of the rank that waits least: no rank that is late explains it."""
        return min((each.wait_s for each in self.ranks), default=0.0) if len(self.ranks) > 1 else 0.0


def evidence(
    strategy: str,
    ranks: Sequence[Mapping[str, Any]],
    *,
    ledger: Ledger | None = None,
    arguments: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    probed: Probed | None = None,
    memory_bytes: int | None = None,
) -> Evidence:
    """From a run's record. `ranks`: `summary["ranks"]`."""
    return Evidence(
        ranks=rank_times(ranks),
        strategy=_strategy(strategy),
        ledger=ledger or Ledger(),
        link=link_of(arguments or {}, environment or {}),
        probed=probed,
        memory_bytes=memory_bytes,
    )


def rank_times(rows: Sequence[Mapping[str, Any]]) -> list[RankTimes]:
    """Of the ranks that made steps."""
    return [
        RankTimes(rank, *(float(row[name]) for name in ("wall_s", "wait_s", "data_s", "forward_s", "cpu_s")))
        for rank, row in enumerate(rows)
        if row
    ]


def link_of(arguments: Mapping[str, Any], environment: Mapping[str, Any]) -> LinkSpeed | None:
    """The link that was emulated, or the one that the ranks agreed on when they joined."""
    if arguments.get("emulate"):
        try:
            emulated = parse_emulation(arguments["emulate"])
        except WrongEmulation:
            return None
        slow = emulated.between if emulated.hosts > 1 else emulated.inside
        return LinkSpeed(latency_s=slow.latency_s, byte_s=1 / slow.bytes_per_s)
    known = (environment.get("links") or {}).get("inside")
    return LinkSpeed(latency_s=known["latency_s"], byte_s=known["byte_s"]) if known else None


def _strategy(text: str) -> Strategy | None:
    try:
        return parse(text)
    except StrategyError:
        return None


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"

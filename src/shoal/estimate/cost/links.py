"""What a collective costs over levels of links, given where its ranks lie.

An axis of n ranks at distance `stride` has k of them in a unit of each level. A ring crosses a level with as many
links as ranks lie below it, so its bandwidth is the least over the levels it uses; each unit it visits adds that
level's hop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import mul

import numpy as np

from shoal.estimate.cost.constants import Physics
from shoal.estimate.cost.inputs import Column, Inputs
from shoal.estimate.cost.profile import Number, Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """The links of one axis of every row."""

    ranks: Column
    bytes_per_s: Column
    """Of a ring over all ranks of the axis, for each rank."""
    pair_bytes_per_s: Column
    """Of a rank that sends alone to its neighbour (the slowest neighbours)."""
    latency_s: Column
    """Hops of one ring."""
    local: Column
    """Ranks of the axis in one unit of the innermost level."""
    local_bytes_per_s: Column
    outer_bytes_per_s: Column
    """One rank's own share of the outermost level that the axis uses."""
    ramp: float
    start_s: float

    def ring_s(self, payload_bytes: Column, *, rounds: float = 1.0) -> Column:
        """All-gather or reduce-scatter of a payload (one round), all-reduce (two)."""
        wire_s = rounds * (self.ranks - 1) / self.ranks * payload_bytes / self.bytes_per_s
        return self._total_s(wire_s)

    def exchange_s(self, payload_bytes: Column, *, copies: Column | float = 0.0) -> Column:
        """All-to-all in which each rank sends `payload_bytes` in all, evenly: near ranks by fast links, far ones by
        slow. Where every token is sent `copies` times and copied on arrival, it goes once to each node that wants it.
        """
        inside = (self.local - 1) / self.ranks * payload_bytes / self.local_bytes_per_s
        here = self.local / self.ranks
        nodes = (1 / here - 1) * (1 - (1 - here) ** copies)
        sent = np.where(np.asarray(copies) > 0, nodes / np.maximum(1.0, copies), 1 - here)
        return self._total_s(np.maximum(inside, sent * payload_bytes / self.outer_bytes_per_s))

    def _total_s(self, wire_s: Column) -> Column:
        """With latency, and with what a message near its latency loses of its bandwidth."""
        fixed_s = self.start_s + self.latency_s
        return np.where(self.ranks > 1, fixed_s + wire_s + self.ramp * np.sqrt(fixed_s * wire_s), 0.0)

    def message_s(self, payload_bytes: Column) -> Column:
        """One message to the next rank, without its latency."""
        return np.where(self.ranks > 1, payload_bytes / self.pair_bytes_per_s, 0.0)


def path(
    inputs: Inputs,
    profile: Profile,
    physics: Physics,
    *,
    ranks: Column,
    stride: Column,
    others: Sequence[tuple[Column, Column]] = (),
    one_card: Number = 0.0,
) -> Path:
    """The links of an axis, or of several whose ranks form one group: `others` has (ranks, stride) of the others.

    `one_card` 1 lets a unit's messages leave it through one device's share alone.
    """
    axes = [
        (np.maximum(1.0, np.asarray(size, dtype=float)), np.asarray(distance, dtype=float))
        for size, distance in ((ranks, stride), *others)
    ]
    ranks = reduce(mul, (size for size, _ in axes))
    below = np.ones_like(reduce(mul, (size * distance for size, distance in axes)))
    slowest = np.full_like(below, np.inf)
    pair = np.full_like(below, np.inf)
    outer = np.full_like(below, np.inf)
    latency_s = np.zeros_like(below)
    local = local_rate = None
    levels = inputs.level_ranks.shape[0]
    for level in range(levels):
        within = reduce(mul, (np.clip(inputs.level_ranks[level] / distance, 1.0, size) for size, distance in axes))
        if level == levels - 1:  # Whatever is left is joined by the outermost links.
            within = ranks + 0 * within
        rate = inputs.level_bytes_per_s[level] * (physics.bus if level == 0 else physics.network)
        used = within > below * (1 + 1e-9)
        links = np.where(np.asarray(one_card) > 0, 1.0, below) if level else below
        slowest = np.where(used, np.minimum(slowest, rate * links), slowest)
        pair = np.where(used, np.minimum(pair, rate), pair)
        outer = np.where(used, rate, outer)
        hops = np.where(used, within / below - 1.0, 0.0)
        ratio = 1.0 if level == 0 else physics.hop_ratio * profile.hop_ratio * below**profile.hop_power
        latency_s = latency_s + hops * inputs.level_latency_s[level] * ratio
        if level == 0:
            local, local_rate = within, rate
        below = np.maximum(below, within)
    assert local is not None
    assert local_rate is not None
    return Path(
        ranks=ranks,
        bytes_per_s=slowest,
        pair_bytes_per_s=pair,
        latency_s=latency_s,
        local=local,
        local_bytes_per_s=local_rate,
        outer_bytes_per_s=outer,
        ramp=physics.ramp,
        start_s=physics.collective_s,
    )

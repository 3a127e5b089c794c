"""The bandwidth at which a compressor overtakes dense gradients: below it the link costs more than the compressing.

Dense buckets are reduced while backward still runs, each as soon as the one before it is through; what is not through
by then shows, and moving it takes computing time from backward. Compressed ones are encoded, sent and decoded one after
the other when backward is done. Both are simulated from what was measured: when the buckets of a step are ready, what
codecs cost (`calibration/codecs.py`), and what a link costs by itself. Where the two step times meet is the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, exp, inf, log, log2, prod

from shoal.comm.choice import all_reduce_time, choose_all_reduce
from shoal.comm.compress import traffic
from shoal.comm.network import LinkTimes, NetworkTimes
from shoal.comm.wire import sent
from shoal.common.numbers import falls_to_zero
from shoal.strategy.terms.compress import CompressTerm

ITEM_BYTES = 4
"""Gradients are compressed in 32 bits."""
SLOWEST, FASTEST = 1e4, 1e12
"""Bytes a second between which a crossing is looked for,"""
CLOSE = 1e-4
"""up to this part of it."""
FRAMED = 1 + 66 / 1448
"""Bytes on the wire for each byte of a TCP stream in full Ethernet frames: Ethernet, IP, TCP and its time stamps."""
FULL_SHARE = 0.95
"""Computing never stops altogether while bytes are moved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReducedBucket:
    """Gradients that are reduced together."""

    shapes: tuple[tuple[int, ...], ...]
    ready_s: float
    """When the last of them has been computed, from the step's start, if nothing was sent meanwhile."""

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES * sum(prod(shape) for shape in self.shapes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Computing:
    """A step of a job on one rank as if messages took no time."""

    step_s: float
    buckets: tuple[ReducedBucket, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Codec:
    """What compressing costs on a machine."""

    tensor_s: float
    element_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Ends:
    """What a link costs at its ends, on top of its wire."""

    times: LinkTimes
    background_share: float = 0.0
    """Part of a core that is taken from computing while bytes are moved behind it, however slowly: to sleep and wake up
    for every chunk of them."""
    background_byte_s: float = 0.0
    """Seconds of a core for each byte, on top."""
    framed: float = FRAMED

    def at(self, bytes_per_s: float, *, latency_s: float = 0.0) -> LinkTimes:
        """The link over a wire of that bandwidth."""
        own = self.times
        # Bytes go in chunks: the ends work on some while the wire carries others, so the slower of them counts.
        byte_s = max(own.byte_s, self.framed / bytes_per_s)
        return LinkTimes(own.latency_s + latency_s, byte_s, own.reduce_byte_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A job's step, the hosts it is replicated on (one rank each), and the link between them but for its bandwidth."""

    computing: Computing
    ends: Ends
    ranks: int = 2
    latency_s: float = 0.0

    def dense_s(self, bytes_per_s: float) -> float:
        """A step with dense gradients."""
        return self.computing.step_s + self.shown_s(bytes_per_s)

    def compressed_s(self, term: CompressTerm, codec: Codec, bytes_per_s: float) -> float:
        """A step with compressed gradients."""
        link = self.ends.at(bytes_per_s, latency_s=self.latency_s)
        parts_s = (self._compressed_bucket_s(term, codec, bucket, link) for bucket in self.computing.buckets)
        return self.computing.step_s + sum(parts_s)

    def islands_s(self, period: int, bytes_per_s: float) -> float:
        """A step of islands that average their models every `period` steps, with its part of that."""
        link = self.ends.at(bytes_per_s, latency_s=self.latency_s)
        nbytes = sum(bucket.nbytes for bucket in self.computing.buckets)
        return self.computing.step_s + collective_s("all_reduce", nbytes, self.ranks, link) / period

    def overtakes(self, term: CompressTerm, codec: Codec, *, slowdown: float = 1.0) -> float:
        """Bytes a second below which compressed steps win: 0 if they never do, inf if always. `slowdown`: how many
        compressed steps do for one dense step, for the time to a target in place of the time of a step.
        """
        return crossing(
            lambda bytes_per_s: self.dense_s(bytes_per_s),
            lambda bytes_per_s: slowdown * self.compressed_s(term, codec, bytes_per_s),
        )

    def shown_s(self, bytes_per_s: float) -> float:
        """How much longer than computing alone a dense step takes, with buckets reduced behind backward."""
        link = self.ends.at(bytes_per_s, latency_s=self.latency_s)
        # While bytes are moved, computing gets the rest of its core.
        share = min(FULL_SHARE, self.ends.background_share + self.ends.background_byte_s / link.byte_s)
        now_s = computed_s = 0.0
        wire_s = 0.0  # What the buckets that are ready still take.
        for bucket in self.computing.buckets:
            left_s, computed_s = bucket.ready_s - computed_s, bucket.ready_s
            both_s = min(wire_s, left_s / (1 - share))
            now_s += both_s + left_s - both_s * (1 - share)
            wire_s += collective_s("all_reduce", bucket.nbytes, self.ranks, link) - both_s
        return now_s + wire_s - computed_s

    def _compressed_bucket_s(self, term: CompressTerm, codec: Codec, bucket: ReducedBucket, link: LinkTimes) -> float:
        large = [shape for shape in bucket.shapes if traffic.pays(term, shape, ITEM_BYTES, ranks=self.ranks)]
        small = [shape for shape in bucket.shapes if shape not in large]
        found_s = sum(codec.tensor_s + codec.element_s * prod(shape) for shape in large)
        if small:
            found_s += collective_s("all_reduce", ITEM_BYTES * sum(map(prod, small)), self.ranks, link)
        return found_s + sum(
            collective_s(call.kind, call.payload_bytes, self.ranks, link) for call in _calls(term, large, self.ranks)
        )


def _calls(term: CompressTerm, shapes: Iterable[Sequence[int]], ranks: int) -> list[traffic.Transfer]:
    each = [traffic.sent_bytes(term, shape, ITEM_BYTES, ranks, step=10**9) for shape in shapes]
    if any(calls is None for calls in each):
        raise ValueError(f"what {term} sends is decided by the data; no crossing can be predicted for it")
    return traffic.joined([calls for calls in each if calls is not None])


def collective_s(kind: str, payload_bytes: int, ranks: int, link: LinkTimes) -> float:
    """Seconds of one collective among ranks of a host each."""
    if ranks == 1:
        return 0.0
    if kind == "all_reduce":
        network = NetworkTimes(inside=link, between=link)
        algorithm = choose_all_reduce(payload_bytes, ranks, 1, network)
        return all_reduce_time(algorithm, payload_bytes, ranks, 1, network)
    if kind in ("send", "recv", "broadcast"):
        steps = ceil(log2(ranks)) if kind == "broadcast" else 1
        return steps * (link.latency_s + payload_bytes * link.byte_s)
    cost = sent(kind, payload_bytes=payload_bytes, ranks=ranks)
    return cost.messages * link.latency_s + cost.bytes * link.byte_s


def crossing(dense_s: Callable[[float], float], other_s: Callable[[float], float]) -> float:
    """Bytes a second below which the other is faster: 0 if it is not even on the slowest link, inf if on all of them.
    Both times fall with bandwidth, and the dense one, which sends more, falls faster.
    """

    def lead(log_rate: float) -> float:
        return log(dense_s(exp(log_rate)) / other_s(exp(log_rate)))

    slow, fast = log(SLOWEST), log(FASTEST)
    above, below = lead(slow), lead(fast)
    if above <= 0:
        return 0.0
    return inf if below > 0 else exp(falls_to_zero(lead, slow, fast, above=above, below=below, close=CLOSE))


def crossings(
    setting: Setting, codecs: Mapping[CompressTerm, Codec], *, slowdowns: Mapping[str, float] | None = None
) -> dict[CompressTerm, float]:
    """Of each compression, the bytes a second below which it overtakes dense gradients, by the time of a step or, with
    slow-downs by name (`estimate/target.py`), by the time to a target."""
    slower = slowdowns or {}
    return {
        term: setting.overtakes(term, codec, slowdown=slower.get(type(term).__name__, 1.0))
        for term, codec in codecs.items()
    }

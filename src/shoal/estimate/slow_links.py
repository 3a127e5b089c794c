"""Predicts measured steps whose replicas exchange over rate-limited TCP links, and how good the predictions are.

A row gives the computing of a step and the goodput of a link; the exchange is predicted:

    exchange = ring bytes / rate x (1 + lost) + copies + idle
    lost     = RTO x rate / (3/8 (rate x QUEUE)^2 / MSS)

`lost`: a rate limiter queues QUEUE seconds of traffic and drops what exceeds it. A sender that adds a packet a round
trip and halves its window at a loss sends 3/8 W^2 packets between two losses (Mathis et al. 1997), W being the queue in
packets; a burst of losses is repaired after a timeout. So the fraction that is lost grows as rates fall: 25% at
50 Mb/s, 1% at 1 Gb/s. `copies`: the exchange goes through host memory, out and back. `idle`: after seconds without
traffic an exchange takes longer. Slow start would show after a quarter of a second already, and it does not: the
cause is not known.

Fitted, on the 32 rows of docs/validation.md: QUEUE_S, COPY_BYTES_PER_S and IDLE_S with its bound. The others are
Linux's and Ethernet's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.estimate.outer_calls import loose_sync, period
from shoal.estimate.validate import Prediction
from shoal.strategy import parse

Row = Mapping[str, str]

RTO_S = 0.2
"""Linux's shortest retransmission timeout (TCP_RTO_MIN)."""
MSS_BYTES = 8948
"""Of jumbo frames: the goodput that the rows give is 0.7% below the rates that were set, as their headers take."""
ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
NEEDED = ("strategy", "parameters", "link_mbps", "compute_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkConstants:
    """What was fitted."""

    queue_s: float = 0.055
    """Of traffic that the rate limiter queues. (A common setting of Linux's is 50 ms.)"""
    copy_bytes_per_s: float = 16e9
    """Between device and host memory; PCIe 4.0 x16 has 25e9 at best."""
    idle_s: float = 0.5
    """What an exchange takes longer after more than `idle_after_s` of computing."""
    idle_after_s: float = 2.0


FITTED = LinkConstants()


def exchange_s(
    nbytes: float, *, ranks: int, rate_bytes_per_s: float, idle_s: float, constants: LinkConstants = FITTED
) -> float:
    """One all-reduce of `nbytes` by a ring of hosts, after `idle_s` of computing."""
    if ranks == 1:
        return 0.0
    queue_packets = rate_bytes_per_s * constants.queue_s / MSS_BYTES
    bytes_between_losses = 3 / 8 * queue_packets**2 * MSS_BYTES
    lost = RTO_S * rate_bytes_per_s / bytes_between_losses
    ring_s = 2 * (ranks - 1) / ranks * nbytes / rate_bytes_per_s
    waking_s = constants.idle_s if idle_s > constants.idle_after_s else 0.0
    return ring_s * (1 + lost) + 2 * nbytes / constants.copy_bytes_per_s + waking_s


def is_slow_link(rows: Sequence[Row]) -> bool:
    """Whether these are rows of this kind: they give the computing, and the rate of a link."""
    return bool(rows) and all(name in rows[0] for name in NEEDED)


def predict_slow_links(rows: Sequence[Row], *, constants: LinkConstants = FITTED) -> list[Prediction]:
    """One prediction a row; a row that cannot be predicted carries the reason."""
    found = []
    for number, row in enumerate(rows, start=1):
        name = row.get("id") or str(number)
        try:
            found.append(Prediction(id=name, step_s=_step_s(row, constants)))
        except ValueError as error:
            found.append(Prediction(id=name, reason=str(error).splitlines()[0]))
    return found


def with_sources(rows: Sequence[Row]) -> list[Row]:
    """Rows without a source are grouped by scheme and rate."""
    return [{"source": _source(row), **row} for row in rows]


def _source(row: Row) -> str:
    scheme = row["strategy"].rpartition("sync=")[2].partition("(")[0] if "sync=" in row["strategy"] else "bsp"
    try:
        rate = float(row["link_mbps"])
        return f"{scheme}, {float(f'{rate:.2g}'):g} Mb/s"
    except ValueError:
        return scheme


def _step_s(row: Row, constants: LinkConstants) -> float:
    strategy = parse(row["strategy"])
    steps = period(strategy)
    sync = loose_sync(strategy)
    compute_s, rate = _number(row, "compute_s"), _number(row, "link_mbps") * 1e6 / 8
    dtype = row.get("wire_dtype") or "fp32"
    if dtype not in ITEM_BYTES:
        raise ValueError(f"wire_dtype is {dtype}; expected one of {', '.join(ITEM_BYTES)}")
    nbytes = _number(row, "parameters") * ITEM_BYTES[dtype]
    sent = [nbytes] if sync is None else [size for kind, size in sync.sends([int(nbytes)], 0) if size]
    idle_s = steps * compute_s
    exchanged_s = sum(
        exchange_s(size, ranks=strategy.world, rate_bytes_per_s=rate, idle_s=idle_s, constants=constants)
        for size in sent
    )
    return compute_s + exchanged_s / steps


def _number(row: Row, name: str) -> float:
    try:
        number = float(row[name])
    except (KeyError, ValueError):
        raise ValueError(f"{name} is {row.get(name)!r}; expected a number") from None
    if not 0 < number < float("inf"):
        raise ValueError(f"{name} is {number:g}; expected a number above 0")
    return number

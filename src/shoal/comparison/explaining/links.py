"""Communication that nothing hides: what of it is bytes, what is the latency of messages that are too small.

The wait was measured; how it divides between the two follows from the link, which was measured or emulated, and from
the run's ledger.
"""

from __future__ import annotations

from math import ceil

from shoal.comm.ledger import Entry, Key
from shoal.comparison.explaining.evidence import GRADIENTS, Cause, Evidence, ms
from shoal.estimate.shard_table import BUCKET_BYTES

FASTER_LINK = 4.0
AVERAGED = 8
"""Steps between exchanges in what `local` is predicted to save."""


def sent(run: Evidence, wait_s: float) -> list[Cause]:
    """The wait as one or two causes."""
    if len(run.ranks) < 2:
        return []
    latency_s, byte_s = _by_link(run)
    small_s = 0.0
    found = []
    entries = _bucketed(run)
    if latency_s + byte_s > 0 and entries:
        calls, payload = sum(each.calls for each in entries.values()), sum(each.bytes for each in entries.values())
        fewest = sum(max(1, ceil(each.bytes / BUCKET_BYTES)) for each in entries.values())
        messages, of_all = sum(each.messages for each in entries.values()), _messages(run)
        part = latency_s / (latency_s + byte_s) * messages / of_all if of_all else 0.0
        small_s = wait_s * part * (1 - fewest / calls)
        text = (
            f"latency of small messages: {calls} collectives of {payload / calls / 1e3:.3g} kB each in a step, where "
            f"{fewest} would do; larger buckets (--bucket-mb 8), zero=1 instead of zero=3, or fewer micro-batches"
        )
        found.append(Cause(name="small-messages", text=text, gain_s=small_s, step_s=run.step_s))
    rest = wait_s - small_s
    found.append(Cause(name="communication", text=_words(run, rest, byte_s, latency_s), gain_s=rest, step_s=run.step_s))
    return found


def _words(run: Evidence, wait_s: float, byte_s: float, latency_s: float) -> str:
    nbytes = run.ledger.bytes
    speed = f": {nbytes / 1e6:.3g} MB at {nbytes / wait_s / 1e6:.3g} MB/s" if nbytes and wait_s > 0 else ""
    what = _largest(run)
    part = byte_s / (byte_s + latency_s) if byte_s + latency_s > 0 else 1.0
    ways = [f"a link {FASTER_LINK:g} times as fast saves {ms(wait_s * part * (1 - 1 / FASTER_LINK))} of a step"]
    gradients = sum(entry.bytes for key, entry in run.ledger.entries.items() if key.phase in GRADIENTS)
    if nbytes and gradients / nbytes > 0.5 and run.strategy is not None:
        of = wait_s * gradients / nbytes
        ways.append(f"16-bit gradients (compress=fp16()) {ms(of * part / 2)}")
        ways.append(f"sync=local({AVERAGED}) {ms(of * (1 - 1 / AVERAGED))}")
    else:
        axis = max(run.ledger.entries.items(), key=lambda row: row[1].bytes)[0].axis if nbytes else ""
        ways.append(f"fewer ranks along {axis} send less" if axis else "compress=... or sync=local(h) send less")
    return f"communication that nothing hides{what}{speed}; {', '.join(ways)}"


def _largest(run: Evidence) -> str:
    """What most bytes are for, and the parameter that has most of them."""
    if not run.ledger.entries or not run.ledger.bytes:
        return ""
    key, _ = max(run.ledger.entries.items(), key=lambda row: row[1].bytes)
    found = f", most of it the {key.kind.replace('_', '-')} of the {key.phase} along {key.axis}"
    if run.probed is not None and run.probed.parameters and key.phase in GRADIENTS and run.probed.parameter_bytes:
        name, nbytes = run.probed.parameters[0]
        found += f" ({nbytes / run.probed.parameter_bytes:.0%} of it {name})"
    return found


def _by_link(run: Evidence) -> tuple[float, float]:
    """Seconds that the link would take for the latency of all messages, and for all bytes."""
    if run.link is None:
        return 0.0, 0.0
    return _messages(run) * run.link.latency_s, run.ledger.bytes * run.link.byte_s


def _messages(run: Evidence) -> int:
    return sum(entry.messages for entry in run.ledger.entries.values())


def _bucketed(run: Evidence) -> dict[Key, Entry]:
    """Collectives whose size Shoal or the strategy chooses: gradients and parameters along data parallel axes."""
    return {
        key: entry
        for key, entry in run.ledger.entries.items()
        if key.axis.startswith("dp") and key.phase not in ("loss", "agreement", "setup") and entry.calls > 1
    }

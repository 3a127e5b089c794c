"""Time to the language task's target between two hosts of one rank each, joined by a slow link.

DDP over Gloo with and without PyTorch's PowerSGD, beside Shoal's dp(2), dense and with every compression. The hosts are
network namespaces whose wire the kernel limits, where this runs as root; elsewhere the links are emulated, and DDP runs
over the shoal backend, since Gloo's links cannot be.

Updates do not depend on how fast the link is. So each contestant trains to the target once, over the unlimited wire,
which gives its steps and the bytes of each; then all step in turn at each rate, which gives the time of a step.
Time to target is the sum over those steps; where a step sends more or fewer bytes than the timed ones (a warm-up, a
threshold) the wire's time for the difference is added. `--whole` also trains at the limited rate from start to target.
Evaluation is no part of any time.

The global batch is 8, a third of the task's own. With 24, two cores of 2026 compute for 0.28 s where DDP then sends for
1.1 s at 100 Mb/s, and no compression could be even 5 times as fast.

    python benchmarks/slow_link.py [--rate 100mbit,1gbit] [--only "DDP,dp(2, compress=topk(0.01))"] [--whole] [--json]

Islands too, at the task's own batch (`make two-hosts`; their exchanges are in the wire's time, or in `--whole`):

    python benchmarks/slow_link.py --rate 100mbit --batch 24 --whole --only "DDP,dp(2),dp(2, sync=diloco(32)),..."
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _hosts import torchrun, two_hosts, why_not
from _report import arguments, report

from shoal.strategy.terms.compress import compressors

PEERS = ("DDP", "DDP + PowerSGD(2)", "DDP + PowerSGD(4)")
DENSE = "dp(2)"
COMPRESSIONS = tuple(
    str(term)
    for method in compressors()
    if method.loss != "none" and not method.between_groups
    for term in method.measured() or (method.sample(),)
)
CONTESTANTS = (*PEERS, DENSE, *(f"dp(2, compress={compression})" for compression in COMPRESSIONS))
REFERENCE = PEERS[0]
OPENING = 3
"""Steps before the timed ones."""
HEADER_BYTES = 66
"""Of each packet: Ethernet, IP, TCP and its time stamps."""
ON_THE_WIRE = 1514 / 1448
"""Bytes of a full frame for each byte of a TCP stream."""
SETUP_S = 120.0
"""For ranks to start, and to build all contestants."""


class Failed(RuntimeError):
    """The ranks did not come to an end."""


def bits_per_s(text: str) -> float:
    """`100mbit` -> 1e8."""
    found = re.fullmatch(r"([\d.]+)([kmg])bit", text.strip().lower())
    if found is None or not found[1].replace(".", "", 1).isdigit() or float(found[1]) <= 0:
        sys.exit(f"--rate {text}: expected a number and kbit, mbit or gbit, as in 100mbit,1gbit")
    return float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]]


def split(names: str) -> list[str]:
    """At commas outside of brackets."""
    found, depth = [""], 0
    for letter in names:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [name.strip() for name in found]


def chosen(only: str | None) -> list[str]:
    """The contestants named: commas between, outside brackets; the name of a compression stands for its strategy."""
    from shoal.strategy import parse

    if only is None:
        return list(CONTESTANTS)
    found = []
    for name in split(only):
        if name == REFERENCE or re.fullmatch(r"DDP \+ PowerSGD\(\d+\)", name):
            found.append(name)
            continue
        text = name if name.startswith("dp(") else f"dp(2, compress={name})"
        try:
            found.append(str(parse(text)))
        except ValueError as error:
            sys.exit(
                f"--only {name}: expected some of {', '.join(CONTESTANTS)}, or another strategy dp(2, ...): {error}"
            )
    return found


def on_two_hosts(settings: dict[str, Any], rate: float | None, *, emulated: bool, limit_s: float) -> dict[str, Any]:
    """What rank 0 found, on two hosts joined by a wire of that rate (None: as fast as it goes)."""
    if emulated:
        from shoal.launch import run_ranks

        text = None if rate is None else f"2x1, 10us, 20GB/s | 50us, {rate / 1e6:g}Mb/s"
        told = {**settings, "emulate": text}
        listen = lambda rank, message: print(message.get("text", ""), file=sys.stderr, flush=True)  # noqa: E731
        found: dict[str, Any] = run_ranks("peers.slow_link:ranks_do", told, ranks=2, on_message=listen)[0]
        return found
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory() as folder, two_hosts(bits_per_s=rate) as hosts:
        into, order = Path(folder, "found.json"), Path(folder, "settings.json")
        order.write_text(json.dumps({**settings, "into": str(into)}))
        try:
            ended = torchrun(
                hosts,
                ["peers.slow_link", str(order)],
                ranks_a_host=1,
                environment=environment,
                timeout_s=limit_s,
                errors=None,
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"the ranks were not done after {limit_s:g} s") from None
        if any(each.returncode for each in ended):
            raise Failed("a rank failed; what it said stands above")
        return dict(json.loads(into.read_text()))


def require_agreement(trained: dict[str, Any]) -> None:
    """DDP and dp(2) are the same training: after the first steps they have the same validation loss."""
    curves = [trained[name]["losses"] for name in (REFERENCE, DENSE) if "losses" in trained.get(name, {})]
    if len(curves) == 2:
        (step, peer), (_, mine) = curves[0][0], curves[1][0]
        if not abs(peer - mine) <= 2e-3 * abs(peer):
            raise Failed(f"after {step} steps {REFERENCE} has a validation loss of {peer:.5f}, {DENSE} of {mine:.5f}")


def seconds_to_target(trained: dict[str, Any], step_s: float, timed_bytes: float, rate: float) -> float:
    """Steps as timed; where one sends other amounts than the timed ones, the wire's time for the difference."""
    more_bytes = sum(sent - timed_bytes for sent in trained["sent"])
    return trained["steps"] * step_s + more_bytes * ON_THE_WIRE * 8 / rate


def row_of(name: str, trained: dict[str, Any], timed: dict[str, Any], rate: float, *, kernel: bool) -> dict[str, Any]:
    """One line of the table. `kernel`: whether the host's counters saw what was sent."""
    step_s = statistics.median(timed["step_s"])
    typical = statistics.median if "sync=" in name else statistics.mean  # Islands send nothing in most steps.
    timed_bytes = typical(trained["sent"][OPENING : OPENING + timed["steps"]] or trained["sent"])
    row: dict[str, Any] = {"name": name, "seconds_to_target": None, "steps_to_target": None}
    if trained["reached"]:
        row["seconds_to_target"] = round(seconds_to_target(trained, step_s, timed_bytes, rate), 1)
        row["steps_to_target"] = trained["steps"]
    row |= {"step_ms": round(1000 * step_s), "sent_mb_a_step": round(timed_bytes / 1e6, 3)}
    if kernel and timed_bytes:
        payload = statistics.mean(timed["bytes"]) - HEADER_BYTES * statistics.mean(timed["packets"])
        row["kernel_over_ledger"] = round(payload / timed_bytes, 3)
    return row


def where_compression_loses(rows: list[dict[str, Any]]) -> str:
    """In a sentence, of the compressions that reach the target no sooner than the dense strategy."""
    by_name = {row["name"]: row for row in rows}
    dense = by_name.get(DENSE, {}).get("seconds_to_target")
    tried = [row for row in rows if "compress=" in row["name"]]
    if dense is None or not tried:
        return "Where compression loses cannot be said: dp(2) and at least one compression have to reach the target."
    slow = [row for row in tried if row["seconds_to_target"] is None or row["seconds_to_target"] >= dense]
    won = [row for row in tried if row not in slow]
    best = min(won, key=lambda row: row["seconds_to_target"], default=None)
    parts = [f"{len(won)} of {len(tried)} compressions reach the target sooner than dense dp(2) ({dense:.1f} s)"]
    if best is not None:
        parts.append(f"the best is {best['name']} ({best['seconds_to_target']:.1f} s)")
        peer = by_name.get(REFERENCE, {}).get("seconds_to_target")
        if peer is not None:
            parts[-1] += f", {peer / best['seconds_to_target']:.2f} times as fast as {REFERENCE}"
    step_ms = by_name[DENSE]["step_ms"]
    for why, lost in (
        ("their steps are slower than dense ones", [row for row in slow if row["step_ms"] >= step_ms]),
        ("their steps are faster, but too many", [row for row in slow if row["step_ms"] < step_ms]),
    ):
        if lost:
            parts.append(f"compression loses by {', '.join(row['name'] for row in lost)}: {why}")
    return "; ".join(parts) + "."


def extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", default="100mbit,1gbit", help="what the link carries each way, with commas between")
    parser.add_argument("--only", help="some contestants, with commas between; a compression's name is enough")
    parser.add_argument("--emulated", action="store_true", help="emulate the links also where root")
    parser.add_argument("--whole", action="store_true", help="train at the limited rate from start to target")
    parser.add_argument("--size", default="small", help="of the language task")
    parser.add_argument("--batch", type=int, default=8, help="global batch: small, so that communication shows")
    parser.add_argument("--steps", type=int, default=300, help="of the schedule; who needs more has not arrived")
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--target", type=float, help="validation loss; the task's own if not given")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps-a-round", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a few steps of the tiny task: whether all of it runs")
    parser.add_argument("--seconds", type=float, default=300.0, help="of training for each contestant at most")


def main() -> None:
    asked = arguments(__doc__ or "", extend)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # So that the hosts are removed.
    if asked.quick:
        asked.size, asked.steps, asked.evaluate_every, asked.target, asked.rounds = "tiny", 6, 3, 9.0, 1
    names, rates = chosen(asked.only), {text.strip(): bits_per_s(text) for text in asked.rate.split(",")}
    reason = why_not(limited=True)
    emulated = asked.emulated or reason is not None
    if emulated and not asked.emulated:
        print(f"the links are emulated: a limited one {reason}", file=sys.stderr)
    settings = {
        "names": names,
        "size": asked.size,
        "global_batch": asked.batch,
        "steps": asked.steps,
        "target": asked.target,
        "evaluate_every": asked.evaluate_every,
        "seconds": asked.seconds,
        "rounds": asked.rounds,
        "opening": OPENING,
        "steps_a_round": asked.steps_a_round,
    }
    whole_s = SETUP_S + 2 * asked.seconds * len(names)
    counting = {**settings, "do": "train", "ddp_backend": "shoal-gloo"}
    tables: dict[str, Any] = {}
    try:
        trained = {} if asked.whole else on_two_hosts(counting, None, emulated=emulated, limit_s=whole_s)
        for text, rate in rates.items():
            if asked.whole:
                print(f"{text}, from start to target:", file=sys.stderr)
                trained = on_two_hosts(counting, rate, emulated=emulated, limit_s=whole_s)
            require_agreement(trained)
            able = [name for name in names if "reason" not in trained[name]]
            timing = {**settings, "do": "time", "ddp_backend": "gloo", "names": able, "title": text}
            timed = on_two_hosts(timing, rate, emulated=emulated, limit_s=whole_s) if able else {}
            tables[text] = table_of(trained, timed, rate, kernel=not emulated, whole=asked.whole)
    except Failed as error:
        sys.exit(str(error))
    show(tables, asked, emulated=emulated)


def table_of(
    trained: dict[str, Any], timed: dict[str, Any], rate: float, *, kernel: bool, whole: bool
) -> dict[str, Any]:
    rows = [row_of(name, trained[name], timed[name], rate, kernel=kernel) for name in timed]
    peer = next((row["seconds_to_target"] for row in rows if row["name"] == REFERENCE), None)
    for row in rows:
        if row["seconds_to_target"] is not None:
            if whole:
                row["whole_seconds"] = round(trained[row["name"]]["train_s"], 1)
            if peer and row["seconds_to_target"]:
                row["times_as_fast_as_DDP"] = round(peer / row["seconds_to_target"], 2)
    notes = [where_compression_loses(rows)]
    for name, found in trained.items():
        if "reason" in found:
            notes.append(f"{name}: not trained: {found['reason']}")
        elif not found["reached"]:
            step, loss = found["losses"][-1]
            notes.append(f"{name}: the target is not reached; validation loss {loss:.3f} after {step} steps")
    return {"rows": rows, "notes": notes}


def show(tables: dict[str, Any], asked: Any, *, emulated: bool) -> None:
    if asked.json:
        print(json.dumps({"emulated": emulated, "rates": tables}))
        return
    carrier = "emulated, DDP over the shoal backend" if emulated else "limited by the kernel, DDP over Gloo"
    for rate, table in tables.items():
        title = f"language:{asked.size}, two hosts, {rate} each way, {carrier}"
        report(table["rows"], title=title, as_json=False, notes=table["notes"])
    if not emulated:
        print(
            "kernel over ledger: bytes that left the host by the kernel's counters, less the headers of its packets, "
            "over the payload that the ledger counts."
        )


if __name__ == "__main__":
    main()

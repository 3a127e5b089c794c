"""The bandwidth at which a compressor overtakes dense all-reduce between two hosts: predicted beside measured.

Two ranks measure what the prediction is made from (a link's ends, the codecs, a few dense steps over an unlimited
link). Then they train, dense and compressed steps in turn, at four bandwidths around each prediction: where the ratio
of the lower quartiles is 1, by straight lines in the logarithms, is the measured crossing; its interval comes from
drawing turns at random. Turns in which other programs had the cores do not count, and turns go on until there are
enough. Links are emulated, or with `--real`, as root, those of network namespaces whose wire the kernel limits.

    python benchmarks/crossover.py [--job language:small] [--batch 8] [--only "int8(),ternary()"] [--real] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from _hosts import torchrun, two_hosts, why_not
from _report import arguments, report

COMPRESSIONS = "fp16(),int8(),ternary(),sign(),topk(0.01),powersgd(4)"
LIMIT_S = 480.0
DRAWS = 300
WITHIN = 0.25
"""How far a prediction may be from the measured crossing, as a part of it."""
GBIT = 1e9 / 8
DISTURBED, FEW_TURNS = 0.1, 4
"""From where on, and up to where, the machine was too busy."""


def found_by_ranks(settings: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 found."""
    if not settings["real"]:
        from shoal.launch import run_ranks

        def listen(rank: int, message: dict[str, Any]) -> None:
            print(message.get("text", ""), file=sys.stderr, flush=True)

        return dict(run_ranks("peers.crossover:ranks_do", settings, ranks=2, on_message=listen)[0])
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory() as folder, two_hosts() as hosts:
        into, order = Path(folder, "found.json"), Path(folder, "settings.json")
        order.write_text(json.dumps({**settings, "into": str(into)}))
        try:
            ended = torchrun(
                hosts,
                ["peers.crossover", str(order)],
                ranks_a_host=1,
                environment=environment,
                timeout_s=LIMIT_S,
                errors=None,
            )
        except subprocess.TimeoutExpired:
            sys.exit(f"the ranks were not done after {LIMIT_S:g} s")
        if any(each.returncode for each in ended):
            sys.exit("a rank failed; what it said stands above")
        return dict(json.loads(into.read_text()))


def lower_quartile(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 4]


def measured_crossing(
    rows: list[dict[str, Any]], *, slowdown: float = 1.0, drawn_by: random.Random | None = None
) -> float:
    """Bytes a second at which dense steps take `slowdown` times as long as compressed ones; `drawn_by`: in turns drawn
    at random from those measured.
    """
    at = np.log([row["bytes_per_s"] for row in rows])
    gain = []
    for row in rows:
        turns = [row[name] for name in ("dense_s", "compressed_s")]
        if drawn_by is not None:
            turns = [drawn_by.choices(each, k=len(each)) for each in turns]
        dense_s, compressed_s = (lower_quartile(each) for each in turns)
        gain.append(math.log(dense_s / compressed_s / slowdown))
    around = next((n for n in range(len(gain) - 1) if gain[n] > 0 >= gain[n + 1]), None)
    near = slice(None) if around is None else slice(around, around + 2)
    slope, offset = np.polyfit(at[near], gain[near], 1)
    # A line that does not fall says that there is no crossing near here.
    return float(np.exp(-offset / slope)) if slope < 0 else math.nan


def row_of(text: str, found: dict[str, Any]) -> dict[str, Any]:
    """One line of the table."""
    from shoal.comm.network import LinkTimes
    from shoal.estimate.crossover import Codec, Computing, Ends, ReducedBucket, Setting
    from shoal.estimate.target import SLOWDOWNS
    from shoal.strategy import parse

    told, computing, ends = found["setting"], found["setting"]["computing"], found["setting"]["ends"]
    buckets = tuple(
        ReducedBucket(shapes=tuple(tuple(shape) for shape in each["shapes"]), ready_s=each["ready_s"])
        for each in computing["buckets"]
    )
    setting = Setting(
        computing=Computing(step_s=computing["step_s"], buckets=buckets),
        ends=Ends(**{**ends, "times": LinkTimes(**ends["times"])}),
        ranks=told["ranks"],
        latency_s=told["latency_s"],
    )
    term, codec = parse(f"dp(2, compress={text})").dp_levels[0].compress, Codec(**found["codecs"][text])
    rows = found["rows"][text]
    draw = random.Random(0)
    drawn = sorted(at for _ in range(DRAWS) if math.isfinite(at := measured_crossing(rows, drawn_by=draw)))
    low, high = (drawn[len(drawn) // 40], drawn[-1 - len(drawn) // 40]) if drawn else (math.nan, math.nan)
    predicted, measured = setting.overtakes(term, codec), measured_crossing(rows)
    slowdown = SLOWDOWNS.get(type(term).__name__, 1.0)
    by_target = setting.overtakes(term, codec, slowdown=slowdown)
    measured_by_target = measured_crossing(rows, slowdown=slowdown)
    at = [row["bytes_per_s"] for row in rows]
    return {
        "name": text,
        "quiet_turns": min(row["quiet"] for row in rows),
        "predicted_gbit_s": in_gbit(predicted),
        "measured_gbit_s": in_gbit(measured),
        "from": in_gbit(low),
        "to": in_gbit(high),
        "ratio": round(predicted / measured, 3) if math.isfinite(predicted / measured) else None,
        "steps_to_target": slowdown,
        "predicted_by_target": in_gbit(by_target),
        # Far outside the bandwidths that were tried a line says nothing.
        "measured_by_target": in_gbit(measured_by_target) if 0.7 * at[0] < measured_by_target < 1.5 * at[-1] else None,
        "steps": [
            {
                "gbit_s": round(row["bytes_per_s"] / GBIT, 3),
                "dense_ms": round(1e3 * lower_quartile(row["dense_s"]), 1),
                "dense_predicted_ms": round(1e3 * setting.dense_s(row["bytes_per_s"]), 1),
                "compressed_ms": round(1e3 * lower_quartile(row["compressed_s"]), 1),
                "compressed_predicted_ms": round(1e3 * setting.compressed_s(term, codec, row["bytes_per_s"]), 1),
            }
            for row in rows
        ],
    }


def in_gbit(value: float) -> float | None:
    """Gb/s; None where there is no crossing."""
    return round(value / GBIT, 3) if math.isfinite(value) else None


def busy(found: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """What is to be said of other programs."""
    notes = []
    if found["disturbed"] > DISTURBED:
        notes.append(
            f"predictions are made from what was measured while other programs had {found['disturbed']:.0%} "
            "of the cores: measure again on an idle machine"
        )
    few = [row["name"] for row in rows if row["quiet_turns"] < FEW_TURNS]
    if few:
        notes.append(
            f"fewer than {FEW_TURNS} turns without other programs: {', '.join(few)}; nothing follows from these"
        )
    return notes


def extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--job", default="language:small")
    parser.add_argument("--batch", type=int, default=8, help="global batch: small, so that communication shows")
    parser.add_argument("--only", default=COMPRESSIONS, help="compressions, with commas between")
    parser.add_argument("--rounds", type=int, default=20, help="turns at each bandwidth that nobody disturbs")
    parser.add_argument("--seconds", type=float, default=360.0, help="in all, after which fewer will do")
    parser.add_argument("--real", action="store_true", help="namespaces and the kernel's limits; needs root")
    parser.add_argument("--steps", action="store_true", help="also the step times behind each crossing")


def main() -> None:
    asked = arguments(__doc__ or "", extend)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # So that the hosts are removed.
    if asked.real and (reason := why_not(limited=True)):
        sys.exit(f"--real: {reason}")
    from shoal.strategy import parse

    names = [part.strip() for part in re.split(r",(?![^(]*\))", asked.only)]
    texts = [str(parse(f"dp(2, compress={name})").dp_levels[0].compress) for name in names]
    found = found_by_ranks(
        {
            "job": asked.job,
            "batch": asked.batch,
            "compressions": texts,
            "rounds": asked.rounds,
            "real": asked.real,
            "seconds": asked.seconds,
        }
    )
    rows = [row_of(text, found) for text in texts]
    notes = busy(found, rows)
    if asked.json:
        kept = {name: found[name] for name in ("setting", "codecs", "rounds", "disturbed")}
        print(json.dumps({"rows": rows, "found": kept, "notes": notes}))
        return
    inside = sum(row["ratio"] is not None and abs(row["ratio"] - 1) <= WITHIN for row in rows)
    carrier = "limited by the kernel" if asked.real else "emulated"
    shown = [{name: value for name, value in row.items() if name != "steps"} for row in rows]
    notes = [f"{inside} of {len(rows)} predictions are within {WITHIN:.0%} of the measured crossing.", *notes]
    report(shown, title=f"{asked.job}, batch {asked.batch}, two hosts, {carrier}", as_json=False, notes=notes)
    if asked.steps:
        for row in rows:
            report(row["steps"], title=row["name"], as_json=False)


if __name__ == "__main__":
    main()

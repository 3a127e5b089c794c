"""Predicted beside measured: steps of both tasks under some twenty strategies on two ranks of this machine.

Predictions come from `shoal calibrate`'s file and the job's operators alone; nothing of the job is run for them. The
strategies are then trained by the same ranks, a step or two in turn, round after round, so that whatever the machine
does meets all of them; of each the lower quartile counts. Every step's counted ledger must equal its prediction.

    shoal calibrate && python benchmarks/predicted.py [--job language:small] [--rounds 8] [--json]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _report import arguments, report

LANGUAGE = (
    "dp(2)",
    "dp(2, via=shared())",
    "dp(2, zero=1)",
    "dp(2, zero=2)",
    "dp(2, zero=3)",
    "dp(2) * accumulate(4)",
    "dp(2) * accumulate(12)",
    "dp(2, zero=3) * accumulate(4)",
    'dp(2) * recompute("full")',
    "tp(2)",
    "tp(2, sequence=True)",
    "tp(2) * accumulate(6)",
    "cp(2)",
    'cp(2, "ulysses")',
    'pp(2, "gpipe", micro=2)',
    'pp(2, "1f1b", micro=4)',
    'pp(2, "1f1b", micro=12)',
    'pp(2, "zero-bubble", micro=6)',
    'pp(2, "interleaved", micro=4, chunks=2)',
    "dp(2, compress=ternary())",
    "dp(2, compress=topk(0.01))",
    'pp(2, "1f1b", micro=8) * recompute("full")',
)
IMAGE = (
    "dp(2)",
    "dp(2, via=shared())",
    "dp(2, zero=1)",
    "dp(2, zero=2)",
    "dp(2, zero=3)",
    "dp(2) * accumulate(2)",
    "dp(2) * accumulate(4)",
    "dp(2) * accumulate(8)",
    "dp(2, zero=2) * accumulate(4)",
    "dp(2, zero=3) * accumulate(4)",
    'dp(2) * recompute("full")',
    'dp(2, zero=3) * recompute("full")',
    "dp(2, compress=ternary())",
    "dp(2, compress=qsgd(4))",
    "dp(2, compress=powersgd(4))",
    'pp(2, "gpipe", micro=1)',
    'pp(2, "1f1b", micro=2)',
    'pp(2, "1f1b", micro=4)',
    'pp(2, "gpipe", micro=8)',
    'pp(2, "zero-bubble", micro=4)',
    'pp(2, "1f1b", micro=16)',
)


def contest(settings: dict[str, Any], channel: Any) -> dict[str, Any]:
    """On every rank: seconds per step of every strategy, a list over rounds (the slower rank counts)."""
    import torch
    import torch.distributed as dist

    from shoal.comm.ledger import BOOK
    from shoal.job import load_job
    from shoal.launch.join import join, leave
    from shoal.runtime.setup import prepare
    from shoal.strategy import parse

    me = join()
    plain = dist.new_group(backend="gloo")
    job = load_job(settings["job"])
    order = job.order()
    ready = {}
    unlike: list[str] = []
    for text in settings["strategies"]:
        prepared = ready[text] = prepare(job, parse(text), rank=me.rank, backend=me.backend)
        for warm in range(3):
            BOOK.take()
            prepared.runner.step(warm, 0)
        unlike += [f"{text}: {line}" for line in prepared.differences(BOOK.take())]
        if me.rank == 0:
            channel.say({"doing": f"warming up: {text}"})
    times: dict[str, list[float]] = {text: [] for text in ready}
    counters = dict.fromkeys(ready, 0)
    names = list(ready)
    for turn in range(settings["rounds"]):
        for text in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier(group=plain)
            start = time.perf_counter()
            for _ in range(settings["steps"]):
                ready[text].runner.step(10, counters[text])
                counters[text] = order.next(counters[text])
            mine = torch.tensor([(time.perf_counter() - start) / settings["steps"]], dtype=torch.float64)
            dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=plain)
            times[text].append(float(mine))
        if me.rank == 0:
            channel.say({"doing": f"round {turn + 1} of {settings['rounds']}"})
    leave()
    return {"times": times, "unlike": unlike}


def predictions(job: str, strategies: Sequence[str]) -> dict[str, Any]:
    """Estimates by strategy, from the calibration file."""
    from shoal.calibration.job_model import job_model, plane_cuts_of
    from shoal.estimate.steps.price import price_step
    from shoal.estimate.steps.read import machine_here
    from shoal.job import load_job
    from shoal.strategy import parse

    machine = machine_here()
    if machine is None:
        sys.exit("this machine has not been calibrated; run `shoal calibrate` first")
    parsed = {text: parse(text) for text in strategies}
    model, _ = job_model(load_job(job), planes=plane_cuts_of(parsed.values()))
    return {text: price_step(model, strategy, machine) for text, strategy in parsed.items()}


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Correlation of ranks."""

    def places(values: Sequence[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return [float(order.index(number)) for number in range(len(values))]

    return statistics.correlation(places(first), places(second))


def main() -> None:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--job", default="language:small")
        parser.add_argument("--rounds", type=int, default=8)
        parser.add_argument("--steps", type=int, default=2, help="steps of each strategy in a round")

    asked = arguments(__doc__ or "", extend)
    from shoal.launch import run_ranks

    strategies = LANGUAGE if asked.job.startswith("language") else IMAGE
    estimates = predictions(asked.job, strategies)
    settings = {"job": asked.job, "strategies": strategies, "rounds": asked.rounds, "steps": asked.steps}

    def told(rank: int, message: dict[str, Any]) -> None:
        print(f"\r{message.get('doing', ''):<70}", end="", file=sys.stderr, flush=True)

    results = run_ranks("predicted:contest", settings, ranks=2, on_message=told)
    print(file=sys.stderr)
    rows = []
    for text, times in results[0]["times"].items():
        measured_s, predicted_s = sorted(times)[len(times) // 4], estimates[text].step_s
        rows.append(
            {
                "name": text,
                "measured_ms": 1000 * measured_s,
                "predicted_ms": 1000 * predicted_s,
                "predicted / measured": predicted_s / measured_s,
            }
        )
    rows.sort(key=lambda row: row["predicted_ms"])
    measured, predicted = ([row[f"{kind}_ms"] for row in rows] for kind in ("measured", "predicted"))
    off = statistics.median(abs(row["predicted / measured"] - 1) for row in rows)
    unlike = [line for result in results for line in result["unlike"]]
    notes = [
        f"rank correlation {spearman(predicted, measured):.3f}; the strategy ranked first takes "
        f"{measured[0] / min(measured):.3f} of the fastest one's time; median error {100 * off:.1f}%",
        "every counted ledger equals its prediction, on both ranks" if not unlike else "\n".join(unlike),
    ]
    report(rows, title=f"{asked.job}, two ranks, {asked.rounds} rounds", as_json=asked.json, notes=notes)


if __name__ == "__main__":
    main()

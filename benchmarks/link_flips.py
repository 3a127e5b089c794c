"""The link flips the winner: time to the target between two hosts of one rank each, on a fast and on a slow link.

The hosts are network namespaces whose wire the kernel limits, where this runs as root; elsewhere the links are
emulated. Contestants are dense gradients, ZeRO-3, PowerSGD, ternary gradients, DiLoCo, and what `shoal plan JOB --link`
ranks first at each rate (where this machine is calibrated). The model has 3.2 M parameters.

Updates do not depend on how fast a link is: each contestant trains to the target once for each seed over the unlimited
wire, which gives its steps; then all step in turn at each rate, which gives the time of a step. Time to target is the
product. An exchange of islands takes as long whatever the period: it is timed at two short ones, which give the time of
a step without it and of the exchange. Every part is kept in --into, and a second start goes on where the first ended.

    python benchmarks/link_flips.py [--rates 1gbit,50mbit] [--seeds 3] [--into runs/link-flips] [--part N] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _hosts import why_not
from _report import arguments, report
from slow_link import OPENING, Failed, bits_per_s, on_two_hosts

from shoal.estimate.outer_calls import period
from shoal.strategy import Strategy, parse

NAMES = (
    "dp(2)",
    "dp(2, zero=3)",
    "dp(2, compress=powersgd(4))",
    "dp(2, compress=ternary())",
    "dp(2, sync=diloco(32))",
)
GOAL = 1.15
SHORT = (2, 4)
"""Periods at which islands are timed."""
TARGET = 2.35
LIMIT_S = 900.0


def planned(rates: list[str], batch: int) -> dict[str, str]:
    """The first choice at each rate; nothing where the machine was not calibrated."""
    from shoal.api.plan import plan

    found = {}
    for rate in rates:
        link = rate.replace("gbit", " Gb/s").replace("mbit", " Mb/s")
        with contextlib.suppress(ValueError):
            rows = plan("language:small", devices=2, batch=batch, top=1, link=link).report["over_link"]
            found[rate] = rows[0]["strategy"]
    return found


def timed_as(text: str) -> list[str]:
    """The strategies whose steps are timed for one: islands at two short periods."""
    strategy = parse(text)
    if period(strategy) == 1:
        return [text]
    (level,) = strategy.dp_levels
    return [str(Strategy(level.replace(sync=level.sync.replace(h=short)))) for short in SHORT]


def step_s(text: str, found: dict[str, list[float]]) -> float:
    """A step's mean. With periods p and q it is a + e/p and a + e/q, so both parts are known."""
    names = timed_as(text)
    means = [statistics.median(found[name]) for name in names]
    if len(means) == 1:
        return means[0]
    exchange_s = (means[0] - means[1]) / (1 / SHORT[0] - 1 / SHORT[1])
    return means[0] - exchange_s / SHORT[0] + exchange_s / period(parse(text))


class Parts:
    """What was measured, part by part, each in a file."""

    def __init__(self, folder: Path, most: int | None) -> None:
        self.folder, self.left = folder, most
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, measure: Any) -> Any:
        """The part of this name; None if it was not measured yet and no more parts are to be measured now."""
        path = self.folder / f"{name}.json"
        if path.exists():
            return json.loads(path.read_text())
        if self.left == 0:
            return None
        self.left = None if self.left is None else self.left - 1
        start = time.monotonic()
        found = measure()
        path.write_text(json.dumps(found))
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        return found


def slug(text: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in text).strip("-")


def extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", default="1gbit,50mbit")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8, help="global batch")
    parser.add_argument("--steps", type=int, default=300, help="of the schedule; who needs more has not arrived")
    parser.add_argument("--target", type=float, default=TARGET, help="validation loss")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--into", default="runs/link-flips")
    parser.add_argument("--part", type=int, help="measure so many parts that are missing, and stop")
    parser.add_argument("--size", default="small")
    parser.add_argument("--emulated", action="store_true", help="emulate the links also where root")


def main() -> None:
    asked = arguments(__doc__ or "", extend)
    rates = [each.strip() for each in asked.rates.split(",")]
    emulated = asked.emulated or why_not(limited=True) is not None
    parts = Parts(Path(asked.into), asked.part)
    first = parts.get("planned", lambda: planned(rates, asked.batch)) or {}
    names = list(dict.fromkeys([*NAMES, *first.values()]))
    settings = {
        "size": asked.size,
        "global_batch": asked.batch,
        "steps": asked.steps,
        "target": asked.target,
        "evaluate_every": 10,
        "seconds": 300.0,
        "rounds": asked.rounds,
        "opening": OPENING,
        "steps_a_round": 8,
        "ddp_backend": "gloo",
    }

    def hosts(rate: float | None, **more: Any) -> dict[str, Any]:
        return on_two_hosts({**settings, **more}, rate, emulated=emulated, limit_s=LIMIT_S)

    try:
        trained = {
            (name, seed): parts.get(
                f"train-{slug(name)}-s{seed}", lambda n=name, s=seed: hosts(None, do="train", names=[n], seed=s)[n]
            )
            for seed in range(asked.seeds)
            for name in names
        }
        timed: dict[str, Any] = {}
        for rate in rates:
            every = list(dict.fromkeys(each for name in names for each in timed_as(name)))
            bits = bits_per_s(rate)
            timed[rate] = parts.get(
                f"time-{rate}", lambda b=bits, r=rate, e=every: hosts(b, do="time", names=e, title=r)
            )
    except Failed as error:
        sys.exit(str(error))
    if any(each is None for each in [*trained.values(), *timed.values()]):
        sys.exit("parts are missing: run it again, without --part")
    rows, notes = table(names, rates, asked.seeds, trained, timed, first)
    report(rows, title=f"language:{asked.size} to {asked.target:g}, two hosts", as_json=asked.json, notes=notes)


def table(
    names: list[str],
    rates: list[str],
    seeds: int,
    trained: dict[Any, Any],
    timed: dict[str, Any],
    first: dict[str, str],
) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each contestant and rate; what it shows."""
    rows, notes, winners = [], [], []
    for rate in rates:
        times = {name: found["step_s"] for name, found in timed[rate].items()}
        to_target = {}
        for name in names:
            runs = [trained[name, seed] for seed in range(seeds)]
            reached = [run["steps"] for run in runs if run.get("reached")]
            seconds = step_s(name, times)
            if len(reached) == len(runs):
                to_target[name] = statistics.fmean(reached) * seconds
            rows.append(
                {
                    "name": name,
                    "link": rate,
                    "steps": statistics.fmean(reached) if reached else None,
                    "spread": statistics.stdev(reached) if len(reached) > 1 else None,
                    "step_s": seconds,
                    "to_target_s": to_target.get(name),
                    "reached": f"{len(reached)} of {seeds}",
                }
            )
        if not to_target:
            sys.exit("no contestant reached the target; give another --target or more --steps")
        best = min(to_target, key=lambda name: to_target[name])
        winners.append(best)
        if rate in first:
            regret = to_target.get(first[rate], float("inf")) / to_target[best]
            verdict = "as" if regret <= GOAL else "not as"
            notes.append(
                f"{rate}: the plan's first choice {first[rate]} takes {regret:.2f} times the best, {best}, "
                f"{verdict} wanted ({GOAL})"
            )
        else:
            notes.append(f"{rate}: the best is {best}; no plan, since this machine is not calibrated")
    notes.append(f"the winner {'differs' if len(set(winners)) > 1 else 'does not differ'} between the links")
    return rows, notes


if __name__ == "__main__":
    main()

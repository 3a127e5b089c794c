"""Is the first choice of `shoal plan JOB --cluster this --link RATE` the best of what is measured over that link?

Two hosts of one rank each; their link is emulated. Contestants are dense gradients, the compression and the period of
DiLoCo that the plan ranks first of their kind at any of the rates. Updates do not depend on how fast a link is: each
contestant trains to the task's target once, over a fast link, which gives its steps; then all step in turn over each
link, which gives the time of a step. Time to target is the product. Needs `shoal calibrate`, and a
quiet machine.

    python benchmarks/link_choice.py [--rates "1 Gb/s,50 Mb/s"] [--job language] [--batch 8] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _report import arguments, report

from shoal.api.plan import plan
from shoal.estimate.outer_calls import period
from shoal.files.quantities import rate
from shoal.strategy import Strategy, none, parse
from shoal.training.local import train_job

FAST = "2x1, 10us, 20GB/s | 50us, 100Gb/s"
OPENING = 2
"""Periods before the timed ones."""
STEPS = 8
"""Timed in a round."""
SHORT = 4
"""Period of islands that are timed."""


def planned(asked: Any, link: str) -> list[dict[str, Any]]:
    """Strategies over a link, best first, as `shoal plan --json` has them."""
    return list(plan(asked.job, devices=2, batch=asked.batch, top=1, link=link).report["over_link"])


def kind(text: str) -> str:
    (level,) = parse(text).dp_levels
    if level.sync.period is not None:
        return "islands"
    return "dense" if isinstance(level.compress, none) else "compressed"


def contestants(plans: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Of each kind the first at each rate."""
    found = {}
    for rows in plans.values():
        for wanted in ("dense", "compressed", "islands"):
            found[next(row["strategy"] for row in rows if kind(row["strategy"]) == wanted)] = None
    return list(found)


def trained(asked: Any, text: str, *, emulate: str, **options: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        options |= {"emulate": emulate, "global_batch": asked.batch, "gate": False, "checkpoint_every": 0}
        run = train_job(asked.job, text, folder=Path(folder, "run"), **options)
        rows = [json.loads(line) for line in Path(folder, "run", "steps.jsonl").read_text().splitlines()]
    return run, [row["step_s"] for row in rows]


def steps_to_target(asked: Any, text: str) -> int | None:
    run, _ = trained(asked, text, emulate=FAST)
    print(f"{text}: {run.steps_to_target} steps to the target", file=sys.stderr, flush=True)
    return run.steps_to_target


def step_s(asked: Any, text: str, link: str) -> float:
    """Mean of a step. An exchange of islands costs the same whatever the period: it is timed with a short one."""
    strategy, every = parse(text), period(parse(text))
    short = min(every, SHORT)
    if every > 1:
        (level,) = strategy.dp_levels
        text = str(Strategy(level.replace(sync=level.sync.replace(h=short))))
    emulate = f"2x1, 10us, 20GB/s | 50us, {rate(link) * 8e-6:g}Mb/s"
    _, seconds = trained(
        asked, text, emulate=emulate, steps=OPENING * short + STEPS, evaluate_every=0, stop_at_target=False
    )
    exchanging = [each for at, each in enumerate(seconds, 1) if at > OPENING * short and at % short == 0]
    others = [each for at, each in enumerate(seconds, 1) if at > OPENING * short and at % short]
    if not others:
        return statistics.median(exchanging)
    alone_s = statistics.median(others)
    return alone_s + (statistics.median(exchanging) - alone_s) / every


def extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", default="1 Gb/s,50 Mb/s", help="links, with commas between")
    parser.add_argument("--job", default="language")
    parser.add_argument("--batch", type=int, default=8, help="global batch")
    parser.add_argument("--rounds", type=int, default=3, help="turns in which all contestants step")


def main() -> None:
    asked = arguments(__doc__ or "", extend)
    links = [each.strip() for each in asked.rates.split(",")]
    plans = {link: planned(asked, link) for link in links}
    names = contestants(plans)
    steps = {name: steps_to_target(asked, name) for name in names}
    rows, notes = [], []
    for link in links:
        times: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(asked.rounds):
            for name in names:
                times[name].append(step_s(asked, name, link))
        to_target = {name: steps[name] * statistics.median(times[name]) for name in names if steps[name]}  # type: ignore[operator]
        predicted = {row["strategy"]: row for row in plans[link]}
        for name in names:
            rows.append(
                {
                    "name": name,
                    "link": link,
                    "steps": steps[name],
                    "step_s": statistics.median(times[name]),
                    "predicted_step_s": predicted[name]["step_s"],
                    "assumed_steps": predicted[name]["slowdown"],
                    "to_target_s": to_target.get(name),
                }
            )
        if not to_target:
            sys.exit(f"no contestant reached the target of {asked.job}; give a job that has one")
        first = next(row["strategy"] for row in plans[link] if row["strategy"] in names)
        best = min(to_target, key=lambda name: to_target[name])
        regret = to_target.get(first, float("inf")) / to_target[best]
        notes.append(f"{link}: the plan's first choice {first} takes {regret:.2f} times the best, {best} (goal: 1.15)")
    report(rows, title="Over a link: planned and measured", as_json=asked.json, notes=notes)


if __name__ == "__main__":
    main()

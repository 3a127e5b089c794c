"""How many steps to the target under every way of keeping replicas consistent: docs/consistency.md.

    python benchmarks/consistency.py --into runs/consistency [--seeds 3] [--tasks language,image] \\
        [--page docs/consistency.md]

Both small tasks, four replicas, SGD with momentum, AdamW and Muon, three seeds. The rate of each optimiser is the one
that reaches the target soonest under bsp(), of three or more. Every scheme keeps that rate, or takes a quarter or
a sixteenth of it where it does not reach the target otherwise. What a scheme adds (an
outer rate and momentum, the strength of a pull) is chosen by a small sweep with seed 0 on two of the columns (TUNED):
the setting with the fewest steps in their mean. Each run is a line of INTO/runs.jsonl and is not made again: stop and
go on at will. All schemes are run with the first seed, then with the second, and so on, and the table says how many
seeds there are. `--table` prints it from the runs that are there.

Batch norm is of each replica's own samples, as schemes without a common step need it.
Steps are counted in global batches: a step is as many samples under every scheme. Under schemes in which
replicas do not wait for each other the steps depend on who was fast, so also on the load of the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.job import Job, MuonWithAdamW, Target, load_job
from shoal.training.local import CannotTrain, train_job

MOST_STEPS = 400
WARMUP = 32
EVERY = 8
"""Steps between evaluations, so the grain of the counts."""
RATES = {
    "SGD": (0.02, 0.05, 0.1, 0.2),
    "AdamW": (0.002, 0.004, 0.008, 0.016),
    "Muon": (0.008, 0.016, 0.032),
}
TARGETS = {"language": Target(metric="loss", value=2.5), "image": Target(metric="loss", value=0.35)}
COMBINED = [(task, optimizer) for task in TARGETS for optimizer in RATES if (task, optimizer) != ("image", "Muon")]
"""Muon is for matrices; the image task is convolutions."""
TUNED = [("language", "AdamW"), ("image", "SGD")]
"""Where the settings of a scheme are tried."""
BSP = "dp(4)"


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A row of the table: settings of one technique, of which the best is kept."""

    family: str
    name: str
    settings: tuple[str, ...]
    follows: str | None = None
    """The scheme whose best setting it takes, where it is not tuned by itself."""


OUTER = ((1.0, 0.0), (0.7, 0.5), (0.7, 0.9), (1.0, 0.5))
"""Outer rates and momenta: mild to strong."""


def _outer(text: str) -> tuple[str, ...]:
    return tuple(text.replace("OUTER", f"lr={lr}, momentum={m}") for lr, m in OUTER)


SCHEMES = (
    Scheme(family="synchronous", name="all-reduce", settings=(BSP,)),
    Scheme(family="bounded", name="backup replica", settings=("dp(4, sync=bsp(backup=1), via=ps(1))",)),
    Scheme(family="bounded", name="n-softsync", settings=("dp(4, sync=softsync(2), via=ps(1))",)),
    Scheme(family="bounded", name="stale synchronous", settings=("dp(4, sync=ssp(3), via=ps(1))",)),
    Scheme(family="asynchronous", name="Downpour", settings=("dp(4, sync=asp(), via=ps(1))",)),
    Scheme(
        family="asynchronous", name="staleness-aware rate", settings=('dp(4, sync=asp(lr="staleness"), via=ps(1))',)
    ),
    Scheme(
        family="asynchronous",
        name="DC-ASGD",
        settings=tuple(f"dp(4, sync=asp(compensate={c}), via=ps(1))" for c in (0.04, 0.5)),
    ),
    Scheme(family="averaging", name="local SGD", settings=("dp(4, sync=local(8))",)),
    Scheme(family="averaging", name="post-local SGD", settings=("dp(4, sync=local(8, start=64))",)),
    Scheme(family="averaging", name="DiLoCo", settings=_outer("dp(4, sync=diloco(8, OUTER))")),
    Scheme(
        family="averaging",
        name="Streaming DiLoCo",
        follows="DiLoCo",
        settings=_outer("dp(4, sync=diloco(8, OUTER, fragments=2, overlap=2, blend=0.5))"),
    ),
    Scheme(
        family="averaging",
        name="eager DiLoCo",
        follows="DiLoCo",
        settings=_outer("dp(4, sync=diloco(8, OUTER, eager=True))"),
    ),
    Scheme(
        family="averaging",
        name="DiLoCo, quorum",
        follows="DiLoCo",
        settings=_outer("dp(4, sync=diloco(8, OUTER, quorum=3))"),
    ),
    Scheme(
        family="averaging",
        name="SparseLoCo",
        settings=tuple(f"dp(4, sync=diloco(8, lr={lr}, momentum=0.0), compress=chunktopk(0.03))" for lr in (0.7, 1.0)),
    ),
    Scheme(
        family="averaging", name="BMUF", settings=tuple(f"dp(4, sync=bmuf(8, momentum={m}))" for m in (0.25, 0.5, 0.75))
    ),
    Scheme(
        family="elastic", name="EASGD", settings=tuple(f"dp(4, sync=elastic(4, {rho}))" for rho in (0.1, 0.2, 0.25))
    ),
    Scheme(family="gossip", name="D-PSGD, ring", settings=('dp(4, sync=gossip("ring"))',)),
    Scheme(family="gossip", name="push-sum, one peer", settings=('dp(4, sync=gossip("one-peer", "push-sum"))',)),
    Scheme(family="gossip", name="AD-PSGD, ring", settings=('dp(4, sync=gossip("ring", "async"))',)),
    Scheme(
        family="gossip",
        name="NoLoCo",
        settings=tuple(
            f'dp(4, sync=gossip("random", h=8, momentum={m}, lr={lr}))'
            for lr, m in ((1.0, 0.0), (0.7, 0.5), (1.0, 0.5))
        ),
    ),
)


def schedule(step: int) -> float:
    """Warm-up, then constant: how soon the target is reached must not depend on how long a run may last."""
    return min(1.0, (step + 1) / WARMUP)


def hidden(name: str, param: torch.Tensor) -> dict[str, Any]:
    """Matrices between the first and the last layer are Muon's."""
    return {"muon": param.dim() == 2 and "blocks" in name}


def job_of(task: str, optimizer: str, lr: float, seed: int) -> Job:
    changes: dict[str, Any] = {
        "SGD": {"optimizer": partial(torch.optim.SGD, lr=lr, momentum=0.9), "options": lambda name, param: {}},
        "AdamW": {"optimizer": partial(torch.optim.AdamW, lr=lr, betas=(0.9, 0.95))},
        "Muon": {"optimizer": partial(MuonWithAdamW, lr=lr), "options": hidden},
    }[optimizer]
    return replace(
        load_job(f"{task}:tiny"),
        name=f"{task}:tiny",
        schedule=schedule,
        steps=MOST_STEPS,
        evaluate_every=EVERY,
        target=TARGETS[task],
        seed=seed,
        batch_norm="local",
        **changes,
    )


class Runs:
    """Runs that were made, a line each, and those that are still to be made."""

    def __init__(self, into: Path, *, make: bool = True) -> None:
        """`make`: whether what is asked for and not there is run."""
        self.make = make
        into.mkdir(parents=True, exist_ok=True)
        self.file = into / "runs.jsonl"
        rows = [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []
        self.rows = {self._key(row): row for row in rows}

    @staticmethod
    def _key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[field] for field in ("task", "optimizer", "lr", "strategy", "seed"))

    def known(self, task: str, optimizer: str, lr: float, strategy: str, seed: int) -> dict[str, Any] | None:
        return self.rows.get((task, optimizer, lr, strategy, seed))

    def get(self, task: str, optimizer: str, lr: float, strategy: str, seed: int) -> dict[str, Any]:
        asked = {"task": task, "optimizer": optimizer, "lr": lr, "strategy": strategy, "seed": seed}
        if self._key(asked) in self.rows:
            return self.rows[self._key(asked)]
        if not self.make:
            return asked | {"steps": None}
        row = asked | _trained(job_of(task, optimizer, lr, seed), strategy)
        if "failed" not in row:  # It is made again the next time.
            with self.file.open("a") as file:
                file.write(json.dumps(row) + "\n")
        self.rows[self._key(asked)] = row
        told = row.get("refused") or row.get("failed") or f"{row['steps'] or 'not in ' + str(MOST_STEPS)} steps"
        done = f"{len(self.rows):4} {task} {optimizer} {lr:g} {strategy} seed {seed}: {told}"
        print(done, file=sys.stderr, flush=True)
        return row


def _trained(job: Job, strategy: str) -> dict[str, Any]:
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = train_job(
                job,
                strategy,
                folder=Path(folder, "run"),
                gate=False,
                checkpoint_every=0,
                on_message=lambda message: None,
                hang_after_s=300.0,
            )
        except CannotTrain as error:
            return {"refused": str(error)}
        except Exception as error:
            if "no longer finite" not in str(error) and "not finite" not in str(error):
                return {"steps": None, "failed": f"{type(error).__name__}: {error}"}
            return {"steps": None, "diverged": True, "took_s": time.perf_counter() - begun}
    consistency = run.summary.get("consistency") or {}
    return {
        "steps": run.steps_to_target,
        "time_to_target_s": run.time_to_target_s,
        "step_s": run.step_s,
        "staleness": (consistency.get("staleness") or {}).get("mean"),
        "spread": consistency.get("widest_spread"),
        "saved": consistency.get("saved_bytes"),
        "took_s": time.perf_counter() - begun,
    }


def cost(row: dict[str, Any]) -> float:
    """Steps; a run that did not reach the target counts as twice as many as it was given."""
    return float(row["steps"] or 2 * MOST_STEPS)


def best_rates(runs: Runs, tasks: list[str]) -> dict[tuple[str, str], float]:
    return {
        (task, optimizer): min(RATES[optimizer], key=lambda lr: cost(runs.get(task, optimizer, lr, BSP, 0)))
        for task, optimizer in COMBINED
        if task in tasks
    }


def best_setting(runs: Runs, scheme: Scheme, rates: dict[tuple[str, str], float]) -> str:
    """The setting with the smallest geometric mean of steps over the columns where settings are tried."""

    def mean(setting: str) -> float:
        rows = [runs.get(*column, rates[column], setting, 0) for column in TUNED if column in rates]
        known = [math.log(cost(row)) for row in rows if "refused" not in row]
        return statistics.fmean(known) if known else math.inf

    if scheme.follows is not None:
        tuned = next(each for each in SCHEMES if each.name == scheme.follows)
        return scheme.settings[tuned.settings.index(best_setting(runs, tuned, rates))]
    return scheme.settings[0] if len(scheme.settings) == 1 else min(scheme.settings, key=mean)


LOWER = (1.0, 0.25, 0.0625)
"""Fractions of the rate of bsp() that are tried where a scheme does not reach the target with it."""


def rate_of(runs: Runs, column: tuple[str, str], lr: float, setting: str) -> float:
    """The first rate with which the scheme reaches the target with seed 0; that of bsp() if none does."""
    for fraction in LOWER:
        row = runs.get(*column, lr * fraction, setting, 0)
        if "refused" in row or row["steps"]:
            return lr * fraction
    return lr


def make_runs(runs: Runs, tasks: list[str], seeds: int) -> None:
    """All of them, the first seed of every scheme before the second of any."""
    rates = best_rates(runs, tasks)
    for scheme in SCHEMES:
        setting = best_setting(runs, scheme, rates)
        for column, lr in rates.items():
            runs.get(*column, lr, setting, 0)
    for seed in range(seeds):
        for scheme in SCHEMES:
            setting = best_setting(runs, scheme, rates)
            for column, lr in rates.items():
                runs.get(*column, rate_of(runs, column, lr, setting), setting, seed)


def cells(runs: Runs, tasks: list[str], seeds: int) -> Iterator[dict[str, Any]]:
    rates = best_rates(runs, tasks)
    for scheme in SCHEMES:
        setting = best_setting(runs, scheme, rates)
        for (task, optimizer), best in rates.items():
            lr = rate_of(runs, (task, optimizer), best, setting)
            asked = [runs.known(task, optimizer, lr, setting, seed) for seed in range(seeds)]
            rows = [row for row in asked if row is not None]
            refused = next((row["refused"] for row in rows if "refused" in row), None)
            yield {
                "family": scheme.family,
                "name": scheme.name,
                "strategy": setting,
                "task": task,
                "optimizer": optimizer,
                "lr": lr,
                "fraction": lr / best,
                "refused": refused,
                "rows": [] if refused else rows,
            }


def shown(cell: dict[str, Any]) -> str:
    """Mean and standard deviation of the steps to the target, and the number of seeds."""
    if cell["refused"]:
        return "refused"
    steps = [row["steps"] for row in cell["rows"]]
    if not steps:
        return "not run"
    missed = sum(each is None for each in steps)
    if missed:
        return f"{len(steps) - missed} of {len(steps)} reach it"
    mean = statistics.fmean(steps)
    lower = "" if cell["fraction"] == 1.0 else f", rate x {cell['fraction']:g}"
    if len(steps) == 1:
        return f"{mean:.0f} (1{lower})"
    return f"{mean:.0f} ± {statistics.stdev(steps):.0f} ({len(steps)}{lower})"


def table(found: list[dict[str, Any]], tasks: list[str]) -> str:
    """Markdown: a row for each scheme, a column for each task and optimiser."""
    columns = [(task, optimizer) for task, optimizer in COMBINED if task in tasks]
    by = {(cell["strategy"], cell["task"], cell["optimizer"]): cell for cell in found}
    lines = [
        "| technique | strategy | " + " | ".join(", ".join(column) for column in columns) + " | staleness | spread |",
        "|---" * (len(columns) + 4) + "|",
    ]
    for scheme in SCHEMES:
        mine = [cell for cell in found if cell["name"] == scheme.name]
        strategy = mine[0]["strategy"]
        rows = [row for cell in mine for row in cell["rows"]]
        means = []
        for field in ("staleness", "spread"):
            known = [row[field] for row in rows if row.get(field) is not None]
            means.append(f"{statistics.fmean(known):.2g}" if known else "")
        figures = [shown(by[strategy, task, optimizer]) for task, optimizer in columns]
        lines.append(f"| {scheme.name} | `{strategy}` | " + " | ".join(figures + means) + " |")
    return "\n".join(lines)


BEGIN, END = "<!-- figures: make consistency -->", "<!-- end of figures -->"


def write_page(page: Path, text: str) -> None:
    """Replaces the figures between the two marks of the page."""
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--into", type=Path, default=Path("runs/consistency"), help="folder of the runs")
    asked.add_argument("--tasks", default="language,image")
    asked.add_argument("--seeds", type=int, default=3)
    asked.add_argument("--table", action="store_true", help="make no seed's runs, print what is there")
    asked.add_argument("--page", type=Path, help="a page whose figures are replaced")
    given = asked.parse_args()
    torch.set_num_threads(1)
    tasks = given.tasks.split(",")
    runs = Runs(given.into, make=not given.table)
    if not given.table:
        make_runs(runs, tasks, given.seeds)
    found = list(cells(runs, tasks, given.seeds))
    rates = {(cell["task"], cell["optimizer"]): cell["lr"] for cell in found if cell["name"] == SCHEMES[0].name}
    text = (
        table(found, tasks)
        + "\n\nLearning rates: "
        + "; ".join(f"{task}, {optimizer}: {lr:g}" for (task, optimizer), lr in rates.items())
        + "."
    )
    print(text)
    if given.page is not None:
        write_page(given.page, text)


if __name__ == "__main__":
    main()

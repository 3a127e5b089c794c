"""Do the methods of `shoal search` beat random search at the same budget? The table of docs/search.md.

    python benchmarks/search.py --into runs/search [--seeds 5] [--trials 30] [--steps 60] [--most 4] [--table]
    python benchmarks/search.py --speed             # trials an hour of two workers and of one
    python benchmarks/search.py --front             # predicted and measured steps of the front on this machine

The space of `image`, one worker, so that every search is a function of its seed. All methods train as many jobs for as
many steps; `halving` stops most of them early and uses less. A search that is stopped goes on, and one that has ended
is not made again; `--most` ends after that number of searches, `--table` prints what is there.
`--speed` and `--front` are for a machine that does nothing else; `--front` needs `shoal calibrate`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import shoal
from shoal.searching.run import RESULTS

RANDOM = "random"
COMPARED = (RANDOM, "tpe", "evolution", "pbt", "halving")
ROUNDS = 3
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Two-sided quantiles of Student's t by the number of values."""


def search(method: str, seed: int, asked: argparse.Namespace) -> None:
    """One search, or the rest of it."""
    shoal.search(
        "image",
        method=method,
        trials=asked.trials,
        steps=asked.steps,
        seed=seed,
        rounds=ROUNDS,
        devices=1,
        strategy="serial",
        retrain=False,
        folder=folder_of(asked.into, method, seed),
        progress=lambda message: None,
    )


def folder_of(into: Path, method: str, seed: int) -> Path:
    return into / f"{method}-{seed}"


def interval(values: list[float]) -> str:
    """The mean and its 95% interval."""
    if len(values) < 2:
        return f"{values[0]:.3f}"
    half = T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.3f} ± {half:.3f}"


def table(into: Path, seeds: int) -> list[str]:
    """Best validation losses, and how much lower than random search's with the same seed."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for method in COMPARED:
        files = {seed: folder_of(into, method, seed) / RESULTS for seed in range(seeds)}
        found[method] = {seed: json.loads(file.read_text()) for seed, file in files.items() if file.exists()}
    lines = [
        "| method | seeds | best validation loss | lower than random by, same seed | wins | steps trained |",
        "|---|---|---|---|---|---|",
    ]
    for method, searches in found.items():
        best = {seed: each["best"]["value"] for seed, each in searches.items()}
        if not best:
            continue
        base = {seed: found[RANDOM][seed]["best"]["value"] for seed in best if seed in found[RANDOM]}
        gains = [base[seed] - best[seed] for seed in base]
        steps = statistics.mean(_steps(each) for each in searches.values())
        against = (
            ["", ""]
            if method == RANDOM or not gains
            else [interval(gains), f"{sum(gain > 0 for gain in gains)} of {len(gains)}"]
        )
        cells = [method, str(len(best)), interval(list(best.values())), *against, f"{steps:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _steps(found: dict[str, Any]) -> int:
    """Steps that a search trained."""
    options = found["options"]
    if options["method"] == "pbt":
        return options["trials"] * options["steps"]
    return sum(
        max(map(int, row["reported"]), default=0) if row["state"] != "finished" else options["steps"]
        for row in found["trials"]
    )


def speed(asked: argparse.Namespace) -> None:
    """The same trials with one worker and with two, turn by turn, from the first that begins to the last that ends. Of
    each the fastest turn counts: other programs only slow it down."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(asked.turns):
        for workers, found in rates.items():
            found.append(_trials_an_hour(workers, asked))
            print(f"{workers} worker{'s' if workers > 1 else ''}: {found[-1]:,.0f} trials an hour", flush=True)
    print(f"two workers: {max(rates[2]) / max(rates[1]):.2f}x")


def _trials_an_hour(workers: int, asked: argparse.Namespace) -> float:
    at: dict[str, list[float]] = {"begin": [], "end": []}

    def note(message: dict[str, Any]) -> None:
        if message["event"] in at:
            at[message["event"]].append(time.monotonic())

    with tempfile.TemporaryDirectory() as folder:
        shoal.search(
            "image",
            method=RANDOM,
            trials=asked.trials,
            steps=asked.steps,
            devices=workers,
            strategy="serial",
            retrain=False,
            folder=Path(folder) / "s",
            progress=note,
        )
    return 3600 * len(at["end"]) / (max(at["end"]) - min(at["begin"]))


def front(asked: argparse.Namespace) -> None:
    """A search for quality, predicted time and memory on this machine; then each model of the front is timed alone."""
    with tempfile.TemporaryDirectory() as folder:
        found = shoal.search(
            "image",
            method="evolution",
            trials=asked.trials,
            steps=asked.steps,
            devices=1,
            strategy="serial",
            cluster="this",
            memory_limit=asked.memory_limit,
            retrain=False,
            folder=Path(folder) / "s",
            progress=lambda message: None,
        )
        rows = found.front
        measured: list[list[float]] = [[] for _ in rows]
        for turn in range(3):
            for number, row in enumerate(rows):
                run = shoal.train(
                    row["job"],
                    "serial",
                    steps=asked.steps,
                    folder=Path(folder) / f"{turn}-{number}",
                    gate=False,
                    checkpoint_every=0,
                    on_message=lambda message: None,
                )
                assert run.step_s is not None
                measured[number].append(run.step_s)
    predicted = [row["predicted"]["step_s"] for row in rows]
    times = [statistics.median(each) for each in measured]
    for row, mine in zip(rows, times, strict=True):
        known = row["predicted"]
        print(
            f"loss {row['value']:.3f}  predicted {1e3 * known['step_s']:.2f} ms, measured {1e3 * mine:.2f} ms, "
            f"memory {known['memory_bytes'] / 1e6:.2f} MB"
        )
    most = max(row["predicted"]["memory_bytes"] for row in found.trials if row["predicted"])
    print(
        f"{len(rows)} models on the front of {len(found.trials)}; {found.results['rejected']} were not trained; the "
        f"largest needs {most / 1e6:.2f} MB of {asked.memory_limit}"
    )
    print(f"Spearman {spearman(predicted, times):.3f}")


def spearman(one: list[float], two: list[float]) -> float:
    """The correlation of ranks."""
    ranks = [[sorted(values).index(each) for each in values] for values in (one, two)]
    return statistics.correlation(*ranks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=Path("runs/search"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--most", type=int, default=None)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--front", action="store_true")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--memory-limit", default="2.5 MB")
    asked = parser.parse_args()
    if asked.speed or asked.front:
        (speed if asked.speed else front)(asked)
        return 0
    todo = [
        (method, seed)
        for seed in range(asked.seeds)
        for method in COMPARED
        if not (folder_of(asked.into, method, seed) / RESULTS).exists()
    ]
    for method, seed in [] if asked.table else todo[: asked.most]:
        print(f"{method}, seed {seed}", file=sys.stderr, flush=True)
        search(method, seed, asked)
    print("\n".join(table(asked.into, asked.seeds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`shoal.compare`, `shoal.report`, `shoal.runs`: contestants under one protocol, and what came of it."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.api.call import checked_keywords
from shoal.common.log import log_message
from shoal.common.printed import PrintedTable
from shoal.comparison import protocol, survey
from shoal.comparison.protocol import CannotCompare, Protocol
from shoal.comparison.report import write_report
from shoal.comparison.rows import results
from shoal.comparison.single_runs import list_runs, results_of_runs
from shoal.strategy import Strategy, Term

if TYPE_CHECKING:
    from shoal.job import Job

__all__ = ["CannotCompare", "Comparison", "compare", "report", "runs"]

DEFAULT = ("dp(2)", "dp(2, zero=3)", "dp(2, sync=diloco(8))", "pp(2, '1f1b', micro=4)", "torch-ddp", "torch-fsdp2")
QUICK = ("dp(2)", "dp(2, zero=3)", "dp(2, sync=diloco(8))", "torch-ddp")
QUICK_STEPS, QUICK_EVALUATE = 60, 10


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison(PrintedTable):
    """What a comparison measured."""

    folder: Path
    results: dict[str, Any]
    """All that the report shows, as plain values."""

    @property
    def page(self) -> Path:
        """The report."""
        return self.folder / "report.html"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One for each job, contestant and number of ranks."""
        return [{"job": job["job"], **row} for job in self.results["jobs"] for row in job["rows"]]

    def to_json(self) -> dict[str, Any]:
        """What the verb prints with `--json`."""
        return {"folder": str(self.folder), "report": str(self.page), **self.results}

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        rows = []
        for row in self.rows:
            if row["step_s"] is None:
                rows.append([row["job"], row["name"], str(row["ranks"]), "", "", "", "", row["verdict"]])
                continue
            seconds = "-" if row["time_to_target_s"] is None else f"{row['time_to_target_s']:.3g} s"
            final = "-" if row["final"] is None else f"{row['final']:.4g}"
            rows.append(
                [
                    row["job"],
                    row["name"],
                    str(row["ranks"]),
                    seconds,
                    f"{1000 * row['step_s']:.3g} ± {1000 * row['step_spread_s']:.2g} ms",
                    f"{row['memory_bytes'] / 1e6:.3g} MB",
                    final,
                    row["verdict"],
                ]
            )
        head = ["job", "contestant", "ranks", "to target", "step", "memory a rank", "final", "verdict"]
        return f"report: {self.page}", head, rows


@checked_keywords
def compare(
    *jobs: str | Path | Job,
    contestants: Sequence[str | Strategy | Term] = (),
    ranks: Iterable[int] = (2,),
    seeds: int | None = None,
    steps: int | None = None,
    batch: int | None = None,
    per_rank: bool = False,
    evaluate_every: int | None = None,
    emulate: str | None = None,
    folder: str | Path | None = None,
    quick: bool = False,
    preset: str | None = None,
    minutes: float | None = None,
    progress: Callable[[dict[str, Any]], None] = log_message,
) -> Comparison:
    """Trains jobs by strategies and by other frameworks under one protocol, and writes a report.

    Args:
        jobs: Jobs, files that define one, or built-in names. None: both small tasks.
        contestants: Strategies and names of frameworks; the reference, plain PyTorch, is always added.
        ranks: Numbers of ranks. A strategy runs on its own number, a framework on each.
        seeds: Runs of every contestant, each with another order of samples and other initial weights.
        steps: Steps of a run. None: the job's.
        batch: Global batch. None: the job's.
        per_rank: Whether the batch is that of one rank (weak scaling).
        evaluate_every: Steps between evaluations. None: the job's.
        emulate: A slower cluster whose links are emulated; then only strategies of Shoal take part.
        folder: Where runs and report go; one that holds the same comparison is resumed. None: a new one in `runs`.
        quick: Few steps, two seeds, the tiny tasks and no further packages.
        preset: `survey`: both tasks by all classes of parallelism of the empirical survey, on one and two ranks, the
            batch of each rank fixed, beside its machines as simulated.
        minutes: Begins no run after this time; the report is of the runs that are there, and the same call with the
            same folder goes on. None: all runs.
        progress: Is given messages about the runs. The `shoal` logger by default.

    Returns:
        The figures; `.page` is the report.

    Example:
        shoal.compare("language:tiny", contestants=["dp(2)", "torch-ddp"], seeds=3)
    """
    if preset not in (None, "survey"):
        raise CannotCompare(f"--preset {preset}: expected survey")
    if preset == "survey":
        contestants, ranks, per_rank = contestants or survey.CONTESTANTS, sorted({*survey.RANKS, *ranks}), True
    names, objects = _named(jobs or (("language:tiny", "image:tiny") if quick else ("language", "image")))
    question = Protocol(
        jobs=names,
        contestants=tuple(str(each) for each in contestants) or (QUICK if quick else DEFAULT),
        ranks=tuple(sorted(set(ranks))),
        seeds=seeds or (2 if quick else 3),
        steps=steps or (QUICK_STEPS if quick else None),
        batch=batch,
        per_rank=per_rank,
        evaluate_every=evaluate_every or (QUICK_EVALUATE if quick else None),
        emulate=emulate,
        preset=preset,
    )
    where = Path(folder) if folder is not None else Path("runs") / f"compare-{time.strftime('%Y-%m-%d-%H%M%S')}"
    with _forks(objects):
        protocol.compare(question, where, listen=progress, minutes=minutes)
    found = results(where)
    write_report(found, where, commands=[command(question, where)])
    return Comparison(folder=where, results=found)


def _named(jobs: Sequence[Any]) -> tuple[tuple[str, ...], bool]:
    """The jobs by name, and whether one of them is an object of this process."""
    names, objects = [], False
    for job in jobs:
        if isinstance(job, (str, Path)):
            names.append(str(job))
        else:
            from shoal.job.load import named

            names.append(named(job))
            objects = True
    return tuple(names), objects


def _forks(objects: bool) -> Any:
    if not objects:
        return contextlib.nullcontext()
    from shoal.launch.fork_of_caller import forking_this_process

    return forking_this_process()


def command(question: Protocol, folder: Path) -> str:
    """The command line that makes the comparison again."""
    words = ["shoal", "compare", *question.jobs, "--with", *question.contestants]
    words += ["--ranks", ",".join(map(str, question.ranks)), "--seeds", str(question.seeds)]
    for option, value in (
        ("--steps", question.steps),
        ("--batch", question.batch),
        ("--evaluate-every", question.evaluate_every),
        ("--emulate", question.emulate),
    ):
        if value is not None:
            words += [option, str(value)]
    words += ["--per-rank"] if question.per_rank and not question.preset else []
    words += ["--preset", question.preset] if question.preset else []
    return shlex.join([*words, "--folder", folder.name])


@checked_keywords
def report(*folders: str | Path, to: str | Path | None = None) -> Comparison:
    """Writes the report of a comparison, or of any runs.

    Args:
        folders: The folder of one comparison, or those of runs.
        to: Where it is written. None: into the comparison's folder, or `report` in the first run's parent.

    Returns:
        The figures; `.page` is the report.

    Example:
        shoal.report("runs/first", "runs/second")
    """
    paths = [Path(each) for each in folders]
    if not paths:
        raise CannotCompare("no run was named; give the folders of runs, or of one comparison")
    if len(paths) == 1 and (paths[0] / protocol.COMPARISON).exists():
        found, where = results(paths[0]), Path(to or paths[0])
        asked: Any = {name: tuple(v) if isinstance(v, list) else v for name, v in found["question"].items()}
        again = Protocol(**asked)
        write_report(found, where, commands=[command(again, paths[0])])
        return Comparison(folder=where, results=found)
    found, where = results_of_runs(paths), Path(to or paths[0].parent / "report")
    write_report(found, where, commands=[f"shoal report {shlex.join(map(str, paths))}"])
    return Comparison(folder=where, results=found)


@dataclass(frozen=True, kw_only=True, repr=False)
class Runs(PrintedTable):
    """Runs below a folder, with their key figures."""

    folder: Path
    rows: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """What the verb prints with `--json`."""
        return {"folder": str(self.folder), "runs": self.rows}

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        head = ["run", "job", "strategy", "ranks", "status", "steps", "step", "loss", "memory"]
        rows = [
            [
                row["folder"],
                row["job"],
                row["strategy"],
                str(row["ranks"]),
                row["status"],
                str(row["steps"]),
                "-" if row["step_s"] is None else f"{1000 * row['step_s']:.3g} ms",
                "-" if row["loss"] is None else f"{row['loss']:.4g}",
                "-" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 1e6:.4g} MB",
            ]
            for row in self.rows
        ]
        return f"{len(rows)} runs in {self.folder}", head, rows


@checked_keywords
def runs(folder: str | Path = "runs") -> Runs:
    """Lists the runs below a folder, newest first.

    Args:
        folder: Where to look.

    Returns:
        The runs with their key figures.

    Example:
        shoal.runs()
    """
    return Runs(folder=Path(folder), rows=list_runs(Path(folder)))

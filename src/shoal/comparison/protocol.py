"""One protocol for all contestants: which runs are made, in which order, and what is the same for all of them.

For each seed every contestant trains the job once, on each number of ranks; the order turns from seed to seed, so that
whatever the machine does meets all alike. A run that was finished is not made again: an interrupted comparison resumes.
Contestants that cannot take part are listed with the reason. Nothing here imports torch.

    FOLDER/comparison.json          what was asked, the jobs, who was refused and why
    FOLDER/runs/JOB/NAME-rN-sN/     a run, with facts.json: what the guard compares
"""

from __future__ import annotations

import json
import math
import platform
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal.launch import RankFailed, run_ranks
from shoal.strategy import StrategyError, parse, require_legal
from shoal.training.record.run import RUN, RunBroken, read_json, write_json

COMPARISON, FACTS = "comparison.json", "facts.json"
REFERENCE = "pytorch"
WARMUP_STEPS = 3
"""The first steps of a run are outside of the window in which speed is measured."""
Listener = Callable[[dict[str, Any]], None]


class CannotCompare(ValueError):
    """A comparison that cannot be made as it was asked for."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What is compared."""

    jobs: tuple[str, ...]
    contestants: tuple[str, ...]
    ranks: tuple[int, ...] = (2,)
    seeds: int = 3
    steps: int | None = None
    batch: int | None = None
    """Global batch; None: the job's."""
    per_rank: bool = False
    """Whether `batch` (or the job's) is the batch of one rank, so that more ranks train on more samples in a step."""
    evaluate_every: int | None = None
    emulate: str | None = None
    preset: str | None = None
    """`survey`: its results stand beside the simulated ones (`survey.py`)."""

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run."""

    job: str
    contestant: str
    ranks: int
    seed: int
    shares: int = 1
    """Of the reference: for how many ranks' batch norm it stands."""

    @property
    def place(self) -> str:
        slug = re.sub(r"[^\w.]+", "-", self.contestant).strip("-")
        shares = f"-of{self.shares}" if self.shares > 1 else ""
        return f"runs/{slug_of(self.job)}/{slug}{shares}-r{self.ranks}-s{self.seed}"


def slug_of(text: str) -> str:
    return re.sub(r"[^\w.]+", "-", text).strip("-")


@dataclass
class Progress:
    """Where a comparison is, for a bar."""

    total: int
    done: int = 0
    cell: Cell | None = None
    listen: Listener = field(default=lambda message: None)

    def say(self, **message: Any) -> None:
        self.listen({"total": self.total, "done": self.done, **message})


def is_strategy(text: str) -> bool:
    try:
        parse(text)
    except StrategyError:
        return False
    return True


def worlds_of(question: Protocol, contestant: str) -> list[int]:
    """On how many ranks a contestant runs."""
    if contestant == REFERENCE:
        return [1]
    if is_strategy(contestant):
        world = parse(contestant).world
        return [world] if world in question.ranks else []
    return list(question.ranks)


def contestants_of(question: Protocol) -> list[str]:
    """Those that were named; the reference, and on one rank Shoal's own serial run, are always among them."""
    named = [str(parse(each)) if is_strategy(each) else each for each in question.contestants]
    first = [REFERENCE, *(["serial"] if 1 in question.ranks else [])]
    return list(dict.fromkeys([*first, *named]))


def check(question: Protocol) -> None:
    """Refuses what cannot be meant."""
    if not question.jobs:
        raise CannotCompare("no job was named; give a Python file, or one of language, image")
    if not question.seeds > 0:
        raise CannotCompare(f"--seeds {question.seeds}: expected at least 1")
    if not question.ranks or min(question.ranks) < 1:
        raise CannotCompare(f"--ranks {','.join(map(str, question.ranks))}: expected numbers of at least 1")
    for name in contestants_of(question):
        if is_strategy(name):
            require_legal(parse(name))
            if not worlds_of(question, name):
                raise CannotCompare(
                    f"{name} has {parse(name).world} ranks, and --ranks is {','.join(map(str, question.ranks))}; "
                    f"add {parse(name).world} to --ranks"
                )


def compare(question: Protocol, folder: Path, *, listen: Listener, minutes: float | None = None) -> dict[str, Any]:
    """Makes all runs that are missing in the folder. Returns what `comparison.json` holds.

    Args:
        question: What is compared.
        folder: Of the comparison.
        listen: Is given messages.
        minutes: Begins no run after this time; the same call goes on with the next one.
    """
    end_s = math.inf if minutes is None else time.monotonic() + 60 * minutes
    check(question)
    known = _resumed(question, folder)
    names = contestants_of(question)
    folder.mkdir(parents=True, exist_ok=True)
    jobs: dict[str, Any] = known.get("jobs") or {}
    for job in question.jobs:
        if job not in jobs:
            listen({"text": f"looking at {job}"})
            jobs[job] = _inspected(question, job, names)
    comparison = {
        "question": question.to_json(),
        "contestants": names,
        "jobs": jobs,
        "environment": next(iter(jobs.values()))["environment"],
        "machine": {"processor": _processor(), "system": platform.platform()},
        "started": known.get("started") or time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    write_json(folder / COMPARISON, comparison)
    cells = cells_of(question, names, jobs)
    progress = Progress(total=len(cells), listen=listen)
    for cell in cells:
        progress.cell = cell
        if not (folder / cell.place / FACTS).exists():
            if time.monotonic() >= end_s:
                listen({"text": f"{progress.done} of {len(cells)} runs are there; the same command goes on"})
                break
            progress.say(cell=cell, event="start")
            _run(question, cell, folder, progress)
        progress.done += 1
        progress.say(cell=cell, event="end")
    return comparison


def _resumed(question: Protocol, folder: Path) -> dict[str, Any]:
    if not (folder / COMPARISON).exists():
        if (folder / RUN).exists():
            raise CannotCompare(f"--folder {folder} is the folder of a run; give another one")
        return {}
    known = read_json(folder / COMPARISON)
    before, now = dict(known.get("question") or {}), question.to_json()
    may_grow = ("contestants", "seeds", "ranks")
    differing = [name for name in now if name not in may_grow and before.get(name) != now[name]]
    if differing:
        raise CannotCompare(
            f"--folder {folder} holds a comparison with another value of {', '.join(differing)}: resume it as it was, "
            "or give another folder"
        )
    same = all(before.get(name) == now[name] for name in ("contestants", "ranks"))
    return known if same else {"started": known.get("started")}


def changes_of(question: Protocol, job: Mapping[str, Any] | None, ranks: int, seed: int) -> dict[str, Any]:
    """The fields of the job that a comparison sets, for all contestants alike."""
    batch = question.batch if question.batch is not None or job is None else job["batch"]
    if question.per_rank and batch is not None:
        batch = batch * ranks
    # Synchronous batch norm exists for accelerators only in PyTorch: statistics of each replica, for all.
    norm = "local" if job is not None and job["batch_norm"] else None
    return {
        "steps": question.steps,
        "global_batch": batch,
        "seed": seed,
        "evaluate_every": question.evaluate_every,
        "batch_norm": norm,
    }


def _inspected(question: Protocol, job: str, names: Sequence[str]) -> dict[str, Any]:
    worlds = {name: worlds_of(question, name) for name in names}
    found: dict[str, Any] = run_ranks(
        "shoal.comparison.inspecting:inspect",
        {
            "job": job,
            "contestants": worlds,
            "changes": {**changes_of(question, None, 1, 0), "seed": None},
        },
        ranks=1,
    )[0]
    if question.emulate is not None:
        why = "links are emulated for Shoal's own backend only"
        found["refused"] |= {
            f"{name}@{world}": why
            for name in names
            if not is_strategy(name) and name != REFERENCE
            for world in worlds[name]
        }
    return found


def cells_of(question: Protocol, names: Sequence[str], jobs: Mapping[str, Any]) -> list[Cell]:
    """All runs, in their order: contestants take turns, and another begins with every seed."""
    cells = []
    for seed in range(question.seeds):
        turn = seed % len(names)
        for job in question.jobs:
            for name in [*names[turn:], *names[:turn]]:
                for world in worlds_of(question, name):
                    if not jobs[job]["refused"].get(f"{name}@{world}"):
                        cells += _of(job, name, world, seed, question, jobs[job])
    return cells


def _of(job: str, name: str, world: int, seed: int, question: Protocol, facts: Mapping[str, Any]) -> list[Cell]:
    if name != REFERENCE:
        return [Cell(job=job, contestant=name, ranks=world, seed=seed)]
    # One reference for all numbers of ranks, unless what it computes depends on them.
    apart = facts["batch_norm"] or question.per_rank
    return [
        Cell(job=job, contestant=name, ranks=1, seed=seed, shares=shares)
        for shares in (sorted({1, *question.ranks}) if apart else [1])
    ]


def _run(question: Protocol, cell: Cell, folder: Path, progress: Progress) -> None:
    """One run. One that fails is kept with its reason, and the others go on."""
    place = folder / cell.place
    if place.exists():
        shutil.rmtree(place)  # Of a run that was interrupted.
    place.mkdir(parents=True)
    own = is_strategy(cell.contestant)
    known = read_json(folder / COMPARISON)["jobs"][cell.job]
    settings = {
        "job": cell.job,
        "contestant": cell.contestant,
        "folder": str(place),
        "emulate": question.emulate,
        "shares": cell.shares,
        "changes": changes_of(question, known, max(cell.ranks, cell.shares), cell.seed),
    }

    def listen(rank: int, message: dict[str, Any]) -> None:
        if message.get("event") == "stopping":
            raise KeyboardInterrupt
        if message.get("event") == "step" and rank == 0:
            progress.say(cell=cell, event="step", step=message["step"], steps=message["steps"])

    started = time.perf_counter()
    try:
        target = "shoal.comparison.rank:run_shoal" if own else "shoal.comparison.rank:run_framework"
        ranks = run_ranks(target, settings, ranks=cell.ranks, on_message=listen, threads_per_rank=1)
        facts = {"ranks": ranks, "status": "finished"}
    except RankFailed as error:
        facts = {"ranks": [], "status": "failed", "reason": str(error)}
        _note_failure(place, cell, str(error))
    write_json(place / FACTS, {**facts, "cell": asdict(cell), "took_s": time.perf_counter() - started})


def _note_failure(place: Path, cell: Cell, reason: str) -> None:
    """A run that ended before its record began has one all the same."""
    try:
        known = read_json(place / RUN)
    except RunBroken:
        known = {
            "job": cell.job,
            "strategy": cell.contestant,
            "contract": "",
            "world": cell.ranks,
            "seed": cell.seed,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S"),
        }
    write_json(place / RUN, {**known, "status": "failed", "reason": reason})


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown")
    except OSError:
        return platform.processor()

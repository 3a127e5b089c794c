"""Ensembles: members that differ by their seed are trained at the same time, then judged alone and together.

    runs/NAME/member-0     the run of the first member, with the job's own seed
    runs/NAME/member-1     ...
    runs/NAME/student      one network that has learned from all of them, with distill=True
    runs/NAME/run.json     what the members reach alone, on average and together

A member is a run like any other, in a world of its own: its ranks meet each other only, so nothing of an ensemble can
change it, and what it trains by may be any strategy. One that was interrupted goes on from its own checkpoints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shoal.launch import RankFailed, run_ranks, run_worlds
from shoal.strategy import Strategy, cp, ensemble, ep, pp, tp
from shoal.strategy.contract import contract
from shoal.strategy.members import member_seed, member_strategy
from shoal.training.entry import judge_members, train_run
from shoal.training.options import TrainOptions
from shoal.training.record.run import RUN, RunBroken, read_json, write_json
from shoal.training.resumed import CannotTrain, can_go_on

Listener = Callable[[dict[str, Any]], None]
STUDENT = "student"


def member_folder(folder: Path, member: int) -> Path:
    return folder / f"member-{member}"


def require_ensemble(options: TrainOptions, strategy: Strategy) -> None:
    """Refuses what members cannot do."""
    term = strategy.term(ensemble)
    assert term is not None
    inner = member_strategy(strategy)
    if inner.servers:
        raise CannotTrain(f"{strategy}: members with servers cannot be trained yet; use via=allreduce() in {term}")
    if options.resume is not None and not (Path(options.resume) / RUN).exists():
        raise CannotTrain(
            f"--resume {options.resume}: an ensemble goes on from its own folder, in which each member has its "
            "checkpoints; name that"
        )
    if options.weights_only and term.distill:
        raise CannotTrain(f"{term}: the student goes on with members that were saved in full; leave --weights-only out")
    if term.distill:
        cut = next((each for each in inner.terms if isinstance(each, (pp, tp, cp, ep)) and each.n > 1), None)
        if cut is not None:
            raise CannotTrain(
                f"{term} with {cut}: the student's loss reads full outputs of model and teachers, which {cut} cuts; "
                "use dp inside the ensemble, with zero to save memory, or distill=False"
            )


def train_members(
    options: TrainOptions, strategy: Strategy, *, hang_after_s: float, on_message: Listener
) -> dict[str, Any]:
    """Trains all members and the student, if there is one. `options` are checked for a member, and have the folder;
    the outcome is that of the ensemble."""
    term, inner = strategy.term(ensemble), member_strategy(strategy)
    assert term is not None
    folder = Path(options.folder or "")
    seed = _seed_of(options)
    given = [
        _options_of(options, member_folder(folder, member), inner, member_seed(seed, member))
        for member in range(term.n)
    ]
    facts = _begin(folder, options, strategy, seed)

    def listen(rank: int, message: dict[str, Any]) -> None:
        on_message(message if rank < 0 else {**message, "member": rank // inner.world})

    try:
        found = run_worlds(
            train_run,
            [each.to_json() for each in given],
            ranks=inner.world,
            hang_after_s=hang_after_s,
            on_message=listen,
        )
        outcomes = [each[0] for each in found]
        stopped = any(each["status"] == "stopped" for each in outcomes)
        student = None
        if term.distill and not stopped:
            on_message({"event": "note", "text": f"the student learns from {term.n} members"})
            asked = _options_of(options, folder / STUDENT, inner, member_seed(seed, term.n))
            asked = replace(asked, teachers=", ".join(str(each.folder) for each in given))
            student = run_ranks(
                train_run,
                asked.to_json(),
                ranks=inner.world,
                hang_after_s=hang_after_s,
                on_message=lambda rank, message: on_message({**message, "member": STUDENT}),
            )[0]
            stopped = student["status"] == "stopped"
        judged: dict[str, Any] = {}
        if not stopped:
            taught = str(folder / STUDENT) if student else None
            asked_for = {"job": options.of_job.to_json(), "members": [each.folder for each in given], "student": taught}
            judged = run_ranks(judge_members, asked_for, ranks=1, hang_after_s=hang_after_s)[0]
            if judged:
                on_message({"event": "members", **judged})
    except RankFailed as error:
        _end(folder, facts, {"status": "failed", "reason": str(error)})
        raise
    memory_bytes = max(each["memory_bytes"] for world in found for each in world if each is not None)
    outcome = {
        **outcomes[0],
        "strategy": str(strategy),
        "world": strategy.world,
        "folder": str(folder),
        "memory_bytes": memory_bytes,
        "status": "stopped" if stopped else "finished",
        "metrics": judged.get("together", {}),
        **judged,
        "losses": [each["loss"] for each in outcomes],
    }
    if student is not None:
        outcome["student_loss"] = student["loss"]
    kept = (
        "step",
        "steps",
        "loss",
        "losses",
        "metrics",
        "step_s",
        "memory_bytes",
        "train_s",
        "alone",
        "mean_alone",
        "together",
        "student",
        "combined",
    )
    summary = {key: outcome[key] for key in kept if key in outcome}
    with contextlib.suppress(RunBroken):
        facts["environment"] = read_json(member_folder(folder, 0) / RUN).get("environment")
    _end(folder, facts, {"status": outcome["status"], "summary": summary})
    return outcome


def _seed_of(options: TrainOptions) -> int:
    """The seed of the first member, which is the job's own unless another was given."""
    return options.seed if options.seed is not None else int(options.job_seed)


def _options_of(options: TrainOptions, folder: Path, inner: Strategy, seed: int) -> TrainOptions:
    goes_on = can_go_on(folder)
    every = options.checkpoint_every or 1 << 30  # The last step is saved in any case: members are judged together.
    return replace(
        options,
        strategy=str(inner),
        folder=str(folder),
        seed=seed,
        resume=str(folder) if goes_on else None,
        go_on=(folder / RUN).exists(),
        checkpoint_every=every,
        lock=None,
        checked=False,
    )


def _begin(folder: Path, options: TrainOptions, strategy: Strategy, seed: int) -> dict[str, Any]:
    before = read_json(folder / RUN) if (folder / RUN).exists() else {}
    facts = {
        "status": "running",
        "reason": None,
        "job": options.job,
        "strategy": str(strategy),
        "contract": str(contract(strategy)),
        "world": strategy.world,
        "seed": seed,
        "arguments": {**options.recorded(), "strategy": str(strategy)},
        "environment": {},
        "started": before.get("started", _now()),
        "ended": None,
        "summary": None,
    }
    write_json(folder / RUN, facts)
    return facts


def _end(folder: Path, facts: dict[str, Any], found: dict[str, Any]) -> None:
    write_json(folder / RUN, {**facts, **found, "ended": _now()})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

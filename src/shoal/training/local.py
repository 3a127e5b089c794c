"""Training on ranks of this machine: checked in one process, then run on all, then read back.

    run = train_job("language:tiny", "dp(2, zero=1)", folder="runs/first")
    run.step_s, run.ledger, run.memory_bytes

Nothing here imports torch: what needs it is done by forks of a server that has it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.common.hindrance import BadHindrance, read_killed_ranks, read_slow_ranks
from shoal.common.log import log_message
from shoal.launch import RankFailed, run_ranks, warm_up
from shoal.proof.gate import gate_locally
from shoal.runtime.options import WrongOption
from shoal.strategy import Strategy, Term, as_strategy, ensemble, parse, require_legal
from shoal.strategy.members import member_strategy
from shoal.training.entry import MODULES, check_run
from shoal.training.growing import BadJoin, require_can_come
from shoal.training.members import require_ensemble, train_members
from shoal.training.options import TrainOptions
from shoal.training.record.lock import FolderBusy, FolderLock, take
from shoal.training.record.run import RUN, Run, RunBroken, new_folder, read_json, read_run, write_json
from shoal.training.restored import train_restoring
from shoal.training.resumed import (
    CannotTrain,
    can_go_on,
    inherited,
    job_of,
    require_free,
    require_go_on,
    run_of,
    size_of,
)

if TYPE_CHECKING:
    from shoal.job import Job

Listener = Callable[[dict[str, Any]], None]


def train_job(
    job: str | Path | Job | None = None,
    strategy: str | Strategy | Term | None = None,
    *,
    folder: str | Path | None = None,
    on_message: Listener = log_message,
    hang_after_s: float = 300.0,
    gate: bool = True,
    callbacks: Sequence[Any] = (),
    **options: Any,
) -> Run:
    """Trains a job as `shoal train` does, and returns its record. `shoal.train` is this function.

    Args:
        job: A Job, a file that defines one (`"mine.py"`, `"mine.py:name"`), or a built-in one (`"language:tiny"`).
            Ranks load a file by themselves; of a Job object they are forks of this process. With `resume=` it may be
            left out: then it is that of the run.
        strategy: Text or terms: `"dp(2, zero=1)"` or `dp(2, zero=1) * tp(2)`. None: that of the resumed run, or serial.
        folder: Where the run is recorded. None: that of the resumed run, or a new folder in `runs`.
        on_message: Is given what ranks report: steps, metrics, checkpoints, warnings. The `shoal` logger by default.
        hang_after_s: Seconds without any progress after which the run is ended.
        gate: Whether a layout that has not been proven yet is checked first, by two steps in float64.
        callbacks: Objects with on_step, on_evaluate or on_checkpoint, called on rank 0 after those of the job
            (`shoal.Callback`). The ranks are then forks of this process.
        options: The other fields of `TrainOptions`. With `resume=` those that are left out are the run's.

    Returns:
        The record: `run.losses`, `run.step_s`, `run.ledger`, `run.model()`.

    Raises:
        CannotTrain: Something that was given, or the job, cannot be trained as it stands.

    Example:
        run = shoal.train(job, "dp(2, zero=3)", steps=100)
        model = run.model()
    """
    resume = options.get("resume")
    if job is None and resume is not None:
        job = job_of(str(resume))
    _require_call(job, strategy, folder, hang_after_s, on_message)
    assert job is not None
    job = str(job) if isinstance(job, Path) else job
    if callbacks:
        from shoal.job.load import with_callbacks

        size = options.pop("size", None) or (None if resume is None else size_of(str(resume)))
        job = with_callbacks(job, callbacks, size=size)
    if not isinstance(job, str):
        from shoal.job.load import named
        from shoal.launch.fork_of_caller import forking_this_process

        name = named(job)
        with forking_this_process():
            return train_job(
                name, strategy, folder=folder, on_message=on_message, hang_after_s=hang_after_s, gate=gate, **options
            )
    written = None if strategy is None else str(parse(strategy) if isinstance(strategy, str) else as_strategy(strategy))
    try:
        given = TrainOptions.from_json({**options, "job": job, "strategy": written, "folder": folder, "gate": gate})
    except WrongOption as error:
        raise CannotTrain(f"train_job: {error}") from error
    if given.go_on:
        require_go_on(given)
    elif given.resume is not None:
        given = inherited(given, run_of(given.resume))
    elif folder is not None:
        require_free(Path(folder))
    chosen = parse(given.strategy or "serial")
    require_legal(chosen)
    given = replace(given, strategy=str(chosen))
    if given.go_on and can_go_on(Path(given.folder or "")):
        given = replace(given, resume=given.folder)
    outcome = train_locally(given, chosen.world, hang_after_s=hang_after_s, on_message=on_message)
    return read_run(Path(outcome["folder"]))


def _require_call(job: Any, strategy: Any, folder: Any, hang_after_s: Any, on_message: Any) -> None:
    """Refuses what would otherwise be dropped silently, or fail far from its cause."""
    if not isinstance(job, (str, Path)) and not _is_job(job):
        what = "no job" if job is None else f"a {type(job).__name__}"
        raise CannotTrain(
            f"train_job was given {what}; give a shoal.Job, the file that defines one, such as "
            '"mine.py" or "mine.py:name", or the name of a built-in one'
        )
    if not isinstance(strategy, (str, Strategy, Term)) and strategy is not None:
        raise CannotTrain(
            f'train_job was given {strategy!r} as its strategy; give text or terms, such as "dp(2, zero=1)" or dp(2)'
        )
    if folder is not None and not isinstance(folder, (str, Path)):
        raise CannotTrain(f"train_job was given {folder!r} as its folder; give a path, or None for a new one")
    if not isinstance(hang_after_s, (int, float)) or not hang_after_s >= 1:
        raise CannotTrain(f"hang_after_s is {hang_after_s!r}; expected seconds, at least 1")
    if not callable(on_message):
        raise CannotTrain(f"on_message is {on_message!r}; expected a function that takes a message")


def _is_job(given: Any) -> bool:
    """Whether it is a Job, without loading torch for what is none."""
    if type(given).__module__ != "shoal.job.job":
        return False
    from shoal.job.job import Job

    return isinstance(given, Job)


def require_emulation(described: str, world: int, backend: str | None) -> None:
    """Refuses a cluster that cannot be emulated, before any rank starts."""
    from shoal.comm.emulate import parse_emulation

    wanted = parse_emulation(described)
    if wanted.world != world:
        raise CannotTrain(
            f"--emulate {described!r}: {wanted.hosts} hosts of {wanted.per_host} ranks are {wanted.world} ranks, and "
            f"the strategy has {world}"
        )
    if backend not in (None, "shoal"):
        raise CannotTrain(f"--emulate needs the shoal backend, and --backend {backend} was given; leave one out")


def require_hindrances(options: TrainOptions, world: int) -> None:
    """Refuses slow or failing ranks that cannot be meant, before any rank starts."""
    try:
        read_slow_ranks(options.straggler, world=world)
        read_killed_ranks(options.fail, world=world)
        strategy = parse(options.strategy or "serial")
        require_can_come(
            strategy,
            rejoin=options.rejoin,
            join=options.join,
            weights_only=options.weights_only,
            checkpoints=options.checkpoint_every != 0,
        )
    except (BadHindrance, BadJoin) as error:
        raise CannotTrain(str(error)) from None


def train_locally(options: TrainOptions, world: int, *, hang_after_s: float, on_message: Listener) -> dict[str, Any]:
    """Checks, chooses the folder, runs; returns rank 0's outcome with the memory of the rank that needed most."""
    strategy = parse(options.strategy or "serial")
    members = strategy.term(ensemble)
    if members is not None:
        require_ensemble(options, strategy)
        strategy = member_strategy(strategy)
        world, asked = strategy.world, parse(options.strategy or "serial")
        options = replace(options, strategy=str(strategy), resume=None)
    if options.emulate is not None:
        require_emulation(options.emulate, world, options.backend)
    require_hindrances(options, world)
    warm_up(*MODULES)
    with contextlib.ExitStack() as held:
        # Before a checkpoint in it is chosen: ranks of a killed run may still be writing one.
        if options.folder is not None and Path(options.folder).is_dir():
            options = replace(options, lock=held.enter_context(_locked(options.folder, on_message)).token)
        options = _checked(options, hang_after_s=hang_after_s, on_message=on_message)
        folder = options.folder or ""
        if options.lock is None:
            options = replace(options, lock=held.enter_context(_locked(folder, on_message)).token)
        if members is not None:
            return train_members(options, asked, hang_after_s=hang_after_s, on_message=on_message)
        try:
            outcomes = train_restoring(options, world, hang_after_s=hang_after_s, on_message=on_message)
        except RankFailed as error:
            _record_failure(Path(folder), error)
            raise
    return {**outcomes[0], "memory_bytes": max(each["memory_bytes"] for each in outcomes if each is not None)}


def _checked(options: TrainOptions, *, hang_after_s: float, on_message: Listener) -> TrainOptions:
    """The options as ranks get them: checked, with a folder that exists and the checkpoint to go on from."""
    try:
        listen = _ending_at_once(on_message)
        checked = run_ranks(check_run, options.to_json(), ranks=1, on_message=listen)[0]
        question = checked["question"]
        if question is not None:
            gate_locally(
                question, options.of_job, backend=options.backend, hang_after_s=hang_after_s, on_message=listen
            )
    except RankFailed as error:
        if error.for_user:
            raise CannotTrain(str(error)) from error
        raise
    folder = options.folder
    try:
        folder = str(new_folder(Path("runs"), checked["job"])) if folder is None else folder
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = folder or "runs"
        raise CannotTrain(f"{where} cannot be the run's folder: {error.strerror}; give another --folder") from error
    return replace(
        options,
        folder=folder,
        resume=checked["resume"],
        checked=True,
        gate=False,
        checkpoint_every=checkpoints_every(options, checked["steps"]),
        job_seed=checked["seed"],
        flops_per_sample=checked["flops_per_sample"],
    )


def _locked(folder: str, on_message: Listener) -> FolderLock:
    before = (Path(folder) / RUN).exists()
    try:
        mine = take(Path(folder), say=lambda text: on_message({"event": "note", "text": text}))
        if not before and (Path(folder) / RUN).exists():
            mine.release()
            raise CannotTrain(f"another run has used {folder} in the meantime; resume it, or give another --folder")
        return mine
    except FolderBusy as error:
        raise CannotTrain(str(error)) from error
    except OSError as error:
        raise CannotTrain(f"{folder} cannot be the run's folder: {error.strerror}; give another --folder") from error


def checkpoints_every(options: TrainOptions, steps: int) -> int:
    return max(1, steps // 4) if options.checkpoint_every is None else options.checkpoint_every


def _ending_at_once(listen: Callable[[dict[str, Any]], None]) -> Callable[[int, dict[str, Any]], None]:
    """While nothing is trained yet there is nothing to bring to an end: Ctrl-C is final."""

    def message(rank: int, content: dict[str, Any]) -> None:
        if content["event"] == "stopping":
            raise KeyboardInterrupt
        listen(content)

    return message


def _record_failure(folder: Path, error: Any) -> None:
    """Writes the cause down: rank 0 may have known only its echo, or may be the one that was killed."""
    with contextlib.suppress(RunBroken, OSError):
        facts = read_json(folder / RUN)
        if facts["status"] in ("running", "failed"):
            stack = "" if error.for_user else error.traceback_text
            write_json(
                folder / RUN,
                {**facts, "status": "failed", "reason": str(error), "rank": error.rank, "stack": stack},
            )

"""`shoal train`: everything is checked before ranks start, then they run and their progress is shown live.

Started by torchrun (or any launcher that sets RANK and WORLD_SIZE) it becomes one rank of the job instead.
Elsewhere this process imports no torch: also the check is done by a fork of the server that has it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

from shoal.api.known import require_known
from shoal.cli.output import echoed, emitter
from shoal.cli.progress import LiveProgress, plain_lines, summary
from shoal.training.local import (
    CannotTrain,
    can_go_on,
    checkpoints_every,
    require_emulation,
    require_free,
    require_go_on,
    require_hindrances,
    train_locally,
)
from shoal.training.options import TrainOptions

INHERITED = {"strategy": str, "size": str, "steps": int, "global_batch": int, "seed": int, "checkpoint_every": int,
             "growth": str, "scale_rule": str, "base_batch": int, "warmup": int, "evaluate_every": int,
             "checkpoint_minutes": float, "checkpoint_async": bool, "keep": int, "keep_best": int, "weights_only": bool,
             "patience": int, "monitor": str, "better": str, "min_delta": float, "log": str, "set": dict}  # fmt: skip
"""What a resumed run takes from the run it goes on with, where the command line does not say."""
DEFAULTS = {each.name: each.default for each in fields(TrainOptions)}
EXPECTED = {str: "text", int: "a whole number", float: "a number", dict: "a table", bool: "true or false"}
OPTION = {"global_batch": "batch", "growth": "grow-batch"}


def train_command(
    options: TrainOptions, *, ranks: int | None = None, hang_after_s: float = 300.0, as_json: bool = False
) -> int:
    """Trains, prints, and returns the exit status. `ranks`: how many there must be."""
    from shoal.comm.calibration import read_calibration
    from shoal.parallel.runnable import require_runnable
    from shoal.strategy import parse, require_legal

    written = options.strategy
    if options.go_on:
        require_go_on(options)
    elif options.resume is not None:
        options = _inherit(options, _run_of(options.resume))
    elif options.folder is not None:
        require_free(Path(options.folder))
    strategy = parse("serial" if options.strategy is None else options.strategy)
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if launched and not os.environ["WORLD_SIZE"].isdecimal():
        raise CannotTrain(f"WORLD_SIZE is {os.environ['WORLD_SIZE']!r}: expected the number of ranks")
    world = int(os.environ["WORLD_SIZE"]) if launched else ranks
    if ranks is not None and world != ranks:
        raise CannotTrain(f"--ranks {ranks}: the launcher has started {world} of them; leave --ranks out")
    require_legal(strategy, world=world)
    require_runnable(strategy)
    require_known(options.job, options.size)
    read_calibration()  # One that cannot be used is refused here, not by every rank.
    options = replace(options, strategy=str(strategy))
    if options.go_on and not launched and can_go_on(Path(options.folder or "")):
        options = replace(options, resume=options.folder)
    if launched:
        _as_one_rank(options, strategy.world, hang_after_s=hang_after_s, as_json=as_json)
    with emitter(summary, as_json=as_json) as show:
        bar = LiveProgress(str(strategy)) if sys.stderr.isatty() and not as_json else None
        try:
            listen = bar.message if bar else plain_lines()
            outcome = train_locally(options, strategy.world, hang_after_s=hang_after_s, on_message=listen)
        finally:
            if bar:
                bar.close()
        show(outcome if as_json else {**outcome, "strategy": echoed(outcome["strategy"], written)})
    return 0 if outcome["status"] == "finished" else 130


def _run_of(resume: str) -> Path | None:
    """The run folder in which what --resume names lies, if it lies in one."""
    path = Path(resume)
    if not path.is_dir():
        raise CannotTrain(f"--resume {resume}: there is no such folder; give a run's folder or one of its checkpoints")
    inside = [path, path.absolute().parent, path.absolute().parent.parent]
    return next((folder for folder in inside if (folder / "run.json").exists()), None)


def _inherit(options: TrainOptions, run: Path | None) -> TrainOptions:
    from shoal.training.record.run import RUN, RunBroken, read_json

    folder = options.folder
    if folder is not None and (run is None or Path(folder).resolve() != run.resolve()):
        require_free(Path(folder))
    if run is None:
        return options
    before = read_json(run / RUN).get("arguments") or {}
    if not isinstance(before, dict):
        raise RunBroken(f"{run / RUN} is not the record of a run: its arguments are {before!r}")
    own: dict[str, Any] = {}
    for name, kind in INHERITED.items():
        value = before.get(name)
        if getattr(options, name) != DEFAULTS[name] or value is None:
            continue
        if type(value) is not kind:
            expected = EXPECTED[kind]
            raise RunBroken(
                f"{run / RUN} has the {name} {value!r}, but {expected} was expected; "
                f"repair it, or give --{OPTION.get(name, name.replace('_', '-'))}"
            )
        own[name] = value
    return replace(options, folder=folder or str(run), **own)


def _as_one_rank(options: TrainOptions, world: int, *, hang_after_s: float, as_json: bool) -> NoReturn:
    from shoal.launch.channel import standalone_channel
    from shoal.training.check import check
    from shoal.training.loop import train

    if options.emulate is not None:
        require_emulation(options.emulate, world, options.backend)
    require_hindrances(options, world)
    with emitter(summary, as_json=as_json) as show:
        # The ranks look for the checkpoint, and check the layout, together, once all have joined.
        checked = check(replace(options, resume=None, gate=False), None)
        options = replace(
            options, checkpoint_every=checkpoints_every(options, checked["steps"]),
            flops_per_sample=checked["flops_per_sample"],
        )  # fmt: skip
        channel = standalone_channel(on_message=plain_lines(), hang_after_s=hang_after_s)
        try:
            outcome = train(options, channel)
            status = 0 if outcome["status"] == "finished" else 130
            if channel.rank == 0:
                show(outcome)
        except Exception as error:
            status = 1
            _print_failure(channel.rank, error)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # Gloo's threads and the watch may hang or abort the interpreter's own way out; all is done by now.
        os._exit(status)


def _print_failure(rank: int, error: Exception) -> None:
    """Prints why this rank failed: nothing if another rank is the cause or has printed the same error."""
    from shoal.launch.failure import from_exception
    from shoal.launch.join import current
    from shoal.launch.rank import describe

    failure, place = from_exception(rank, describe(error)), current()
    if failure.is_echo:
        print(f"shoal: rank {rank} is exiting because another rank failed", file=sys.stderr)
        return
    if failure.error.for_user and place is not None:
        digest = hashlib.sha256(str(error).encode()).hexdigest()
        with contextlib.suppress(RuntimeError):  # The rank that held the store may have exited.
            if not place.store.claim(f"printed/{digest}", str(rank)):
                return
    if not failure.error.for_user:
        print(failure.error.traceback_text, file=sys.stderr)
    print(f"shoal: {failure.error}", file=sys.stderr)

"""What `shoal train` does besides printing: what is refused before ranks start, and training as a launcher's rank."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from shoal.api.known import require_known
from shoal.comm.calibration import read_calibration
from shoal.parallel.runnable import require_runnable
from shoal.strategy import Strategy, ensemble, parse, require_legal
from shoal.training.local import Listener, checkpoints_every, require_emulation, require_hindrances, train_locally
from shoal.training.options import TrainOptions
from shoal.training.resumed import CannotTrain, can_go_on, inherited, job_of, require_free, require_go_on, run_of

__all__ = ["TrainOptions", "as_one_rank", "is_launched", "job_of", "ready_to_train", "train_locally"]


def is_launched() -> bool:
    """Whether a launcher has started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def ready_to_train(options: TrainOptions, *, ranks: int | None = None) -> tuple[TrainOptions, Strategy]:
    """The options with what a resumed run has of its own, and their strategy. `ranks`: how many there must be.

    Raises:
        CannotTrain: Something of it cannot be trained; no rank was started.
    """
    if options.go_on:
        require_go_on(options)
    elif options.resume is not None:
        options = inherited(options, run_of(options.resume))
    elif options.folder is not None:
        require_free(Path(options.folder))
    strategy = parse("serial" if options.strategy is None else options.strategy)
    launched = is_launched()
    if launched and not os.environ["WORLD_SIZE"].isdecimal():
        raise CannotTrain(f"WORLD_SIZE is {os.environ['WORLD_SIZE']!r}: expected the number of ranks")
    world = int(os.environ["WORLD_SIZE"]) if launched else ranks
    if ranks is not None and world != ranks:
        raise CannotTrain(f"--ranks {ranks}: the launcher has started {world} of them; leave --ranks out")
    require_legal(strategy, world=world)
    require_runnable(strategy)
    if launched and strategy.term(ensemble) is not None:
        raise CannotTrain(
            f"{strategy}: shoal train starts the members of an ensemble by itself, on one host; across hosts start "
            "each by its own command, with what is inside the ensemble as --strategy and another --seed"
        )
    require_known(options.job, options.size)
    read_calibration()  # One that cannot be used is refused here, not by every rank.
    options = replace(options, strategy=str(strategy))
    if options.go_on and not launched and can_go_on(Path(options.folder or "")):
        options = replace(options, resume=options.folder)
    return options, strategy


def as_one_rank(
    options: TrainOptions,
    world: int,
    *,
    hang_after_s: float,
    on_message: Listener,
    show: Callable[[dict[str, Any]], None],
) -> NoReturn:
    """Trains as a rank that a launcher has started, and ends the process. `show` is given rank 0's outcome."""
    from shoal.launch.channel import standalone_channel
    from shoal.training.check import check
    from shoal.training.loop import train

    if options.emulate is not None:
        require_emulation(options.emulate, world, options.backend)
    require_hindrances(options, world)
    # The ranks look for the checkpoint, and check the layout, together, once all have joined.
    checked = check(replace(options, resume=None, gate=False), None)
    options = replace(
        options,
        checkpoint_every=checkpoints_every(options, checked["steps"]),
        flops_per_sample=checked["flops_per_sample"],
    )
    channel = standalone_channel(on_message=on_message, hang_after_s=hang_after_s)
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

"""`shoal train`: everything is checked before ranks start, then they run and their progress is shown live.

Started by torchrun (or any launcher that sets RANK and WORLD_SIZE) it becomes one rank of the job instead.
Elsewhere this process imports no torch: also the check is done by a fork of the server that has it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

INHERITED = ("strategy", "size", "steps", "global_batch", "seed", "checkpoint_every")
"""What a resumed run takes from the run it goes on with, where the command line does not say."""


class CannotTrain(ValueError):
    """A command that cannot be carried out as it stands."""


def train_command(
    job: str, strategy_text: str | None, *, ranks: int | None, hang_after: float, as_json: bool, **given: Any
) -> int:
    """`given`: the other options, by the names that `shoal.train.loop` knows them by."""
    from shoal.cli.main import only_json
    from shoal.parallel.runnable import require_runnable
    from shoal.strategy import parse, require_legal

    arguments: dict[str, Any] = {"job": job, "strategy": strategy_text, **given}
    if given["resume"] is not None:
        arguments = _inherit(arguments, _run_of(given["resume"]))
    elif given["folder"] is not None:
        _require_free(Path(given["folder"]))
    strategy = parse("serial" if arguments["strategy"] is None else arguments["strategy"])
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if launched and not os.environ["WORLD_SIZE"].isdecimal():
        raise CannotTrain(f"WORLD_SIZE is {os.environ['WORLD_SIZE']!r}: expected the number of ranks")
    world = int(os.environ["WORLD_SIZE"]) if launched else ranks
    if ranks is not None and world != ranks:
        raise CannotTrain(f"--ranks {ranks}: the launcher has started {world} of them; leave --ranks out")
    require_legal(strategy, world=world)
    require_runnable(strategy)
    require_known(job, given["size"])
    if given["backend"] not in (None, "gloo", "nccl"):
        raise CannotTrain(f"--backend {given['backend']}: expected gloo or nccl")
    arguments["strategy"] = str(strategy)
    if launched:
        _as_one_rank(arguments, hang_after=hang_after, as_json=as_json)
    with only_json() if as_json else contextlib.nullcontext(_summary) as show:
        bar = sys.stderr.isatty() and not as_json
        outcome = _on_local_ranks(arguments, strategy.world, hang_after=hang_after, bar=bar)
        show(outcome)
    return 0 if outcome["status"] == "finished" else 130


def require_known(job: str, size: str | None) -> None:
    """Refuses a name that is none of a built-in job, without loading anything."""
    from shoal.job import names

    if not names.is_file(job):
        chosen = names.parse_name(job, size=size)
        if size is not None and names.parse_name(chosen.task, size=size).size != chosen.size:
            raise CannotTrain(f"--size {size}: the job {job!r} is of size {chosen.size}; keep one of the two")


def _run_of(resume: str) -> Path | None:
    """The run folder in which what --resume names lies, if it lies in one."""
    path = Path(resume)
    if not path.is_dir():
        raise CannotTrain(
            f"--resume {resume}: there is no such folder; give a run's folder or one of its checkpoints"
        )
    inside = [path, path.absolute().parent, path.absolute().parent.parent]
    return next((folder for folder in inside if (folder / "run.json").exists()), None)


def _inherit(arguments: dict[str, Any], run: Path | None) -> dict[str, Any]:
    from shoal.train.record.run import RUN, read_json

    folder = arguments["folder"]
    if folder is not None and (run is None or Path(folder).resolve() != run.resolve()):
        _require_free(Path(folder))
    if run is None:
        return arguments
    before = read_json(run / RUN).get("arguments") or {}
    own = {name: before.get(name) for name in INHERITED if arguments[name] is None}
    return {**arguments, **own, "folder": folder or str(run)}


def _require_free(folder: Path) -> None:
    if (folder / "run.json").exists():
        raise CannotTrain(
            f"--folder {folder} holds a run already; resume it (--resume {folder}), or give another folder"
        )


def _default_checkpoints(arguments: dict[str, Any], steps: int) -> None:
    if arguments["checkpoint_every"] is None:
        arguments["checkpoint_every"] = max(1, steps // 4)


def _as_one_rank(arguments: dict[str, Any], *, hang_after: float, as_json: bool) -> NoReturn:
    from shoal.cli.main import only_json
    from shoal.train.launch.channel import standalone_channel
    from shoal.train.loop import check_run, train_run

    with only_json() if as_json else contextlib.nullcontext(_summary) as show:
        # The ranks look for the checkpoint together, once they have met.
        checked = check_run({**arguments, "resume": None}, None)
        _default_checkpoints(arguments, checked["steps"])
        channel = standalone_channel(on_message=_plain_lines(), hang_after_s=hang_after)
        try:
            outcome = train_run(arguments, channel)
            status = 0 if outcome["status"] == "finished" else 130
            if channel.rank == 0:
                show(outcome)
        except Exception as error:
            status = 1
            _tell(channel.rank, error)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # Gloo's threads and the watch may hang or abort the interpreter's own way out; all is done by now.
        os._exit(status)


def _tell(rank: int, error: Exception) -> None:
    """Prints why this rank failed: not if another one is the cause, nor what another one has said already."""
    from shoal.train.launch.failure import from_exception
    from shoal.train.launch.join import current
    from shoal.train.launch.rank import describe

    failure, place = from_exception(rank, describe(error)), current()
    if failure.is_echo:
        print(f"shoal: rank {rank} ends: another rank has gone", file=sys.stderr)
        return
    if failure.error.for_user and place is not None:
        digest = hashlib.sha256(str(error).encode()).hexdigest()
        with contextlib.suppress(RuntimeError):  # The store may be gone with the rank that held it.
            if place.store.add(f"told/{digest}", 1) > 1:
                return
    if not failure.error.for_user:
        print(failure.error.traceback_text, file=sys.stderr)
    print(f"shoal: {failure.error}", file=sys.stderr)


def _on_local_ranks(arguments: dict[str, Any], world: int, *, hang_after: float, bar: bool) -> dict[str, Any]:
    from shoal.train.launch import run_ranks
    from shoal.train.launch.failure import RankFailed
    from shoal.train.record.recorder import new_folder

    plain = _plain_lines()
    try:
        listen = _ending_at_once(plain)
        checked = run_ranks("shoal.train.loop:check_run", arguments, ranks=1, on_message=listen)[0]
    except RankFailed as error:
        if error.for_user:
            raise CannotTrain(str(error)) from error
        raise
    _default_checkpoints(arguments, checked["steps"])
    arguments |= {"resume": checked["resume"], "checked": True}
    try:
        if arguments["folder"] is None:
            arguments["folder"] = str(new_folder(Path("runs"), checked["job"]))
        Path(arguments["folder"]).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = arguments["folder"] or "runs"
        raise CannotTrain(f"{where} cannot be the run's folder: {error.strerror}; give another --folder") from error
    shown = LiveProgress(checked["steps"], arguments["strategy"]) if bar else None
    show = shown.message if shown else plain
    try:
        outcomes = run_ranks(
            "shoal.train.loop:train_run", arguments, ranks=world, hang_after_s=hang_after,
            on_message=lambda rank, message: show(message),
        )  # fmt: skip
    except RankFailed as error:
        _record_failure(Path(arguments["folder"]), error)
        raise
    finally:
        if shown:
            shown.close()
    return {**outcomes[0], "memory_bytes": max(each["memory_bytes"] for each in outcomes)}


def _ending_at_once(listen: Callable[[dict[str, Any]], None]) -> Callable[[int, dict[str, Any]], None]:
    """While nothing is trained yet there is nothing to bring to an end: Ctrl-C is final."""

    def message(rank: int, content: dict[str, Any]) -> None:
        if content["event"] == "stopping":
            raise KeyboardInterrupt
        listen(content)

    return message


def _record_failure(folder: Path, error: Any) -> None:
    """Writes the cause down: rank 0 may have known only its echo, or may be the one that was killed."""
    from shoal.train.record.run import RUN, RunBroken, read_json, write_json

    with contextlib.suppress(RunBroken, OSError):
        facts = read_json(folder / RUN)
        if facts["status"] in ("running", "failed"):
            write_json(folder / RUN, {**facts, "status": "failed", "reason": str(error)})


def _plain_lines() -> Any:
    """Progress for a log: about one line in five seconds, and everything that is not a step."""
    import time

    last = [0.0]

    def line(message: dict[str, Any]) -> None:
        event = message["event"]
        if event == "step":
            if time.monotonic() - last[0] > 5 or message["step"] == message["steps"]:
                last[0] = time.monotonic()
                print(
                    f"step {message['step']}/{message['steps']}  loss {message['loss']:.4f}"
                    f"  {1000 * message['step_s']:.0f} ms  {message['samples_per_s']:.0f} samples/s"
                    f"  {message['memory_bytes'] / 2**20:.0f} MiB",
                    file=sys.stderr,
                    flush=True,
                )
        elif event in _WORDS:
            print(_WORDS[event](message), file=sys.stderr, flush=True)

    return line


def _numbers(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in values.items())


_WORDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "metrics": lambda m: f"validation at step {m['step']}: {_numbers(m['metrics'])}",
    "checkpoint": lambda m: f"checkpoint {m['path']}",
    "warning": lambda m: f"warning: {m['text']}",
    "stopping": lambda m: "stopping after this step and writing a checkpoint (Ctrl-C again to end at once)",
}


class LiveProgress:
    """The bar on a terminal: loss, step time, throughput, memory, time left."""

    def __init__(self, steps: int, strategy: str) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[ms]} ms  {task.fields[rate]}/s"),
            TextColumn("{task.fields[memory]}  left"), TimeRemainingColumn(),
        )  # fmt: skip
        self.task = self.progress.add_task(strategy, total=steps, loss="-", ms="-", rate="-", memory="-")
        self.progress.start()

    def message(self, message: dict[str, Any]) -> None:
        event = message["event"]
        if event == "step":
            self.progress.update(
                self.task, completed=message["step"], loss=f"{message['loss']:.4f}",
                ms=f"{1000 * message['step_s']:.0f}", rate=f"{message['samples_per_s']:.0f}",
                memory=f"{message['memory_bytes'] / 2**20:.0f} MiB",
            )  # fmt: skip
        elif event in _WORDS:
            text = _WORDS[event](message)
            self.progress.console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.progress.stop()


def _summary(outcome: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    rows = {
        "status": f"{outcome['status']} after {outcome['step']} steps",
        "strategy": f"{outcome['strategy']}  ({outcome['world']} rank{'s' if outcome['world'] != 1 else ''})",
    }
    if outcome["loss"] is not None:
        rows["loss"] = f"{outcome['loss']:.4f}"
    rows |= {f"validation {name}": f"{value:.4f}" for name, value in outcome["metrics"].items()}
    if outcome["time_to_target_s"] is not None:
        seconds, steps = outcome["time_to_target_s"], outcome["steps_to_target"]
        rows["target"] = f"reached after {seconds:.1f} s of training, {steps} steps"
    if outcome["step_s"] is not None:
        rows["step"] = f"{1000 * outcome['step_s']:.0f} ms"
    rows["sent in a step"] = f"{sum(row['bytes'] for row in outcome['ledger']) / 1e6:.2f} MB by each rank"
    rows["peak memory"] = f"{outcome['memory_bytes'] / 2**20:.0f} MiB a rank"
    rows["run"] = outcome["folder"]
    if outcome["status"] == "stopped" and outcome["saved_step"] is not None:
        rows["go on with"] = f"--resume {outcome['folder']}"
    console, width = Console(highlight=False), max(map(len, rows)) + 2
    for name, value in rows.items():
        console.print(Text.assemble((name.ljust(width), "dim"), value), soft_wrap=True)

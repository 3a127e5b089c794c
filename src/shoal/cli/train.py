"""`shoal train`: everything is checked before a process starts, then ranks run and their progress is shown live.

Started by torchrun (or any launcher that sets RANK and WORLD_SIZE) it becomes one rank of the job instead.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def train_command(
    job_spec: str,
    text: str,
    *,
    size: str | None,
    ranks: int | None,
    steps: int | None,
    batch: int | None,
    seed: int | None,
    folder: str | None,
    resume: str | None,
    checkpoint_every: int | None,
    trace: bool,
    full: bool,
    hang_after: float,
    backend: str | None,
    as_json: bool,
) -> int:
    from shoal.parallel.runnable import require_runnable
    from shoal.strategy import parse, require_legal

    started_by_launcher = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    world = int(os.environ["WORLD_SIZE"]) if started_by_launcher else ranks
    strategy = parse(text)
    require_legal(strategy, world=world)
    require_runnable(strategy)
    if not started_by_launcher:
        from shoal.train.launch import warm_up

        warm_up()
    arguments: dict[str, Any] = {
        "job": job_spec, "size": size, "steps": steps, "global_batch": batch, "seed": seed, "strategy": str(strategy),
        "trace": trace, "stop_at_target": not full, "backend": backend,
    }  # fmt: skip
    from shoal.job import infer_facts
    from shoal.train.setup import job_from

    job = job_from(arguments)
    require_legal(strategy, world=world, facts=infer_facts(job))
    arguments["resume"], kept_folder = _resume_point(resume)
    arguments["folder"] = str(_folder(folder, kept_folder, job.name, started_by_launcher))
    arguments["checkpoint_every"] = max(1, job.steps // 4) if checkpoint_every is None else checkpoint_every
    if started_by_launcher:
        return _as_one_rank(arguments, hang_after)
    return _on_local_ranks(arguments, strategy, hang_after=hang_after, as_json=as_json, steps=job.steps)


def _resume_point(resume: str | None) -> tuple[str | None, Path | None]:
    """The checkpoint to go on from, and the run folder it lies in (if it lies in one)."""
    if resume is None:
        return None, None
    from shoal.train.restore import find_intact
    from shoal.train.saved import open_checkpoint

    path = Path(resume)
    if not path.exists():
        raise FileNotFoundError(f"--resume {resume}: there is no such folder; give a run's folder or one of its checkpoints")
    if (path / "checkpoint.json").exists() or path.name.startswith("step-"):
        open_checkpoint(path)
        return str(path), path.parent.parent if path.parent.name == "checkpoints" else None
    found = find_intact(path / "checkpoints", warn=lambda line: print(f"shoal: {line}", file=sys.stderr))
    if found is None:
        raise ValueError(f"--resume {resume}: no intact checkpoint in {path / 'checkpoints'}; start anew without --resume")
    return str(found.path), path


def _folder(asked: str | None, kept: Path | None, job_name: str, shared: bool) -> Path:
    if asked is not None:
        return Path(asked)
    if kept is not None:
        return kept
    if shared:
        # Every rank must come to the same name by itself.
        safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in job_name)
        return Path("runs") / f"{safe}-{os.environ.get('TORCHELASTIC_RUN_ID', 'launched')}"
    from shoal.train.record import new_folder

    return new_folder(Path("runs"), job_name)


def _as_one_rank(arguments: dict[str, Any], hang_after: float) -> int:
    from shoal.train.channel import standalone_channel
    from shoal.train.loop import train_run

    channel = standalone_channel(on_message=lambda rank, message: _plain_lines()(message), hang_after_s=hang_after)
    outcome = train_run(arguments, channel)
    return 0 if outcome["status"] == "finished" else 130


def _on_local_ranks(arguments: dict[str, Any], strategy: Any, *, hang_after: float, as_json: bool, steps: int) -> int:
    from shoal.train.launch import run_ranks

    shown = LiveProgress(steps, str(strategy)) if sys.stderr.isatty() and not as_json else None
    listen = shown.message if shown else _plain_lines()
    try:
        outcomes = run_ranks(
            "shoal.train.loop:train_run", arguments, ranks=strategy.world, hang_after_s=hang_after,
            on_message=lambda rank, message: listen(message),
        )  # fmt: skip
    finally:
        if shown:
            shown.close()
    outcome = outcomes[0]
    outcome["memory_bytes"] = max(each["memory_bytes"] for each in outcomes)
    if as_json:
        print(json.dumps(outcome))
    else:
        _summary(outcome, strategy)
    return 0 if outcome["status"] == "finished" else 130


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
                    f"step {message['step']}/{message['steps']}  loss {message['loss']:.4f}  {1000 * message['step_s']:.0f} ms"
                    f"  {message['samples_per_s']:.0f} samples/s  {message['memory_bytes'] / 2**20:.0f} MiB",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
        elif event in _WORDS:
            print(_WORDS[event](message), file=sys.stderr, flush=True)

    return line


_WORDS = {
    "metrics": lambda m: "validation at step {}: {}".format(m["step"], "  ".join(f"{k} {v:.4f}" for k, v in m["metrics"].items())),
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
            TextColumn("loss {task.fields[loss]}  {task.fields[ms]} ms  {task.fields[rate]}/s  {task.fields[memory]}"),
            TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        self.task = self.progress.add_task(strategy, total=steps, loss="-", ms="-", rate="-", memory="-")
        self.progress.start()

    def message(self, message: dict[str, Any]) -> None:
        event = message["event"]
        if event == "step":
            self.progress.update(
                self.task, completed=message["step"], loss=f"{message['loss']:.4f}", ms=f"{1000 * message['step_s']:.0f}",
                rate=f"{message['samples_per_s']:.0f}", memory=f"{message['memory_bytes'] / 2**20:.0f} MiB",
            )  # fmt: skip
        elif event in _WORDS:
            self.progress.console.print(_WORDS[event](message), style="dim")

    def close(self) -> None:
        self.progress.stop()


def _summary(outcome: dict[str, Any], strategy: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("status", f"{outcome['status']} after {outcome['step']} steps")
    table.add_row("strategy", f"{strategy}  ({strategy.world} rank{'s' if strategy.world != 1 else ''})")
    if outcome["loss"] is not None:
        table.add_row("loss", f"{outcome['loss']:.4f}")
    for name, value in outcome["metrics"].items():
        table.add_row(f"validation {name}", f"{value:.4f}")
    if outcome["time_to_target_s"] is not None:
        table.add_row("target", f"reached after {outcome['time_to_target_s']:.1f} s of training, {outcome['steps_to_target']} steps")
    if outcome["step_s"] is not None:
        table.add_row("step", f"{1000 * outcome['step_s']:.0f} ms")
    sent = sum(row["bytes"] for row in outcome["ledger"])
    table.add_row("sent in a step", f"{sent / 1e6:.2f} MB by each rank")
    table.add_row("peak memory", f"{outcome['memory_bytes'] / 2**20:.0f} MiB a rank")
    table.add_row("run", outcome["folder"])
    if outcome["status"] == "stopped":
        table.add_row("go on with", f"--resume {outcome['folder']}")
    Console().print(table)

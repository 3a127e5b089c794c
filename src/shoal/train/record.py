"""The recorder: rank 0 writes down what a run does, as it does it (run.py says what lies where).

A record is worth less than the run it is of: when the disk is full, lines wait in memory and are written when there is
room again, and training goes on. A run that resumes forgets what it had recorded beyond the step it resumes from.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import statistics
import time
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal.comm.ledger import Ledger
from shoal.strategy import parse
from shoal.strategy.contract import contract as contract_of
from shoal.train.run import (
    EVENTS,
    LEDGER,
    RUN,
    STEPS,
    TRACE,
    VALIDATION,
    Run,
    RunBroken,
    Status,
    median_step_s,
    parse_line,
    plain,
    read_json,
    read_lines,
    read_run,
    write_json,
)

__all__ = ["Recorder", "Run", "RunBroken", "Tracing", "new_folder", "read_run", "tracing"]

CURVES = {"loss": "train/loss", "lr": "train/lr", "lr_factor": "train/lr_factor", "grad_norm": "train/grad_norm",
          "step_s": "speed/step_s", "samples_per_s": "speed/samples_per_s"}  # fmt: skip
"""What of a step's row goes to TensorBoard, and under which name."""

EVENTS_FLUSH_S = 20.0


def new_folder(root: Path, job_name: str) -> Path:
    """Makes `root/<date>-<job>-<n>`, with the first n that is free."""
    name = re.sub(r"[^\w.]+", "-", Path(job_name).stem if job_name.endswith(".py") else job_name).strip("-.")
    start = f"{datetime.now():%Y-%m-%d}-{name[:60] or 'job'}"
    root.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = root / f"{start}-{number}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


class Recorder:
    """Writes one run's folder."""

    def __init__(
        self,
        folder: Path,
        *,
        job_name: str,
        strategy: str,
        world: int,
        seed: int,
        arguments: Mapping[str, Any],
        contract: str | None = None,
        resumed_at: int | None = None,
    ) -> None:
        """`resumed_at`: the step whose checkpoint the run goes on from; what the folder has beyond it is cut."""
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        known = (self.folder / RUN).exists()
        if known and resumed_at is None:
            raise RunBroken(f"{self.folder} holds a run already; resume it, or give another folder")
        if resumed_at is not None:
            for name in (STEPS, VALIDATION):
                _cut(self.folder / name, resumed_at)
        before = read_json(self.folder / RUN) if known else {}
        now = _now()
        self._facts: dict[str, Any] = {
            "status": "running",
            "reason": None,
            "job": job_name,
            "strategy": strategy,
            "contract": contract if contract is not None else str(contract_of(parse(strategy))),
            "world": world,
            "seed": seed,
            "arguments": plain(arguments),
            "environment": environment(),
            "started": before.get("started", now),
            "resumed": [*before.get("resumed", []), {"step": resumed_at, "at": now}]
            if resumed_at is not None
            else [],
            "ended": None,
            "summary": None,
        }
        write_json(self.folder / RUN, self._facts)
        self._rows = read_lines(self.folder / STEPS)
        self._steps = _Lines(self.folder / STEPS)
        self._validation = _Lines(self.folder / VALIDATION)
        self._events = _Events(self.folder / EVENTS, resumed_at=resumed_at)
        self._metrics: Mapping[str, float] = {}
        self._steady, self._total, self._counted_steps = Ledger(), Ledger(), 0
        self._closed = False

    def step(self, row: Mapping[str, Any], ledger: Ledger | None = None) -> None:
        """One step: `row` has "step", counted from 1, and whatever was measured; `ledger` is what it sent."""
        entry = plain(row)
        self._steps.add(entry)
        # Kept for the summary: a few numbers of each step.
        self._rows.append(
            {k: entry.get(k) for k in ("step", "loss", "step_s", "samples_per_s", "memory_bytes")}
        )
        self._events.add(int(row["step"]), {CURVES[key]: row.get(key) for key in CURVES})
        if ledger is not None:
            self._steady, self._total, self._counted_steps = (
                ledger,
                self._total + ledger,
                self._counted_steps + 1,
            )

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One evaluation, after `step` steps."""
        self._metrics = dict(metrics)
        self._validation.add({"step": step, "metrics": plain(metrics)})
        self._events.add(step, {f"validation/{name}": value for name, value in metrics.items()})

    def close(self, status: Status, outcome: Mapping[str, Any] | None = None) -> None:
        """The end: a summary of the rows, and over it whatever `outcome` knows better ("reason", "ledger", ...)."""
        if self._closed:
            return
        self._closed = True
        known = dict(outcome or {})
        steady = known.pop("ledger", None)
        ledgers = {
            "steady_step": steady if steady is not None else self._steady.to_json(),
            "run": self._total.to_json(),
            "run_steps": self._counted_steps,
            "predicted": known.pop("predicted", None),
        }
        reason = known.pop("reason", None)
        known.pop("status", None)
        self._facts |= {
            "status": status,
            "reason": reason,
            "ended": _now(),
            "summary": self._summary() | known,
        }
        for what in (self._steps.close, self._validation.close, self._events.close,
                     lambda: write_json(self.folder / LEDGER, ledgers),
                     lambda: write_json(self.folder / RUN, self._facts)):  # fmt: skip
            try:
                what()
            except OSError as error:
                warnings.warn(f"the record in {self.folder} is not complete: {error}", stacklevel=2)

    def _summary(self) -> dict[str, Any]:
        rows = self._rows
        times = [row["step_s"] for row in rows[1:] or rows if row.get("step_s") is not None]
        rates = [row["samples_per_s"] for row in rows[1:] or rows if row.get("samples_per_s") is not None]
        memory = [row["memory_bytes"] for row in rows if row.get("memory_bytes") is not None]
        return {
            "step": rows[-1]["step"] if rows else 0,
            "loss": rows[-1].get("loss") if rows else None,
            "metrics": self._metrics,
            "step_s": median_step_s(rows),
            "mean_step_s": statistics.fmean(times) if times else None,
            "samples_per_s": statistics.median(rates) if rates else None,
            "memory_bytes": max(memory, default=None),
        }


class _Lines:
    """A file of JSON lines that a full disk does not tear: what cannot be written now is written with the next line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._good_bytes = self._file.seek(0, os.SEEK_END)
        self._waiting: list[bytes] = []
        self._warned = False

    def add(self, row: Mapping[str, Any]) -> None:
        self._waiting.append(json.dumps(row, allow_nan=False).encode() + b"\n")
        try:
            self._write()
        except OSError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{self.path} cannot be written now ({error.strerror or error}); its lines wait",
                    stacklevel=4,
                )

    def _write(self) -> None:
        data = b"".join(self._waiting)
        try:
            done = 0
            while done < len(data):
                done += self._file.write(data[done:])
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(self._good_bytes)
            raise
        self._good_bytes += len(data)
        self._waiting.clear()

    def close(self) -> None:
        with self._file:
            self._write()


class _Events:
    """TensorBoard's event file, written in this thread: a writer of its own would block the run when the disk is full."""

    def __init__(self, folder: Path, *, resumed_at: int | None) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2
        from tensorboardX.summary import scalar

        self._event, self._scalar = event_pb2.Event, scalar
        self._writer: Any = None
        self._flushed = time.monotonic()
        with self._giving_up():
            folder.mkdir(exist_ok=True)
            self._writer = EventsWriter(str(folder / "events"), f".{os.getpid()}")
            if resumed_at is not None:
                # TensorBoard drops what earlier files of this folder say of these steps.
                start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                self._writer.write_event(
                    self._event(wall_time=time.time(), step=resumed_at + 1, session_log=start)
                )
            self._writer.flush()

    @contextlib.contextmanager
    def _giving_up(self) -> Any:
        try:
            yield
        except OSError as error:
            self._writer = None
            warnings.warn(f"the TensorBoard events are not complete: {error.strerror or error}", stacklevel=4)

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in values.items() if plain(value) is not None}
        if self._writer is None or not numbers:
            return
        with self._giving_up():
            for name, value in numbers.items():
                summary = self._scalar(name, float(value))
                self._writer.write_event(self._event(wall_time=time.time(), step=step, summary=summary))
            if time.monotonic() - self._flushed > EVENTS_FLUSH_S:
                self._writer.flush()
                self._flushed = time.monotonic()

    def close(self) -> None:
        if self._writer is not None:
            with self._giving_up():
                self._writer.close()


def _cut(path: Path, last_step: int) -> None:
    """Keeps the lines up to a step, and of those the ones that can be read."""
    if not path.exists():
        return
    fresh = path.with_name(path.name + ".new")
    with open(path, "rb") as old, open(fresh, "wb") as new:
        for line in old:
            row = parse_line(line)
            if row is not None and line.endswith(b"\n") and row.get("step", last_step + 1) <= last_step:
                new.write(line)
        new.flush()
        os.fsync(new.fileno())
    os.replace(fresh, path)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def environment() -> dict[str, Any]:
    """What a run's speed and numbers depend on beside its job and strategy. Not who ran it, nor where."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerators": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
    }


class Tracing:
    """Traces a few steps with PyTorch's profiler. `step()` after each step; the file is there when they are done."""

    def __init__(self, path: Path, *, first_step: int, steps: int) -> None:
        if first_step < 1 or steps < 1:
            raise ValueError(f"first_step is {first_step} and steps is {steps}, but both are counted from 1")
        self.path = path
        self._begin, self._end = first_step - 1, first_step - 1 + steps
        self._count = 0
        self._profile: Any = None
        self._turn()

    def _turn(self) -> None:
        from torch.profiler import profile

        if self._count == self._begin:
            self._profile = profile(acc_events=True)
            self._profile.start()
        elif self._count == self._end:
            self.close()

    def step(self) -> None:
        """A step is done."""
        self._count += 1
        self._turn()

    def close(self) -> None:
        """Writes what was traced so far, if it was not yet written."""
        if self._profile is not None:
            done, self._profile = self._profile, None
            done.stop()
            fresh = self.path.with_name("new-" + self.path.name)
            done.export_chrome_trace(str(fresh))
            os.replace(fresh, self.path)

    def __enter__(self) -> Tracing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def tracing(folder: Path, first_step: int = 2, steps: int = 3) -> Tracing:
    """Traces `steps` steps into the folder's trace.json, from the `first_step`-th on (the first also warms up)."""
    return Tracing(Path(folder) / TRACE, first_step=first_step, steps=steps)

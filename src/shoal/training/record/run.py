"""A run as it lies on disk, and what can be read back from it, also from one that crashed.

    run.json           status, strategy, contract, job, settings, environment, seed, times, then a summary
    steps.jsonl        one JSON object a step
    validation.jsonl   one JSON object an evaluation
    ledger.json        what crossed the wire: in a steady step, in all steps recorded, and as predicted
    events/            the same curves for TensorBoard
    trace.json         a few steps, for chrome://tracing or Perfetto; on request
    checkpoints/
    .lock              held by every process of the run (lock.py)

A Run has the fields of an Estimate, so that a measurement can be compared with its prediction. Reading it needs
no torch.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from shoal.checkpoint.regular import discard, read_regular
from shoal.comm.ledger import Ledger
from shoal.common.printed import PrintedTable
from shoal.estimate.estimate import Estimate

Status = Literal["running", "finished", "stopped", "failed"]

RUN = "run.json"
STEPS = "steps.jsonl"
VALIDATION = "validation.jsonl"
LEDGER = "ledger.json"
EVENTS = "events"
TRACE = "trace.json"
MOST_BYTES = 1 << 31


class RunBroken(ValueError):
    """A folder that is no run, or one whose files cannot be read."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Run(PrintedTable, Estimate):
    """What was measured. `status` "running" is also what a killed run looks like."""

    folder: Path
    status: Status
    reason: str | None = None
    job: str
    contract: str
    seed: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    started: str
    ended: str | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Written at the end: steps, loss, metrics, step times, throughput, memory, target."""
    steps: tuple[Mapping[str, Any], ...] = ()
    validation: tuple[Mapping[str, Any], ...] = ()
    ledger_of_run: Ledger = field(default_factory=Ledger)
    predicted_ledger: Ledger | None = None
    failure: Mapping[str, Any] = field(default_factory=dict)
    """Of a run that failed: which rank, and its stack."""

    @property
    def sent_bytes(self) -> float:
        """What a rank sent in a step, on the average of a period where islands exchange now and then."""
        return float(self.summary.get("sent_bytes", self.ledger.bytes))

    @property
    def predicted_bytes(self) -> float | None:
        """Likewise what it should send; None where that was not predicted."""
        found = self.summary.get("predicted_bytes")
        return None if self.predicted_ledger is None else float(self.predicted_ledger.bytes if found is None else found)

    @property
    def losses(self) -> list[float]:
        """The loss of every step; NaN where it was not finite."""
        return [math.nan if row.get("loss") is None else float(row["loss"]) for row in self.steps]

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        loss = self.summary.get("loss")
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in (self.summary.get("metrics") or {}).items())
        rows = [
            ["status", self.status if self.reason is None else f"{self.status}: {self.reason}"],
            ["steps", str(len(self.steps) or (self.summary.get("step") or 0))],
            *([["loss", f"{loss:.4g}"]] if loss is not None else []),
            *([["validation", metrics]] if metrics else []),
            *([["step", f"{1000 * self.step_s:.3g} ms"]] if self.step_s is not None else []),
            ["folder", str(self.folder)],
        ]
        return f"{self.job} under {self.strategy} on {self.world} ranks", ["", ""], rows

    def model(self, *, step: int | None = None, job: str | None = None, ema: bool = False) -> Any:
        """The trained model: a plain `nn.Module` with full weights, in evaluation mode.

        Args:
            step: The checkpoint of this step. None: the newest intact one.
            job: The job's file, if it was moved since the run.
            ema: Whether to take the moving average of the weights (`Job.ema`).

        Example:
            logits = read_run("runs/first").model()(tokens)
        """
        from shoal.exporting.trained import checkpoint_of, options_of, trained_model

        return trained_model(checkpoint_of(self.folder, step, ema=ema), options_of(self.arguments, job))


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


def read_run(folder: Path) -> Run:
    """The run in a folder. A crash may tear the last line of a list; anything else unreadable is refused."""
    folder = Path(folder)
    facts = read_json(folder / RUN)
    steps, validation = read_lines(folder / STEPS), read_lines(folder / VALIDATION)
    ledgers = read_json(folder / LEDGER) if (folder / LEDGER).exists() else {}
    try:
        summary = facts.get("summary") or {}
        memory = [row["memory_bytes"] for row in steps if row.get("memory_bytes") is not None]
        predicted = ledgers.get("predicted")
        return Run(
            strategy=facts["strategy"],
            world=facts["world"],
            step_s=summary.get("step_s", median_step_s(steps)),
            step_split=summary.get("step_split") or {},
            memory_bytes=summary.get("memory_bytes", max(memory, default=None)),
            memory_split=summary.get("memory_split") or {},
            ledger=Ledger.from_json(ledgers.get("steady_step") or ()),
            steps_to_target=summary.get("steps_to_target"),
            time_to_target_s=summary.get("time_to_target_s"),
            folder=folder,
            status=facts["status"],
            reason=facts.get("reason"),
            job=facts["job"],
            contract=facts["contract"],
            seed=facts["seed"],
            arguments=facts.get("arguments") or {},
            environment=facts.get("environment") or {},
            started=facts["started"],
            ended=facts.get("ended"),
            summary=summary,
            steps=tuple(steps),
            validation=tuple(validation),
            ledger_of_run=Ledger.from_json(ledgers.get("run") or ()),
            predicted_ledger=None if predicted is None else Ledger.from_json(predicted),
            failure={name: facts[name] for name in ("rank", "stack") if facts.get(name) is not None},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise RunBroken(f"{folder / RUN} is not the record of a run ({error!r})") from error


def median_step_s(steps: list[dict[str, Any]]) -> float | None:
    """The usual step: the first, which also warms up, is left out where there are others."""
    times = sorted(row["step_s"] for row in (steps[1:] or steps) if row.get("step_s") is not None)
    if not times:
        return None
    return float(times[len(times) // 2] + times[(len(times) - 1) // 2]) / 2


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(path, most=MOST_BYTES))
    except FileNotFoundError as error:
        raise RunBroken(f"{path} does not exist: {path.parent} is not the folder of a run") from error
    except (OSError, ValueError, RecursionError) as error:
        raise RunBroken(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(found, dict):
        raise RunBroken(f"{path} should hold a JSON object")
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, without a torn last one. A file that does not exist has none."""
    rows = []
    try:
        lines = read_regular(path, most=MOST_BYTES).split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunBroken(f"{path} cannot be read: {error.strerror or error}") from error
    for number, line in enumerate(lines[:-1], start=1):
        row = parse_line(line)
        if row is None:
            raise RunBroken(f"{path}, line {number}: not a JSON object: {line[:60]!r}")
        rows.append(row)
    return rows


def parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def plain(value: Any) -> Any:
    """The value as strict JSON: null for NaN and infinity, its text for what JSON has no form for."""
    if isinstance(value, bool) or value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    try:
        return plain(value.item())  # numbers of numpy and torch
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return str(value)


def write_json(path: Path, value: Any) -> None:
    """Replaces a file in one go: a reader sees the old one or the new one, complete."""
    fresh = path.with_name(path.name + ".new")
    try:
        discard(fresh)
        with open(fresh, "x", encoding="utf-8") as file:
            json.dump(plain(value), file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise

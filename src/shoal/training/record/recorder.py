"""The recorder: rank 0 writes down what a run does, as it does it (run.py says what lies where).

A record is worth less than the run it is of: when the disk is full, training goes on, lines wait in memory
and are written when there is room. A run that resumes forgets what it had recorded of later
steps.
"""

from __future__ import annotations

import os
import platform
import statistics
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shoal.comm.calibration import network_here
from shoal.comm.ledger import Ledger
from shoal.strategy import parse
from shoal.strategy.contract import contract as contract_of
from shoal.training.record.events import Events
from shoal.training.record.lines import Lines, cut
from shoal.training.record.loggers import Loggers
from shoal.training.record.run import (
    EVENTS,
    LEDGER,
    RUN,
    STEPS,
    VALIDATION,
    Run,
    RunBroken,
    Status,
    median_step_s,
    new_folder,
    plain,
    read_json,
    read_lines,
    read_run,
    write_json,
)
from shoal.training.record.trace import Tracing, tracing

__all__ = ["Recorder", "Run", "RunBroken", "Tracing", "new_folder", "read_run", "tracing"]

MEDIANS = ("tokens_per_s", "model_flops_per_s", "mfu")
"""Columns that not every run has; the summary has the median of each."""
CURVES = {
    "loss": "training/loss",
    "lr": "training/lr",
    "lr_factor": "training/lr_factor",
    "grad_norm": "training/grad_norm",
    "critical_batch": "training/critical_batch",
    "step_s": "speed/step_s",
    "samples_per_s": "speed/samples_per_s",
    "tokens_per_s": "speed/tokens_per_s",
    "mfu": "speed/mfu",
    "spread": "consistency/spread",
    "staleness": "consistency/staleness",
    "ahead": "consistency/ahead",
    "rounds": "consistency/rounds",
    "saved_bytes": "consistency/saved_bytes",
}
"""What of a step's row goes to TensorBoard, and under which name."""


KEPT = ("step", "loss", "step_s", "samples_per_s", "memory_bytes", *MEDIANS)
"""What of each row is kept for the summary."""


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
        log: str | None = None,
    ) -> None:
        """`resumed_at`: the step whose checkpoint it goes on from; what the folder has beyond it is cut. `log`: loggers
        besides TensorBoard, such as "csv, wandb"."""
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        known = (self.folder / RUN).exists()
        if known and resumed_at is None:
            raise RunBroken(f"{self.folder} holds a run already; resume it, or give another folder")
        if resumed_at is not None:
            for name in (STEPS, VALIDATION):
                cut(self.folder / name, resumed_at)
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
            "resumed": [*_resumes(before), {"step": resumed_at, "at": now}] if resumed_at is not None else [],
            "ended": None,
            "summary": None,
            "loggers": before.get("loggers") if isinstance(before.get("loggers"), dict) else {},
        }
        self._loggers = Loggers(log, self.folder, self._facts, resumed_at=resumed_at)
        self._facts["loggers"] = self._loggers.identities
        write_json(self.folder / RUN, self._facts)
        self._rows = read_lines(self.folder / STEPS)
        self._steps = Lines(self.folder / STEPS)
        self._validation = Lines(self.folder / VALIDATION)
        self._events = Events(self.folder / EVENTS, resumed_at=resumed_at)
        evaluated = read_lines(self.folder / VALIDATION)
        self._metrics: Mapping[str, float] = evaluated[-1].get("metrics", {}) if evaluated else {}
        self._steady, self._total, self._counted_steps = Ledger(), Ledger(), 0
        self._closed = False

    def step(self, row: Mapping[str, Any], ledger: Ledger | None = None) -> None:
        """One step: `row` has "step", counted from 1, and whatever was measured; `ledger` is what it sent."""
        entry = plain(row)
        self._steps.add(entry)
        # Kept for the summary: a few numbers of each step.
        self._rows.append({k: entry.get(k) for k in KEPT})
        values = {CURVES[key]: row.get(key) for key in CURVES}
        self._events.add(int(row["step"]), values)
        self._loggers.add(int(row["step"]), values)
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
        values = {f"validation/{name}": value for name, value in metrics.items()}
        self._events.add(step, values)
        self._loggers.add(step, values)

    def close(self, status: Status, outcome: Mapping[str, Any] | None = None) -> None:
        """The end: a summary of the rows, over it what `outcome` knows better ("reason", "ledger", ...)."""
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
        self._loggers.close(status, self._facts["summary"])
        for what in (
            self._steps.close,
            self._validation.close,
            self._events.close,
            lambda: write_json(self.folder / LEDGER, ledgers),
            lambda: write_json(self.folder / RUN, self._facts),
        ):
            try:
                what()
            except OSError as error:
                warnings.warn(f"the record in {self.folder} is not complete: {error}", stacklevel=2)

    def _summary(self) -> dict[str, Any]:
        rows = self._rows
        times = [row["step_s"] for row in rows[1:] or rows if row.get("step_s") is not None]
        rates = [row["samples_per_s"] for row in rows[1:] or rows if row.get("samples_per_s") is not None]
        memory = [row["memory_bytes"] for row in rows if row.get("memory_bytes") is not None]
        known = {name: [row[name] for row in rows[1:] or rows if row.get(name) is not None] for name in MEDIANS}
        return {
            **{name: statistics.median(values) for name, values in known.items() if values},
            "step": rows[-1]["step"] if rows else 0,
            "loss": rows[-1].get("loss") if rows else None,
            "metrics": self._metrics,
            "step_s": median_step_s(rows),
            "mean_step_s": statistics.fmean(times) if times else None,
            "samples_per_s": statistics.median(rates) if rates else None,
            "memory_bytes": max(memory, default=None),
        }


def _resumes(before: dict[str, Any]) -> list[Any]:
    found = before.get("resumed")
    return found if isinstance(found, list) else []


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def environment() -> dict[str, Any]:
    """What a run's speed and numbers depend on besides its job and strategy. Not the user, nor the place."""
    import torch

    from shoal.launch.join import current

    place = current()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        # Not platform.platform(): that starts a process to ask for the processor.
        "platform": "-".join((platform.system(), platform.release(), platform.machine(), *platform.libc_ver())),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerators": _accelerators(),
        "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
        # Of Gloo's and NCCL's groups; None without ranks, or where the program made the groups itself.
        "collective_timeout_s": (place.timeout_s or None) if place is not None else None,
        "links": asdict(network_here()),
    }


def _accelerators() -> list[str]:
    import torch

    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return []
    module = torch.get_device_module(kind)
    count = torch.accelerator.device_count()
    return [module.get_device_name(n) if hasattr(module, "get_device_name") else kind.type for n in range(count)]

"""Where else the curves of a run are written: CSV files, Weights & Biases, MLflow.

Rank 0 writes, besides the record itself and TensorBoard's events. A logger that fails is left out from then on, with a
warning: a run is worth more than its curves.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from shoal.common.suggest import did_you_mean
from shoal.runtime.options import WrongOption

NEEDS = {"csv": None, "wandb": "wandb", "mlflow": "mlflow"}
"""The loggers, and the module that each needs."""
CLASSES = {"csv": "CsvLogger", "wandb": "WandbLogger", "mlflow": "MlflowLogger"}


class CurveLogger(Protocol):
    """What a logger offers. It is made by `(folder, facts, before=, resumed_at=)`, where `before` is the identity that
    it had in an earlier start of the same run."""

    @property
    def identity(self) -> str | None:
        """By which a resumed run is found again."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step, such as "training/loss"."""

    def close(self, status: str, summary: Mapping[str, Any]) -> None:
        """The end of the run."""


def chosen(text: str | None) -> list[str]:
    """The loggers that an option names, such as "csv, wandb"."""
    return [] if text is None else list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def require_loggers(text: str | None) -> None:
    """Refuses loggers that do not exist or are not installed, before ranks start."""
    for name in chosen(text):
        if name not in NEEDS:
            raise WrongOption(f"--log {name}: no such logger{did_you_mean(name, NEEDS)}; there are {', '.join(NEEDS)}")
        module = NEEDS[name]
        if module is not None and find_spec(module) is None:
            raise WrongOption(f"--log {name}: {module} is not installed; install it: pip install 'shoal[{name}]'")


class Loggers:
    """All loggers of one run."""

    def __init__(self, text: str | None, folder: Path, facts: Mapping[str, Any], *, resumed_at: int | None) -> None:
        before = facts.get("loggers") or {}
        self._open: dict[str, CurveLogger] = {}
        for name in chosen(text):
            try:
                module = import_module(f"shoal.training.record.log_{name}")
                make = getattr(module, CLASSES[name])
                self._open[name] = make(folder, facts, before=before.get(name), resumed_at=resumed_at)
            except Exception as error:
                self._failed(name, error)

    @property
    def identities(self) -> dict[str, str]:
        """For `run.json`: by which each logger finds the run again."""
        return {name: each.identity for name, each in self._open.items() if each.identity is not None}

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Numbers of a step; what is no finite number is left out."""
        if not self._open:
            return
        numbers = {name: float(value) for name, value in values.items() if _is_finite(value)}
        for name, each in list(self._open.items()):
            try:
                each.add(step, numbers)
            except Exception as error:
                self._failed(name, error)

    def close(self, status: str, summary: Mapping[str, Any]) -> None:
        """The end of the run."""
        for name, each in list(self._open.items()):
            try:
                each.close(status, summary)
            except Exception as error:
                self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        self._open.pop(name, None)
        warnings.warn(f"--log {name} failed and is left out from here on: {error}", stacklevel=3)


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value - value == 0

"""Curves for MLflow: to the server that MLFLOW_TRACKING_URI names, or into files below the run's folder.

A server would be asked at every step: numbers are sent together, every few seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FLUSH_S = 10.0
MOST = 500
"""Numbers in one message: MLflow takes up to 1,000."""
ENDED = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowLogger:
    """One run of MLflow."""

    def __init__(self, folder: Path, facts: Mapping[str, Any], *, before: str | None, resumed_at: int | None) -> None:
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # Newer versions ask for this.
            uri = (folder / "mlruns").resolve().as_uri()
        self._metric, self._client = Metric, MlflowClient(tracking_uri=uri)
        if before is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "shoal")
            found = self._client.get_experiment_by_name(name)
            place = self._client.create_experiment(name) if found is None else found.experiment_id
            run = self._client.create_run(place, run_name=folder.resolve().name)
            self.identity: str = run.info.run_id
            for key in ("job", "strategy", "contract", "world", "seed"):
                self._client.log_param(self.identity, key, facts.get(key))
        else:
            self.identity = before
            self._client.update_run(before, status="RUNNING")
        self._waiting: list[Any] = []
        self._sent = time.monotonic()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._waiting += [self._metric(name, value, now, step) for name, value in values.items()]
        if len(self._waiting) > MOST or time.monotonic() - self._sent > FLUSH_S:
            self._send()

    def close(self, status: str, summary: Mapping[str, Any]) -> None:
        self._send()
        self._client.set_terminated(self.identity, ENDED.get(status, "FINISHED"))

    def _send(self) -> None:
        for start in range(0, len(self._waiting), MOST):
            self._client.log_batch(self.identity, self._waiting[start : start + MOST])
        self._waiting, self._sent = [], time.monotonic()

"""Curves for Weights & Biases. Its own variables decide where they go: WANDB_MODE=offline writes into the run's folder
only, WANDB_PROJECT and WANDB_ENTITY name the place. A resumed run goes on with the same run there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class WandbLogger:
    """One run of wandb."""

    def __init__(self, folder: Path, facts: Mapping[str, Any], *, before: str | None, resumed_at: int | None) -> None:
        import wandb

        config = {name: facts.get(name) for name in ("job", "strategy", "contract", "world", "seed", "arguments")}
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "shoal"),
            name=os.environ.get("WANDB_NAME", folder.resolve().name),
            dir=str(folder),
            config=config,
            id=before,
            resume="allow" if before else None,
            # Rank 0 prints the progress itself.
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.identity: str | None = self._run.id

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, status: str, summary: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in summary.items() if isinstance(value, (int, float, str))}
        self._run.summary.update({"status": status, **numbers})
        self._run.finish(exit_code=1 if status == "failed" else 0)

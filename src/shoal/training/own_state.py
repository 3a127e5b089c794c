"""Checkpoints of a loop of one's own: `engine.save` and `engine.load`, in the format of `shoal train`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.opening import open_checkpoint
from shoal.checkpoint.restore import find_intact, require_full, restore
from shoal.checkpoint.save import save
from shoal.parallel.engine import Engine

OWN = ("step", "_opt_called", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""What schedulers and this engine have attached to an optimiser."""


class NothingSaved(ValueError):
    """A folder without an intact checkpoint."""


def save_own(engine: Engine, folder: str | Path, *, step: int, progress: dict[str, Any] | None, keep: int) -> Path:
    """Writes a checkpoint of the engine and of what the loop keeps. All ranks call it alike."""
    scale = engine.scale_of_loss
    kept = {"own": progress or {}, "loss_scale": None if scale is None else scale.to_json()}
    return save(Path(folder), engine, step=step, progress=kept, keep=keep)


def load_own(engine: Engine, path: str | Path) -> tuple[int, dict[str, Any]]:
    """Restores a checkpoint, or the newest intact one of a folder; its step and the loop's progress. The optimiser
    stays the same object, so that schedulers that hold it go on. All ranks call it alike."""
    path = Path(path)
    if (path / "checkpoint.json").exists():
        checkpoint = open_checkpoint(path)
    else:
        found = find_intact(path, warn=lambda text: warnings.warn(text, stacklevel=4))
        if found is None:
            raise NothingSaved(f"engine.load({str(path)!r}): there is no intact checkpoint; engine.save writes one")
        checkpoint = found
    require_full(checkpoint)
    before = engine.optimizer.optimizer
    restore(engine, checkpoint)
    _keep_identity(engine, before)
    if engine.scale_of_loss is not None:
        engine.scale_of_loss.load(checkpoint.progress.get("loss_scale"))
    progress = checkpoint.progress.get("own")
    return checkpoint.step, progress if isinstance(progress, dict) else {}


def _keep_identity(engine: Engine, before: torch.optim.Optimizer) -> None:
    """A restore builds the optimiser anew; its contents move into the object that the caller has."""
    sliced, new = engine.optimizer, engine.optimizer.optimizer
    if new is before:
        return
    kept = {name: vars(before)[name] for name in OWN if name in vars(before)}
    vars(before).clear()
    vars(before).update({**vars(new), **kept})
    sliced.replace_optimizer(before)

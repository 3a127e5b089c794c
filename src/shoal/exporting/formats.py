"""`shoal export`: the model of a run in a format that needs nothing of Shoal.

safetensors   one file; load_state_dict(safetensors.torch.load_file(...))
state_dict    one file of torch.save; torch.load(..., weights_only=True)
hf-folder     what `save_pretrained` writes; AutoModel.from_pretrained(folder)
dcp           a folder of torch.distributed.checkpoint; dcp.load into FSDP2 or a plain state_dict
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.checkpoint.saved import Checkpoint
from shoal.common.suggest import did_you_mean
from shoal.exporting.weights import CannotExport, ExportedTensor, Progress, tensors_of, write_raw, write_safetensors

NAMES = {"safetensors": "model.safetensors", "state_dict": "model.pt", "hf-folder": "hf", "dcp": "dcp"}
"""The formats, and where each goes below a run's `export` folder."""
ENDINGS = {".safetensors": "safetensors", ".pt": "state_dict", ".pth": "state_dict", ".bin": "state_dict"}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def target_of(to: str, out: str | None, run: Path) -> tuple[str, Path]:
    """The format that `--to` names, and the path to write: `--to` itself where it is a file, `--out`, or a place in the
    run's folder."""
    if to in NAMES:
        return to, Path(out) if out is not None else run / "export" / NAMES[to]
    ending = Path(to).suffix
    if ending in ENDINGS:
        if out is not None:
            raise CannotExport(f"--to {to} names a file, and so does --out {out}; keep one of them")
        return ENDINGS[ending], Path(to)
    raise CannotExport(
        f"--to {to!r}{did_you_mean(to, list(NAMES))}: expected a format ({', '.join(NAMES)}) or a file that ends in "
        f"{', '.join(ENDINGS)}"
    )


def export(
    checkpoint: Checkpoint,
    model: nn.Module,
    kind: str,
    path: Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Progress = lambda nbytes: None,
) -> dict[str, Any]:
    """Writes the model of a checkpoint; `model` is the job's, built without memory.

    Returns:
        What was written: path, format, tensors, parameters, bytes, step, and the lines that load it.
    """
    if dtype is not None and dtype not in PRECISIONS:
        raise CannotExport(f"--dtype {dtype}: expected one of {', '.join(PRECISIONS)}")
    if path.exists() and not overwrite:
        raise CannotExport(f"{path} exists; give another path, or --overwrite")
    tensors = tensors_of(checkpoint, model, dtype=None if dtype is None else PRECISIONS[dtype])
    written = {"safetensors": _safetensors, "state_dict": _state_dict, "hf-folder": _hugging_face, "dcp": _dcp}[kind](
        checkpoint, model, tensors, path, progress
    )
    return {
        "path": str(path),
        "format": kind,
        "step": checkpoint.step,
        "tensors": len(tensors),
        "bytes": sum(t.nbytes for t in tensors if t.name == t.source),
        "load": written,
    }


def _safetensors(
    checkpoint: Checkpoint, model: nn.Module, tensors: list[ExportedTensor], path: Path, progress: Progress
) -> list[str]:
    write_safetensors(path, checkpoint, tensors, progress=progress)
    return [f'model.load_state_dict(safetensors.torch.load_file("{path}"))']


def _state_dict(
    checkpoint: Checkpoint, model: nn.Module, tensors: list[ExportedTensor], path: Path, progress: Progress
) -> list[str]:
    fresh = _beside(path)
    with _scratch(path) as raw:
        torch.save(write_raw(raw, checkpoint, tensors, progress=progress), fresh)
    fresh.replace(path)
    return [f'model.load_state_dict(torch.load("{path}", weights_only=True))']


def _dcp(
    checkpoint: Checkpoint, model: nn.Module, tensors: list[ExportedTensor], path: Path, progress: Progress
) -> list[str]:
    import torch.distributed.checkpoint as dcp

    with _folder(path) as fresh, _scratch(path) as raw, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That no process group is there: one process writes it.
        dcp.save(write_raw(raw, checkpoint, tensors, progress=progress), checkpoint_id=fresh, no_dist=True)
    return [
        "import torch.distributed.checkpoint as dcp",
        "state = model.state_dict()",
        f'dcp.load(state, checkpoint_id="{path}")',
        "model.load_state_dict(state)",
    ]


def _hugging_face(
    checkpoint: Checkpoint, model: nn.Module, tensors: list[ExportedTensor], path: Path, progress: Progress
) -> list[str]:
    if not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
        raise CannotExport(
            f"hf-folder: the job's model is a {type(model).__name__}, not one of Hugging Face transformers; export to "
            "safetensors or state_dict"
        )
    config: Any = model.config
    if hasattr(config, "use_cache"):
        config.use_cache = getattr(type(config)(), "use_cache", True)  # Training switches it off.
    with _folder(path) as fresh, _scratch(path) as raw:
        values = write_raw(raw, checkpoint, tensors, progress=progress)
        # Parameters that lie in the file take the place of those without memory.
        model.load_state_dict(values, assign=True)
        tie: Any = getattr(model, "tie_weights", None)
        if tie is not None:
            tie()
        model.save_pretrained(fresh)  # type: ignore[operator]
    return [f'transformers.{type(model).__name__}.from_pretrained("{path}")']


def _beside(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.partial")


class _scratch:
    """A file for values on their way from a checkpoint to another format; removed in the end."""

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(f".{path.name}.values")

    def __enter__(self) -> Path:
        self.path.unlink(missing_ok=True)
        return self.path

    def __exit__(self, *error: object) -> None:
        self.path.unlink(missing_ok=True)


class _folder:
    """A folder that appears under its name when it is complete."""

    def __init__(self, path: Path) -> None:
        self.path, self.fresh = path, _beside(path)

    def __enter__(self) -> Path:
        shutil.rmtree(self.fresh, ignore_errors=True)
        self.fresh.mkdir()
        return self.fresh

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is not None:
            shutil.rmtree(self.fresh, ignore_errors=True)
            return
        if self.path.is_dir():
            shutil.rmtree(self.path)
        self.fresh.replace(self.path)

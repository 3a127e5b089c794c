"""The weights of a trained model as one file, written range by range: the model never has to fit into memory.

A checkpoint holds each parameter in ranges, written by many ranks. `write_safetensors` copies them into one safetensors
file; `write_raw` gives a state_dict whose tensors lie in a file, from which PyTorch's and Hugging Face's own
writers make the other formats page by page.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import nn

from shoal.checkpoint.files import DTYPES
from shoal.checkpoint.saved import Checkpoint

Progress = Callable[[int], None]
"""Is given the bytes just written."""
CHUNK = 1 << 22
"""Elements that are read at a time."""
NAMES = {**DTYPES, torch.complex64: "C64"}
"""The dtypes of a safetensors file."""


class CannotExport(ValueError):
    """What was asked for cannot be written; the message says why and what would work."""


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor of the model's state_dict, and where a checkpoint has it."""

    name: str
    source: str
    """The name in the checkpoint: of several names of one tied parameter, the first."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_buffer: bool

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def tensors_of(checkpoint: Checkpoint, model: nn.Module, *, dtype: torch.dtype | None = None) -> list[ExportedTensor]:
    """What `model.state_dict()` holds, in its order, as the checkpoint has it. `dtype` replaces floating-point types.

    Raises:
        CannotExport: The checkpoint is not one of this model.
    """
    buffers = checkpoint.buffer_shapes()
    first: dict[int, str] = {}
    found = []
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            continue  # A module's own extra state.
        source = first.setdefault(id(value), name)
        if source in checkpoint.parameters:
            shape, kind, is_buffer = checkpoint.parameters[source].shape, checkpoint.parameters[source].dtype, False
        elif source in buffers:
            (shape, kind), is_buffer = buffers[source], True
        else:
            raise CannotExport(
                f"{checkpoint.path} has no tensor {name}, which the job's model has; the job was changed since it was "
                "trained: export with the file it was trained from"
            )
        if tuple(shape) != tuple(value.shape):
            raise CannotExport(
                f"{name} is {tuple(shape)} in {checkpoint.path} and {tuple(value.shape)} in the job's model; export "
                "with the job that was trained"
            )
        wanted = dtype if dtype is not None and kind.is_floating_point else kind
        found.append(ExportedTensor(name, source, tuple(shape), wanted, is_buffer))
    return found


def write_safetensors(
    path: Path, checkpoint: Checkpoint, tensors: list[ExportedTensor], *, progress: Progress = lambda nbytes: None
) -> None:
    """Writes a safetensors file that appears under its name when it is complete. `progress`: bytes just written."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", "step": str(checkpoint.step)}}
    end = 0
    for tensor in tensors:
        if tensor.dtype not in NAMES:
            raise CannotExport(
                f"{tensor.name} is {str(tensor.dtype).removeprefix('torch.')}, which safetensors files cannot hold; "
                "export to state_dict or dcp"
            )
        span = [end, end := end + tensor.nbytes]
        header[tensor.name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with _replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        _write_values(file, checkpoint, tensors, progress)


def _write_values(file, checkpoint: Checkpoint, tensors: list[ExportedTensor], progress: Progress) -> None:  # type: ignore[no-untyped-def]
    buffers = checkpoint.buffers() if any(tensor.is_buffer for tensor in tensors) else {}
    for tensor in tensors:
        count = prod(tensor.shape)
        for start in range(0, count, CHUNK):
            stop = min(start + CHUNK, count)
            if tensor.is_buffer:
                values = buffers[tensor.source].reshape(-1)[start:stop]
            else:
                values = checkpoint.read_parameter(tensor.source, start, stop)
            flat = values.to(tensor.dtype).contiguous()
            file.write(memoryview(flat.view(torch.uint8).numpy()))
            progress(flat.nbytes)


class _replacing:
    """A file that appears under its name when it is complete, and not at all after an error."""

    def __init__(self, path: Path) -> None:
        self.path, self.fresh = path, path.with_name(f".{path.name}.partial-{os.getpid()}")

    def __enter__(self):  # type: ignore[no-untyped-def]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.fresh, "xb")
        return self.file

    def __exit__(self, kind: object, *rest: object) -> None:
        try:
            if kind is None:
                self.file.flush()
                os.fsync(self.file.fileno())
        finally:
            self.file.close()
            if kind is None:
                os.replace(self.fresh, self.path)
            else:
                self.fresh.unlink(missing_ok=True)


def write_raw(
    path: Path, checkpoint: Checkpoint, tensors: list[ExportedTensor], *, progress: Progress = lambda nbytes: None
) -> dict[str, torch.Tensor]:
    """Writes the values alone, and gives them as a state_dict whose tensors lie in that file: none is in memory until
    it is read. Tied parameters share a tensor, as in `model.state_dict()`."""
    # The largest elements first, so that every tensor begins at a multiple of its element's size.
    firsts = sorted((t for t in tensors if t.name == t.source), key=lambda t: -t.dtype.itemsize)
    with _replacing(path) as file:
        _write_values(file, checkpoint, firsts, progress)
    values: dict[str, torch.Tensor] = {}
    at = 0
    for tensor in firsts:
        if tensor.nbytes:
            flat = torch.from_numpy(np.memmap(path, np.uint8, "r+", at, (tensor.nbytes,)))
            values[tensor.name] = flat.view(tensor.dtype).view(tensor.shape)
        else:
            values[tensor.name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        at += tensor.nbytes
    return {tensor.name: values[tensor.source] for tensor in tensors}


def full_state(checkpoint: Checkpoint, tensors: list[ExportedTensor]) -> Mapping[str, torch.Tensor]:
    """All of it in memory, for a model that is used in this process."""
    buffers = checkpoint.buffers()
    values: dict[str, torch.Tensor] = {}
    for tensor in tensors:
        if tensor.source not in values:
            found = buffers[tensor.source] if tensor.is_buffer else None
            if found is None:
                found = checkpoint.read_parameter(tensor.source, 0, prod(tensor.shape)).view(tensor.shape)
            values[tensor.source] = found.to(tensor.dtype)
    return {tensor.name: values[tensor.source] for tensor in tensors}

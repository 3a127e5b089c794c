"""Reading checkpoints: verified first, then read piece by piece, by whatever strategy asks.

A checkpoint holds every parameter and every piece of optimiser state as ranges of a named tensor. How many ranks wrote
them does not matter: a rank asks for the range it needs and gets it from the files that hold it, and reads no more.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from shoal.comm.group import BOOK
from shoal.parallel.engine import Engine
from shoal.parallel.optimizer import Numbers
from shoal.train.checkpoint_files import CHECKSUMS, DTYPES, FORMAT, MANIFEST, checkpoints, dtype_name, tidy
from shoal.train.exchange import exchange, world_and_rank

_FILE = re.compile(r"rank-\d{5,}\.safetensors")
_DTYPES = {dtype_name(dtype): dtype for dtype in DTYPES}
_KINDS = {"int", "float", *_DTYPES}


class CheckpointBroken(ValueError):
    """A checkpoint that is not what was written: truncated, altered, incomplete, or of a newer format."""


class CheckpointMismatch(ValueError):
    """An intact checkpoint of another model."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements [start, stop) of a tensor laid out flat, and where they lie."""

    start: int
    stop: int
    file: str
    tensor: str


@dataclass(frozen=True, slots=True)
class _Whole:
    shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint:
    """A checkpoint on disk. Offers an engine its saved state; files are opened when they are first read."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.step: int = int(manifest["step"])
        self.progress: dict[str, Any] = manifest["progress"]
        self.world: int = int(manifest["world"])
        self.parameters = {name: _whole(entry) for name, entry in manifest["parameters"].items()}
        self.files: dict[str, tuple[int, str]] = {
            name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()
        }
        self._buffers = {
            name: (_whole(e), str(e["file"]), str(e["tensor"])) for name, e in manifest["buffers"].items()
        }
        self._numbers = {
            name: {key: (_number(value), str(kind)) for key, (value, kind) in numbers.items()}
            for name, numbers in manifest["numbers"].items()
        }
        self._parts: dict[tuple[str, str | None], list[_Part]] = {}
        for piece in manifest["pieces"]:
            part = _Part(int(piece["start"]), int(piece["stop"]), str(piece["file"]), str(piece["tensor"]))
            self._parts.setdefault((str(piece["parameter"]), piece["state"]), []).append(part)
        self._keys: dict[str, list[str]] = {}
        for (name, key), parts in self._parts.items():
            parts.sort(key=lambda part: part.start)
            if key is not None:
                self._keys.setdefault(name, []).append(key)
        self._open: dict[str, Any] = {}
        self._require_consistent()

    def keys(self, name: str) -> list[str]:
        """The element-wise optimiser state it holds for a parameter."""
        return list(self._keys.get(name, ()))

    def numbers(self, name: str) -> Numbers:
        return dict(self._numbers.get(name, {}))

    def trained(self, name: str) -> bool:
        """Whether the optimiser had the parameter in its care: parameters that never get a gradient it has not."""
        return name in self._numbers

    def read(self, name: str, key: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a parameter's state. A parameter that had no such state starts it at zero."""
        if (name, key) not in self._parts:
            return torch.zeros(stop - start, dtype=self.parameters[name].dtype)
        return self._read(name, key, start, stop)

    def read_parameter(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a parameter laid out flat."""
        return self._read(name, None, start, stop)

    def buffers(self) -> dict[str, torch.Tensor]:
        """The model's buffers by name."""
        return {
            name: self._file(file).get_tensor(tensor) for name, (_, file, tensor) in self._buffers.items()
        }

    def buffer_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (whole.shape, whole.dtype) for name, (whole, _, _) in self._buffers.items()}

    def _read(self, name: str, key: str | None, start: int, stop: int) -> torch.Tensor:
        numel = prod(self.parameters[name].shape)
        if not 0 <= start <= stop <= numel:
            raise ValueError(f"elements {start} to {stop} of {name} were asked for, but it has {numel}")
        found = []
        for part in self._parts.get((name, key), ()):
            low, high = max(start, part.start), min(stop, part.stop)
            if low < high:
                values = self._file(part.file).get_slice(part.tensor)
                found.append(values[low - part.start : high - part.start])
        if not found:
            return torch.empty(0, dtype=self.parameters[name].dtype)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.path / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointBroken(f"{self.path / name} cannot be read any more: {error}") from error
        return self._open[name]

    def verify_file(self, name: str) -> None:
        """Raises if a file is not byte for byte what was written."""
        path, (size, digest) = self.path / name, self.files[name]
        try:
            present = path.stat().st_size
            if present < size:
                raise CheckpointBroken(f"{path} is truncated: it has {present} bytes of {size}")
            with open(path, "rb") as file:
                altered = present != size or hashlib.file_digest(file, "sha256").hexdigest() != digest
        except FileNotFoundError as error:
            raise CheckpointBroken(f"{path} is missing") from error
        except OSError as error:
            raise CheckpointBroken(f"{path} cannot be read: {error.strerror or error}") from error
        if altered:
            raise CheckpointBroken(
                f"{path} has been altered since it was written: its checksum is not the one recorded"
            )

    def _require_consistent(self) -> None:
        """Every element of everything is there once, in files that the manifest knows."""
        used = {part.file for parts in self._parts.values() for part in parts} | {
            e[1] for e in self._buffers.values()
        }
        for file in {*used, *self.files}:
            if file not in self.files or not _FILE.fullmatch(file):
                raise CheckpointBroken(
                    f"{self.path / MANIFEST} names the file {file!r}, which is none of its own"
                )
        for name, numbers in self._numbers.items():
            for key, (_, kind) in numbers.items():
                if kind not in _KINDS:
                    raise CheckpointBroken(
                        f"{self.path / MANIFEST} holds {key} of {name} as {kind!r}, which is no number"
                    )
        whole = [(name, None) for name in self.parameters]
        for name, key in {*whole, *self._parts}:
            at = 0
            for part in self._parts.get((name, key), ()):
                if part.start != at or part.stop <= part.start:
                    break
                at = part.stop
            if name not in self.parameters or at != prod(self.parameters[name].shape):
                raise CheckpointBroken(
                    f"{self.path} is incomplete: elements of {key or 'the values'} of {name} are missing"
                )


def _whole(entry: dict[str, Any]) -> _Whole:
    return _Whole(tuple(int(size) for size in entry["shape"]), _DTYPES[entry["dtype"]])


def _number(value: float | str) -> float:
    # JSON has no NaN and no infinity; they are written as words.
    if not isinstance(value, (int, float, str)) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def latest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step, not verified; None if there is none."""
    found = checkpoints(Path(folder))
    return found[-1][1] if found else None


def open_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint:
    """A checkpoint whose manifest and, unless told otherwise, every file have been verified. Not a collective."""
    path = Path(path)
    if not path.is_dir():
        raise CheckpointBroken(f"there is no checkpoint {path}")
    if not (path / MANIFEST).exists() and latest(path) is not None:
        raise CheckpointBroken(
            f"{path} is a folder of checkpoints; name one of them, for example {latest(path)}"
        )
    checkpoint = _from_manifest(path)
    if verify:
        for name in sorted(checkpoint.files):
            checkpoint.verify_file(name)
    return checkpoint


def _from_manifest(path: Path) -> Checkpoint:
    texts = []
    for name in (MANIFEST, CHECKSUMS):
        try:
            texts.append((path / name).read_bytes())
        except FileNotFoundError as error:
            raise CheckpointBroken(f"{path / name} is missing") from error
        except OSError as error:
            raise CheckpointBroken(f"{path / name} cannot be read: {error.strerror or error}") from error
    recorded = re.search(
        rf"^([0-9a-f]{{64}})  {re.escape(MANIFEST)}$", texts[1].decode("ascii", "replace"), re.MULTILINE
    )
    if recorded is None or hashlib.sha256(texts[0]).hexdigest() != recorded[1]:
        raise CheckpointBroken(
            f"{path / MANIFEST} has been altered or truncated since it was written: its checksum is not the one in {CHECKSUMS}"
        )
    try:
        manifest = json.loads(texts[0])
        if manifest["format"] > FORMAT:
            raise CheckpointBroken(
                f"{path} has format {manifest['format']}, newer than format {FORMAT}, the newest that this Shoal reads: "
                "use the version of Shoal that wrote it, or a later one"
            )
        return Checkpoint(path, manifest)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointBroken):
            raise
        raise CheckpointBroken(
            f"{path / MANIFEST} is not the manifest of a checkpoint ({error!r})"
        ) from error


def find_intact(folder: Path, warn: Callable[[str], None], *, clean: bool = True) -> Checkpoint | None:
    """The newest intact checkpoint, the same on every rank; broken ones are named through `warn` and passed over.

    All ranks call it alike and share the work of verifying. `clean` also removes what crashed saves left; look from
    outside at a run that may be saving with `clean=False`.
    """
    folder = Path(folder)
    world, rank = world_and_rank()
    if rank == 0 and clean:
        tidy(folder)
    with BOOK.during("checkpoint"):
        # Rank 0's view counts: a shared file system may show it to others a moment later.
        names = exchange({"names": [path.name for _, path in checkpoints(folder)] if rank == 0 else []})[0][
            "names"
        ]
        for name in reversed(names):
            checkpoint, trouble = None, None
            try:
                checkpoint = _from_manifest(folder / name)
                for file in sorted(checkpoint.files)[rank::world]:
                    checkpoint.verify_file(file)
            except CheckpointBroken as error:
                trouble = str(error)
            troubles = [report["trouble"] for report in exchange({"trouble": trouble}) if report["trouble"]]
            if checkpoint is not None and not troubles:
                return checkpoint
            warn(f"checkpoint {folder / name} is passed over: {troubles[0]}")
    return None


def restore(engine: Engine, checkpoint: Checkpoint) -> None:
    """Parameters, buffers and optimiser state become the checkpoint's. All ranks call it alike.

    Refuses before it changes anything when the checkpoint is of another model.
    """
    sharded = {
        slot.name: (tuple(slot.shape), slot.param.dtype) for b in engine.buckets for slot in b.buffer.slots
    }
    frozen = {name: param for name, param in engine.model.named_parameters() if name not in sharded}
    buffers = persistent_buffers(engine.model)
    _require_same(
        "parameters", checkpoint, {name: (whole.shape, whole.dtype) for name, whole in checkpoint.parameters.items()},
        sharded | {name: (tuple(param.shape), param.dtype) for name, param in frozen.items()},
    )  # fmt: skip
    _require_same(
        "buffers",
        checkpoint,
        checkpoint.buffer_shapes(),
        {n: (tuple(b.shape), b.dtype) for n, b in buffers.items()},
    )
    with BOOK.during("checkpoint"), torch.no_grad():
        for name, param in frozen.items():
            param.copy_(checkpoint.read_parameter(name, 0, param.numel()).view(param.shape))
        for name, values in checkpoint.buffers().items():
            buffers[name].copy_(values)
        engine.load_parameters(checkpoint.read_parameter)
        # The optimiser is made anew at the next step, from what was saved.
        engine.optimizer = None
        engine.load_optimizer(checkpoint)


Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def _require_same(what: str, checkpoint: Checkpoint, saved: Shapes, model: Shapes) -> None:
    start = f"{checkpoint.path} is of another model: "
    if saved.keys() != model.keys():
        only_model = [name for name in model if name not in saved]
        only_saved = [name for name in saved if name not in model]
        parts = [f"the checkpoint has {len(saved)} {what}, the model {len(model)}"]
        parts += [f"missing in the checkpoint: {_some(only_model)}"] if only_model else []
        parts += [f"unknown to the model: {_some(only_saved)}"] if only_saved else []
        raise CheckpointMismatch(start + "; ".join(parts))
    different = [
        f"{name} is {dtype_name(saved[name][1])}{list(saved[name][0])} there, "
        f"{dtype_name(model[name][1])}{list(model[name][0])} in the model"
        for name in model
        if saved[name] != model[name]
    ]
    if different:
        raise CheckpointMismatch(start + _some(different, "; "))


def _some(names: Iterable[str], between: str = ", ") -> str:
    names = list(names)
    return between.join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong to the model's state; those it recomputes when it is built do not."""
    passing = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in model.named_buffers() if name not in passing}

"""A checkpoint on disk: a manifest, and all parameters and optimiser state as ranges of named tensors.

How many ranks wrote it does not matter: who reads asks for a range and gets it from the files that hold it.
Nothing is taken on trust: manifest and files are held against their checksums, every tensor against the size and type
that the manifest gives it, and the pieces must make up each tensor exactly once. Checksums find damage, not forgery:
whoever may write a checkpoint may also write other values into it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, replace
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shoal.parallel.kept_errors import ERRORS, error_key
from shoal.train.checkpoint.files import (
    CHECKSUMS,
    DTYPES,
    FORMAT,
    MANIFEST,
    about_file,
    checkpoints,
    checksums_text,
    dtype_name,
    from_json,
    open_regular,
    read_regular,
    step_of,
)
from shoal.train.checkpoint.values import decode, is_kind
from shoal.workload.cuts import Cut, Part

_FILE = re.compile(r"rank-\d{5,}\.safetensors")
_DTYPES = {dtype_name(dtype): dtype for dtype in DTYPES}


MOST_STEPS = 1 << 48
MOST_ELEMENTS = 1 << 62
MOST_MANIFEST_BYTES = 1 << 30


class CheckpointBroken(ValueError):
    """A checkpoint that is not what was written: truncated, altered, incomplete, or of a newer format."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements [start, stop) of a tensor (or of one rank's part of it) laid out flat, and where they lie."""

    start: int
    stop: int
    file: str
    tensor: str
    of: Part | None = None
    """Which part of the tensor, if it was cut."""


@dataclass(frozen=True, slots=True)
class _Whole:
    shape: tuple[int, ...]
    dtype: torch.dtype
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor as it must lie in its file; None where the manifest does not say."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None


class Checkpoint:
    """A checkpoint on disk. Offers an engine its saved state; files are opened when they are first read."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.step: int = _count(manifest["step"], "step", most=MOST_STEPS)
        self.progress: dict[str, Any] = dict(from_json(manifest["progress"]))
        self.world: int = _count(manifest["world"], "world", most=len(manifest["files"]))
        self.parameters = {name: _whole(entry) for name, entry in manifest["parameters"].items()}
        self.files: dict[str, tuple[int, str]] = {
            name: (_count(entry["bytes"], "bytes"), str(entry["sha256"])) for name, entry in manifest["files"].items()
        }
        self._buffers: dict[str, list[tuple[_Whole, str, str, Part | None]]] = {}
        for name, e in manifest["buffers"].items():
            row = (_whole(e), str(e["file"]), str(e["tensor"]), self._cut_part(e.get("part"), _whole(e).shape))
            self._buffers.setdefault(str(e.get("buffer", name)), []).append(row)
        self._numbers = {
            name: {key: (from_json(value), str(kind)) for key, (value, kind) in numbers.items()}
            for name, numbers in manifest["numbers"].items()
        }
        self._parts: dict[tuple[str, str | None], list[_Part]] = {}
        for piece in manifest["pieces"]:
            name, key = str(piece["parameter"]), piece["state"]
            if name not in self.parameters or not (key is None or isinstance(key, str)):
                raise ValueError(f"a piece of {name!r}, which is not a parameter")
            of = self._cut_part(piece.get("part"), self.parameters[name].shape)
            start, stop = (_count(piece[end], end) for end in ("start", "stop"))
            part = _Part(start, stop, str(piece["file"]), str(piece["tensor"]), of)
            self._parts.setdefault((name, key), []).append(part)
        self._keys: dict[str, list[str]] = {}
        for (name, key), parts in self._parts.items():
            parts.sort(key=lambda part: (part.of.index if part.of else 0, part.start))
            if key is not None and not key.startswith(ERRORS):
                self._keys.setdefault(name, []).append(key)
        self._extras = {name: (str(e["file"]), str(e["tensor"])) for name, e in manifest.get("extras", {}).items()}
        self._common: dict[str, dict[str, Any]] = {
            where: {key: (value, str(kind)) for key, (value, kind) in entries.items()}
            for where, entries in manifest.get("optimizer", {}).items()
        }
        self._expected = self._tensors_expected()
        self.sums: dict[str, int] = dict(manifest.get("sums", {}))
        """Checksums of tensors by `checksum.py`; none in checkpoints of earlier versions."""
        if not all(isinstance(value, int) and abs(value) <= 1 << 63 for value in self.sums.values()):
            raise ValueError("a checksum that is not an integer of 64 bits")
        self._open: dict[str, Any] = {}
        self._assembled: tuple[tuple[str, str | None], torch.Tensor] | None = None
        self._require_consistent()

    def keys(self, name: str) -> list[str]:
        """The element-wise optimiser state it holds for a parameter."""
        return list(self._keys.get(name, ()))

    def errors(self, name: str, what: str) -> list[str]:
        """The keys of what each replica had not sent of a parameter, in the order of replicas."""
        replicas = next((n for n in count(1) if (name, error_key(what, 0, n)) in self._parts or n > self.world), 0)
        keys = [error_key(what, replica, replicas) for replica in range(replicas)]
        return keys if all((name, key) in self._parts for key in keys) else []

    def extra(self, name: str) -> torch.Tensor | None:
        """A tensor that belongs to a parameter and is not of its size."""
        if name not in self._extras:
            return None
        file, tensor = self._extras[name]
        return self._file(file).get_tensor(tensor)

    def numbers(self, name: str) -> dict[str, tuple[Any, str]]:
        """The rest of a parameter's optimiser state as it is written: key -> (value, kind)."""
        return dict(self._numbers.get(name, {}))

    def values(self, name: str) -> dict[str, Any]:
        """The rest of a parameter's optimiser state: numbers, text, lists, tensors of other shapes."""
        return {key: decode(row, self._value_of) for key, row in self._numbers.get(name, {}).items()}

    def common(self) -> dict[str, dict[str, Any]]:
        """What the optimiser keeps for several parameters together."""
        return {
            where: {key: decode(row, self._value_of) for key, row in entries.items()}
            for where, entries in self._common.items()
        }

    def _value_of(self, name: str) -> torch.Tensor:
        found = self.extra(name)
        if found is None:
            raise CheckpointBroken(f"{self.path / MANIFEST} names the tensor {name!r}, which is not there")
        return found

    def read(self, name: str, key: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a parameter's state; one that had no such state starts it at zero."""
        if (name, key) not in self._parts:
            return torch.zeros(stop - start, dtype=self.parameters[name].dtype)
        return self._read(name, key, start, stop)

    def read_parameter(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a parameter laid out flat."""
        return self._read(name, None, start, stop)

    def buffers(self) -> dict[str, torch.Tensor]:
        """The model's buffers by name."""
        found = {}
        for name, rows in self._buffers.items():
            whole, file, tensor, part = rows[0]
            if part is None:
                found[name] = self._file(file).get_tensor(tensor)
                continue
            found[name] = torch.empty(whole.shape, dtype=whole.dtype)
            for _, file, tensor, part in rows:
                assert part is not None
                part.fill(found[name], self._file(file).get_tensor(tensor))
        return found

    def buffer_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (rows[0][0].shape, rows[0][0].dtype) for name, rows in self._buffers.items()}

    def shapes_by_sum(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor that has a checksum, by the checksum's name."""
        shapes = {
            f"{key} of {name}" if key else f"parameter {name}": self.parameters[name].shape for name, key in self._parts
        }
        return shapes | {f"buffer {name}": rows[0][0].shape for name, rows in self._buffers.items()}

    def _read(self, name: str, key: str | None, start: int, stop: int) -> torch.Tensor:
        numel = prod(self.parameters[name].shape)
        if not 0 <= start <= stop <= numel:
            raise ValueError(f"elements {start} to {stop} of {name} were asked for, but it has {numel}")
        parts = self._parts.get((name, key), [])
        if parts and parts[0].of is not None:
            return self._assemble(name, key, parts).reshape(-1)[start:stop]
        found = []
        for part in parts:
            low, high = max(start, part.start), min(stop, part.stop)
            if low < high:
                values = self._file(part.file).get_slice(part.tensor)
                found.append(values[low - part.start : high - part.start])
        if not found:
            return torch.empty(0, dtype=self.parameters[name].dtype)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _assemble(self, name: str, key: str | None, parts: list[_Part]) -> torch.Tensor:
        """The whole of a tensor that was cut when it was saved. The last one stays: ranges of it are asked in turn."""
        if self._assembled is None or self._assembled[0] != (name, key):
            shape = self.parameters[name].shape
            pieces: dict[int, list[torch.Tensor]] = {}
            for part in parts:
                assert part.of is not None
                pieces.setdefault(part.of.index, []).append(self._file(part.file).get_tensor(part.tensor).reshape(-1))
            whole: torch.Tensor | None = None
            for part in parts:
                assert part.of is not None
                if part.start == 0:
                    values = torch.cat(pieces[part.of.index])
                    whole = torch.empty(shape, dtype=values.dtype) if whole is None else whole
                    part.of.fill(whole, values.view(part.of.local_shape(shape)))
            assert whole is not None
            self._assembled = ((name, key), whole)
        return self._assembled[1]

    def _cut_part(self, row: dict[str, Any] | None, shape: tuple[int, ...]) -> Part | None:
        if row is None:
            return None
        cut, ranks = row["cut"], _count(row["ranks"], "ranks", least=1, most=self.world)
        segments = [_count(size, "a segment", least=1) for size in cut["segments"]]
        dim = _count(cut["dim"], "dim", most=len(shape) - 1)
        if sum(segments) != shape[dim]:
            raise ValueError(f"segments {segments} of a dimension of {shape[dim]}")
        return Part(Cut(dim, tuple(segments)), ranks, _count(row["index"], "index", most=ranks - 1))

    def _tensors_expected(self) -> dict[str, dict[str, _Stored]]:
        """For each file, what the manifest says of the tensors in it."""
        found: dict[str, dict[str, _Stored]] = {name: {} for name in self.files}

        def expect(file: str, tensor: str, stored: _Stored) -> None:
            if tensor in found.setdefault(file, {}):
                raise ValueError(f"{tensor!r} of {file} serves two purposes")
            found[file][tensor] = stored

        for (name, key), parts in self._parts.items():
            for part in parts:
                dtype = self.parameters[name].dtype if key is None else None
                expect(part.file, part.tensor, _Stored((part.stop - part.start,), dtype))
        for rows in self._buffers.values():
            for whole, file, tensor, of in rows:
                shape = whole.shape if of is None else of.local_shape(whole.shape)
                expect(file, tensor, _Stored(shape, whole.dtype))
        for file, tensor in self._extras.values():
            expect(file, tensor, _Stored(None, None))
        return found

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self._opened(name)
        return self._open[name]

    def _opened(self, name: str) -> Any:
        """A tensor file whose tensors are those that the manifest describes."""
        path = self.path / name
        try:
            open_regular(path).close()
            file = safe_open(path, framework="pt")
            present = {tensor: file.get_slice(tensor) for tensor in file.keys()}  # noqa: SIM118  (not a dict)
        except (OSError, SafetensorError) as error:
            raise CheckpointBroken(f"{path} cannot be read: {_why(error)}") from error
        about = file.metadata()
        if about is not None and about != about_file(self.step, name):
            raise CheckpointBroken(f"{path} was written as {about.get('file')} of step {about.get('step')}")
        expected = self._expected[name]
        if present.keys() != expected.keys():
            odd = sorted(present.keys() ^ expected.keys())[0]
            how = "is missing" if odd in expected else f"is not in {MANIFEST}"
            raise CheckpointBroken(f"{path} does not hold what {MANIFEST} says: the tensor {odd!r} {how}")
        for tensor, stored in expected.items():
            shape, dtype = tuple(present[tensor].get_shape()), present[tensor].get_dtype()
            if stored.shape is not None and shape != stored.shape:
                raise CheckpointBroken(
                    f"{path} does not hold what {MANIFEST} says: {tensor!r} has shape {list(shape)}, not "
                    f"{list(stored.shape)}"
                )
            if dtype not in DTYPES.values() or (stored.dtype is not None and dtype != DTYPES[stored.dtype]):
                wanted = "a type of this format" if stored.dtype is None else DTYPES[stored.dtype]
                raise CheckpointBroken(
                    f"{path} does not hold what {MANIFEST} says: {tensor!r} has type {dtype}, not {wanted}"
                )
        return file

    def verify_file(self, name: str) -> None:
        """Raises if a file is not byte for byte what was written, or not what the manifest describes."""
        path, (size, digest) = self.path / name, self.files[name]
        try:
            with open_regular(path) as file:
                present = os.fstat(file.fileno()).st_size
                if present < size:
                    raise CheckpointBroken(f"{path} is truncated: it has {present} bytes of {size}")
                altered = present != size or hashlib.file_digest(file, "sha256").hexdigest() != digest
        except FileNotFoundError as error:
            raise CheckpointBroken(f"{path} is missing") from error
        except OSError as error:
            raise CheckpointBroken(f"{path} cannot be read: {_why(error)}") from error
        if altered:
            raise CheckpointBroken(
                f"{path} has been altered since it was written: its checksum is not the one recorded"
            )
        self._opened(name)

    def _require_value(self, name: str, key: str, row: Any) -> None:
        """A value that can be decoded, and whose tensors are in the manifest."""

        def known(tensor: str) -> torch.Tensor:
            if tensor not in self._extras:
                raise ValueError(f"the tensor {tensor!r} is not there")
            return torch.empty(0)

        try:
            decode(row, known)
        except (TypeError, ValueError, KeyError, OverflowError, RuntimeError, RecursionError) as error:
            raise CheckpointBroken(
                f"{self.path / MANIFEST} holds {key} of {name}, which cannot be read: {error}"
            ) from error

    def _require_consistent(self) -> None:
        """Every element of everything is there once, in files that the manifest knows."""
        used = {part.file for parts in self._parts.values() for part in parts}
        used |= {row[1] for rows in self._buffers.values() for row in rows}
        used |= {file for file, _ in self._extras.values()}
        for file in {*used, *self.files}:
            if file not in self.files or not _FILE.fullmatch(file):
                raise CheckpointBroken(f"{self.path / MANIFEST} names the file {file!r}, which is none of its own")
        if len(self.files) != self.world:
            raise CheckpointBroken(
                f"{self.path / MANIFEST} has {len(self.files)} files for {self.world} ranks: each rank writes one"
            )
        for name, rows in self._buffers.items():
            if not _buffer_complete(rows):
                raise CheckpointBroken(f"{self.path} is incomplete: elements of the buffer {name} are missing")
        for name, numbers in (*self._numbers.items(), *self._common.items()):
            for key, (_, kind) in numbers.items():
                if not is_kind(kind):
                    raise CheckpointBroken(
                        f"{self.path / MANIFEST} holds {key} of {name} as {kind!r}, which is no number"
                    )
                self._require_value(name, key, numbers[key])
        whole = [(name, None) for name in self.parameters]
        for name, key in {*whole, *self._parts}:
            parts = self._parts.get((name, key), [])
            if name not in self.parameters or not _complete(parts, self.parameters[name].shape):
                raise CheckpointBroken(
                    f"{self.path} is incomplete: elements of {key or 'the values'} of {name} are missing"
                )


def _complete(parts: list[_Part], shape: tuple[int, ...]) -> bool:
    """Whether sorted parts make up a tensor of this shape, without gap or overlap."""
    if not parts or parts[0].of is None:
        return all(part.of is None for part in parts) and _gapless(parts, prod(shape))
    of = parts[0].of
    groups = [[part for part in parts if part.of == replace(of, index=index)] for index in range(of.ranks)]
    sizes = [prod(replace(of, index=index).local_shape(shape)) for index in range(of.ranks)]
    every = all(_gapless(group, size) for group, size in zip(groups, sizes, strict=True))
    return every and sum(map(len, groups)) == len(parts) and of.cut.size == shape[of.cut.dim]


def _gapless(parts: list[_Part], numel: int) -> bool:
    at = 0
    for part in parts:
        if part.start != at or part.stop <= part.start:
            return False
        at = part.stop
    return at == numel


def _buffer_complete(rows: list[tuple[_Whole, str, str, Part | None]]) -> bool:
    whole, _, _, of = rows[0]
    if of is None:
        return len(rows) == 1
    same = [(replace(of, index=index), whole) for index in range(of.ranks)]
    return [(part, each) for each, _, _, part in sorted(rows, key=lambda row: row[3].index if row[3] else -1)] == same


def _count(value: Any, what: str, *, least: int = 0, most: int = MOST_ELEMENTS) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} is {str(value)[:40]}: expected a whole number from {least} to {most}")
    return value


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _whole(entry: dict[str, Any]) -> _Whole:
    shape = tuple(_count(size, "a size") for size in entry["shape"])
    if prod(shape) > MOST_ELEMENTS:
        raise ValueError(f"a tensor of shape {list(shape)}")
    return _Whole(shape, _DTYPES[entry["dtype"]], bool(entry.get("frozen", False)))


def latest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step, not verified; None if there is none."""
    found = checkpoints(Path(folder))
    return found[-1][1] if found else None


def is_readable(path: Path) -> bool:
    """Whether its manifest and the sizes of its files are in order; checksums of tensors are not computed."""
    try:
        checkpoint = from_manifest(path)
        return all((path / name).lstat().st_size == size for name, (size, _) in checkpoint.files.items())
    except (CheckpointBroken, OSError):
        return False


def open_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint:
    """A checkpoint with its manifest and, unless told otherwise, every file verified. No collective."""
    path = Path(path)
    if not path.is_dir():
        raise CheckpointBroken(f"there is no checkpoint {path}")
    if not (path / MANIFEST).exists() and latest(path) is not None:
        raise CheckpointBroken(f"{path} is a folder of checkpoints; name one of them, for example {latest(path)}")
    checkpoint = from_manifest(path)
    if verify:
        for name in sorted(checkpoint.files):
            checkpoint.verify_file(name)
    return checkpoint


def from_manifest(path: Path) -> Checkpoint:
    """The checkpoint that an unaltered manifest describes; its tensor files are not looked at."""
    text, sums = (_bytes(path / name) for name in (MANIFEST, CHECKSUMS))
    digest = hashlib.sha256(text).hexdigest()
    if not sums.startswith(checksums_text(digest, {}).encode()):
        raise CheckpointBroken(
            f"{path / MANIFEST} has been altered or truncated since it was written: "
            f"its checksum is not the one in {CHECKSUMS}"
        )
    try:
        manifest = json.loads(text, parse_constant=_no_constant)
        if manifest["format"] > FORMAT:
            raise CheckpointBroken(
                f"{path} has format {manifest['format']}, and this Shoal reads up to {FORMAT}: it is newer; "
                "use the version of Shoal that wrote it, or a later one"
            )
        checkpoint = Checkpoint(path, manifest)
    except CheckpointBroken:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
        raise CheckpointBroken(f"{path / MANIFEST} is not a checkpoint's manifest ({error!r})") from error
    named = step_of(path)
    if named is not None and named != checkpoint.step:
        raise CheckpointBroken(
            f"{path} is named after step {named}, and its {MANIFEST} says step {checkpoint.step}: it was renamed or "
            "forged"
        )
    recorded = {name: sha256 for name, (_, sha256) in checkpoint.files.items()}
    if sums != checksums_text(digest, recorded).encode():
        raise CheckpointBroken(f"{path / CHECKSUMS} has been altered since it was written: {MANIFEST} says otherwise")
    return checkpoint


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _bytes(path: Path) -> bytes:
    try:
        return read_regular(path, most=MOST_MANIFEST_BYTES)
    except FileNotFoundError as error:
        raise CheckpointBroken(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointBroken(f"{path} cannot be read: {_why(error)}") from error

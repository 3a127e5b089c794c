"""A checkpoint on disk: a manifest, and all parameters and optimiser state as ranges of named tensors.

The number of ranks that wrote it does not matter: a reader requests a range and gets it from the files that hold it.
Everything is validated: manifest and files against their checksums, every tensor against the size and dtype in the
manifest, and the ranges must cover each tensor exactly once. Checksums detect damage, not forgery: a user who can write
a checkpoint can also write other values into it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.checksum import added, name_of
from shoal.checkpoint.files import (
    MANIFEST,
    digest_of_values,
    from_json,
)
from shoal.checkpoint.rows import (
    MOST_STEPS,
    CheckpointBroken,
    Stored,
    StoredBuffer,
    StoredRange,
    buffer,
    buffer_complete,
    complete,
    count_of,
    extra,
    full_of,
    piece,
    sum_of,
)
from shoal.checkpoint.tensor_files import TensorFiles
from shoal.checkpoint.values import decode, is_kind
from shoal.parallel.average import AVERAGE
from shoal.parallel.kept_errors import PRIVATE, error_key

_FILE = re.compile(r"rank-\d{5,}\.safetensors")
_PLACE = re.compile(r"(.*/)?(group \d+|attributes|state)|schedule|slices|island \d+ of \d+( .+)?")
"""Locations of optimiser state that belongs to several parameters (job/kept.py)."""


class Checkpoint:
    """A checkpoint on disk, as the SavedState of an engine; files are opened when they are first read."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.step: int = count_of(manifest["step"], "step", most=MOST_STEPS)
        self.progress: dict[str, Any] = dict(from_json(manifest["progress"]))
        self.weights_only: bool = manifest.get("weights_only") is True
        """Whether it has parameters and buffers, but no optimiser state: it cannot be trained on."""
        self.averaged = False
        """Whether parameters are read from their moving average. Frozen ones have none."""
        self.world: int = count_of(manifest["world"], "world", most=len(manifest["files"]))
        self.parameters = {name: full_of(entry) for name, entry in manifest["parameters"].items()}
        self.files: dict[str, tuple[int, str]] = {
            name: (count_of(entry["bytes"], "bytes"), str(entry["sha256"])) for name, entry in manifest["files"].items()
        }
        self._buffers: dict[str, list[StoredBuffer]] = {}
        for name, row in manifest["buffers"].items():
            self._buffers.setdefault(str(row.get("buffer", name)), []).append(buffer(row, self.world))
        self._numbers = {
            name: {key: (from_json(value), str(kind)) for key, (value, kind) in numbers.items()}
            for name, numbers in manifest["numbers"].items()
        }
        self._parts: dict[tuple[str, str | None], list[StoredRange]] = {}
        for row in manifest["pieces"]:
            name, key = str(row["parameter"]), row["state"]
            if name not in self.parameters or not (key is None or isinstance(key, str)):
                raise ValueError(f"a piece of {name!r}, which is not a parameter")
            self._parts.setdefault((name, key), []).append(piece(row, self.parameters[name], self.world))
        self._keys: dict[str, list[str]] = {}
        for (name, key), parts in self._parts.items():
            parts.sort(key=lambda part: (part.of.index if part.of else 0, part.start))
            if key is not None and not key.startswith(PRIVATE):
                self._keys.setdefault(name, []).append(key)
        self._extras = {name: extra(row) for name, row in manifest.get("extras", {}).items()}
        self._common: dict[str, dict[str, Any]] = {
            where: {key: (value, str(kind)) for key, (value, kind) in entries.items()}
            for where, entries in manifest.get("optimizer", {}).items()
        }
        self._tensors = TensorFiles(path, self.step, self._tensors_expected())
        self.sums: dict[str, int] = dict(manifest.get("sums", {}))
        """Checksums of full tensors by `checksum.py`; none in checkpoints of earlier versions."""
        for value in self.sums.values():
            sum_of({"sum": value})
        self._assembled: tuple[tuple[str, str | None], torch.Tensor] | None = None
        self._require_consistent()
        if manifest.get("values") not in (None, digest_of_values(manifest)):
            raise CheckpointBroken(f"{path / MANIFEST} contains numbers that were altered since they were written")

    @property
    def has_average(self) -> bool:
        """Whether it holds a moving average of the weights."""
        return any(key == AVERAGE for _, key in self._parts)

    def keys(self, name: str) -> list[str]:
        """The keys of a parameter's element-wise optimiser state."""
        return list(self._keys.get(name, ()))

    def keys_of(self, name: str, prefix: str) -> list[str]:
        """The keys of a parameter's element-wise state that begin with a prefix, without the prefix."""
        found = [key for at, key in self._parts if at == name and key is not None and key.startswith(prefix)]
        return [key.removeprefix(prefix) for key in found]

    def errors(self, name: str, what: str) -> list[str]:
        """The keys of each replica's compression residual of a parameter, in the order of replicas."""
        replicas = next((n for n in count(1) if (name, error_key(what, 0, n)) in self._parts or n > self.world), 0)
        keys = [error_key(what, replica, replicas) for replica in range(replicas)]
        return keys if all((name, key) in self._parts for key in keys) else []

    def extra(self, name: str) -> torch.Tensor | None:
        """A tensor that belongs to a parameter and is not of its size."""
        if name not in self._extras:
            return None
        return self._tensors.read(self._extras[name].file, self._extras[name].tensor)

    def numbers(self, name: str) -> dict[str, tuple[Any, str]]:
        """The rest of a parameter's optimiser state, encoded: key -> (value, kind)."""
        return dict(self._numbers.get(name, {}))

    def values(self, name: str) -> dict[str, Any]:
        """The rest of a parameter's optimiser state: numbers, text, lists, tensors of other shapes."""
        return {key: decode(row, self._value_of) for key, row in self._numbers.get(name, {}).items()}

    def common(self) -> dict[str, dict[str, Any]]:
        """Optimiser state that belongs to several parameters together."""
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
        """Elements [start, stop) of a parameter's state; zeros if it had no such state."""
        if (name, key) not in self._parts:
            return torch.zeros(stop - start, dtype=self.parameters[name].dtype)
        return self._read(name, key, start, stop)

    def read_parameter(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a flattened parameter; of its moving average if that was chosen."""
        key = AVERAGE if self.averaged and (name, AVERAGE) in self._parts else None
        return self._read(name, key, start, stop)

    def buffers(self) -> dict[str, torch.Tensor]:
        """The model's buffers by name."""
        found = {}
        for name, rows in self._buffers.items():
            if rows[0].of is None:
                found[name] = self._tensors.read(rows[0].file, rows[0].tensor)
                continue
            found[name] = torch.empty(rows[0].full.shape, dtype=rows[0].full.dtype)
            for row in rows:
                assert row.of is not None
                row.of.fill(found[name], self._tensors.read(row.file, row.tensor))
        return found

    def buffer_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (rows[0].full.shape, rows[0].full.dtype) for name, rows in self._buffers.items()}

    def shapes_by_sum(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor that has a checksum, by the checksum's name."""
        shapes = {
            name_of(name, key): self.parameters[name].shape
            for name, key in self._parts
            if key is None or not key.startswith(PRIVATE)
        }
        return shapes | {f"buffer {name}": rows[0].full.shape for name, rows in self._buffers.items()}

    def verify_file(self, name: str) -> None:
        """Raises if a file is not byte for byte what was written, or not what the manifest describes."""
        self._tensors.verify(name, *self.files[name])

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
                found.append(self._tensors.read(part.file, part.tensor, low - part.start, high - part.start))
        if not found:
            return torch.empty(0, dtype=self.parameters[name].dtype)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _assemble(self, name: str, key: str | None, parts: list[StoredRange]) -> torch.Tensor:
        """The full tensor, assembled from parts. The last one is cached: its ranges are read one after the other."""
        if self._assembled is None or self._assembled[0] != (name, key):
            shape = self.parameters[name].shape
            pieces: dict[int, list[torch.Tensor]] = {}
            for part in parts:
                assert part.of is not None
                pieces.setdefault(part.of.index, []).append(self._tensors.read(part.file, part.tensor).reshape(-1))
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

    def _tensors_expected(self) -> dict[str, dict[str, Stored]]:
        """For each file, the tensors that the manifest describes."""
        found: dict[str, dict[str, Stored]] = {name: {} for name in self.files}
        for file, tensor, stored in self._tensor_rows():
            if tensor in found.setdefault(file, {}):
                raise ValueError(f"{tensor!r} of {file} serves two purposes")
            found[file][tensor] = stored
        return found

    def _tensor_rows(self) -> Iterator[tuple[str, str, Stored]]:
        for (name, key), parts in self._parts.items():
            for p in parts:
                full = self.parameters[name]
                local = full.shape if p.of is None else p.of.local_shape(full.shape)
                dtype = full.dtype if key is None else None
                yield p.file, p.tensor, Stored((p.stop - p.start,), dtype, p.is_complex, p.sum, p.start, p.of, local)
        for rows in self._buffers.values():
            for b in rows:
                shape = b.full.shape if b.of is None else b.of.local_shape(b.full.shape)
                stored = Stored(shape, b.full.dtype, b.full.dtype.is_complex, b.sum, 0, b.of, shape)
                yield b.file, b.tensor, stored
        for row in self._extras.values():
            yield row.file, row.tensor, Stored(None, None, row.is_complex, row.sum)

    def _require_value(self, name: str, key: str, row: Any) -> None:
        """Checks that a value can be decoded and its tensors are in the manifest."""

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
        """Checks that every element is present once, in files of the manifest."""
        used = {file for file, _, _ in self._tensor_rows()}
        for file in {*used, *self.files}:
            if file not in self.files or not _FILE.fullmatch(file):
                raise CheckpointBroken(f"{self.path / MANIFEST} names the file {file!r}, which it does not list")
        if len(self.files) != self.world:
            raise CheckpointBroken(
                f"{self.path / MANIFEST} has {len(self.files)} files for {self.world} ranks: each rank writes one"
            )
        for name, rows in self._buffers.items():
            if not buffer_complete(rows):
                raise CheckpointBroken(f"{self.path} is incomplete: elements of the buffer {name} are missing")
        for name, numbers in (*self._numbers.items(), *self._common.items()):
            for key, (_, kind) in numbers.items():
                if not is_kind(kind):
                    raise CheckpointBroken(
                        f"{self.path / MANIFEST} holds {key} of {name} as {kind!r}, which is not a number"
                    )
                self._require_value(name, key, numbers[key])
        strange = next((name for name in self._numbers if name not in self.parameters), None)
        strange = strange or next((where for where in self._common if not _PLACE.fullmatch(where)), None)
        if strange is not None:
            raise CheckpointBroken(f"{self.path / MANIFEST} holds numbers of {strange!r}, which no optimiser keeps")
        whole = [(name, None) for name in self.parameters]
        for name, key in {*whole, *self._parts}:
            parts = self._parts.get((name, key), [])
            if name not in self.parameters or not complete(parts, self.parameters[name].shape):
                raise CheckpointBroken(
                    f"{self.path} is incomplete: elements of {key or 'the values'} of {name} are missing"
                )
        self._require_sums()

    def _require_sums(self) -> None:
        """Checks that the checksums of the ranges add up to those of the tensors, and that no tensor lacks one."""
        total: dict[str, int | None] = {}
        for (name, key), parts in self._parts.items():
            if key is None or not key.startswith(PRIVATE):
                total[name_of(name, key)] = added(part.sum for part in parts)
        total |= {f"buffer {name}": added(row.sum for row in rows) for name, rows in self._buffers.items()}
        for name in {*total, *self.sums} if self.sums else ():
            if name not in total or name not in self.sums or total[name] not in (None, self.sums[name]):
                raise CheckpointBroken(f"{self.path / MANIFEST} does not agree with its own checksum of {name}")

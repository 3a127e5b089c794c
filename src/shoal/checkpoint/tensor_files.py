"""The tensor files of a checkpoint, validated against the manifest.

Every tensor must be present with the size and dtype of its row. A verified file is also compared with its SHA-256, and
each of its tensors with the checksum of its row: two tensors swapped in a file with a new SHA-256 are detected.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shoal.checkpoint.checksum import checksum
from shoal.checkpoint.files import COMPLEX, DTYPES, MANIFEST, about_file
from shoal.checkpoint.regular import open_regular
from shoal.checkpoint.rows import CheckpointBroken, Stored


class TensorFiles:
    """The tensor files of one checkpoint; each is opened when it is first read."""

    def __init__(self, path: Path, step: int, expected: Mapping[str, Mapping[str, Stored]]) -> None:
        self.path, self.step, self.expected = path, step, expected
        self._open: dict[str, Any] = {}

    def read(self, file: str, tensor: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """A tensor, or elements [start, stop) of its first dimension."""
        if file not in self._open:
            self._open[file] = self._opened(file)
        values = self._open[file].get_tensor(tensor) if stop is None else self._open[file].get_slice(tensor)[start:stop]
        return torch.view_as_complex(values) if self.expected[file][tensor].is_complex else values

    def _opened(self, name: str) -> Any:
        """Opens a tensor file and checks its tensors against the manifest."""
        path = self.path / name
        try:
            open_regular(path).close()
            file = safe_open(path, framework="pt")
            present = {tensor: file.get_slice(tensor) for tensor in file.keys()}  # noqa: SIM118  (not a dict)
        except (OSError, SafetensorError) as error:
            raise CheckpointBroken(f"{path} cannot be read: {why(error)}") from error
        about = file.metadata()
        if about is not None and about != about_file(self.step, name):
            raise CheckpointBroken(f"{path} was written as {about.get('file')} of step {about.get('step')}")
        expected = self.expected[name]
        if present.keys() != expected.keys():
            odd = sorted(present.keys() ^ expected.keys())[0]
            how = "is missing" if odd in expected else f"is not in {MANIFEST}"
            raise CheckpointBroken(f"{path} does not hold what {MANIFEST} says: the tensor {odd!r} {how}")
        for tensor, stored in expected.items():
            shape, dtype = tuple(present[tensor].get_shape()), present[tensor].get_dtype()
            pairs = (2,) if stored.is_complex else ()
            whole = shape[-1:] == pairs if stored.shape is None else shape == (*stored.shape, *pairs)
            if (stored.is_complex and not whole) or (stored.shape is not None and not whole):
                raise CheckpointBroken(
                    f"{path} does not hold what {MANIFEST} says: {tensor!r} has shape {list(shape)}, not "
                    f"{[*(stored.shape or ['...']), *pairs]}"
                )
            wanted = None if stored.dtype is None else DTYPES[COMPLEX.get(stored.dtype, stored.dtype)]
            known = ("F32", "F64") if stored.is_complex else DTYPES.values()
            if dtype not in known or (wanted is not None and dtype != wanted):
                raise CheckpointBroken(
                    f"{path} does not hold what {MANIFEST} says: {tensor!r} has type {dtype}, not "
                    f"{wanted or 'a type of this format'}"
                )
        return file

    def verify(self, name: str, size: int, digest: str) -> None:
        """Raises if a file is not byte for byte what was written, or not what the manifest describes."""
        path = self.path / name
        try:
            with open_regular(path) as file:
                present = os.fstat(file.fileno()).st_size
                if present < size:
                    raise CheckpointBroken(f"{path} is truncated: it has {present} bytes of {size}")
                altered = present != size or hashlib.file_digest(file, "sha256").hexdigest() != digest
        except FileNotFoundError as error:
            raise CheckpointBroken(f"{path} is missing") from error
        except OSError as error:
            raise CheckpointBroken(f"{path} cannot be read: {why(error)}") from error
        if altered:
            raise CheckpointBroken(
                f"{path} has been altered since it was written: its checksum is not the one recorded"
            )
        for tensor, stored in self.expected[name].items():
            if stored.sum is not None and self._sum(name, tensor, stored) != stored.sum:
                raise CheckpointBroken(
                    f"{path} does not hold what {MANIFEST} says: the values of {tensor!r} differ from those saved"
                )

    def _sum(self, name: str, tensor: str, stored: Stored) -> int:
        return checksum(self.read(name, tensor), stored.start, stored.of, stored.local)


def why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)

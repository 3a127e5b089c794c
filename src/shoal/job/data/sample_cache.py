"""Samples as they were decoded, in one mapped file: the second reading of a sample is a copy from memory.

    train = SampleCache(TarData(urls, x="jpg", y="cls", cache=ShardCache("~/.cache/shards")), "~/.cache/decoded")

All ranks and loaders of a host, and later runs, share the file. The kernel keeps in memory what there is room for, and
writes the rest to the local disk. No sample makes room for another: in every epoch each is read once in random order,
where a cache that replaces keeps dropping what comes next, and one that does not serves the part that it holds.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.job.errors import JobError

HEADER, SAMPLES, SUMS = "samples.json", "samples.bin", "samples.sums"
FORMAT = "shoal samples 1"


class SampleCache:
    """Data whose samples have one shape, kept as they were first read."""

    def __init__(self, data: Any, folder: str | Path, *, most_bytes: int | None = None, version: str = "") -> None:
        """
        Args:
            data: What reads and decodes samples.
            folder: Where they are kept, one folder for each data. In `/dev/shm` they never reach a disk.
            most_bytes: The first samples up to this many bytes are kept, the others read every time. None: all.
            version: A text to change when `data` decodes differently from before.
        """
        self.data, self.folder = data, Path(folder).expanduser()
        first = data.batch(np.array([0]))
        self.entries = {name: (value.dtype, tuple(value.shape[1:])) for name, value in first.items()}
        self.sizes = {name: value[0].numel() * value.element_size() for name, value in first.items()}
        self.record = sum(self.sizes.values())
        fit = len(data) if most_bytes is None else min(len(data), most_bytes // max(1, self.record))
        header = {
            "format": FORMAT,
            "samples": len(data),
            "kept": fit,
            "version": version,
            "entries": [
                [name, str(kind).removeprefix("torch."), list(shape)] for name, (kind, shape) in self.entries.items()
            ],
        }
        self.kept = fit
        self._open(header)

    def _open(self, header: dict[str, Any]) -> None:
        """Maps the files, made by whoever comes first."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / ".lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                path = self.folder / HEADER
                if not path.exists():
                    self._make(header)
                known = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise JobError(f"{self.folder} cannot keep samples: {error}; give another folder") from None
        if known != header:
            before = known if isinstance(known, dict) else {}
            other = next((name for name in header if before.get(name) != header[name]), "header")
            raise JobError(
                f"{self.folder} keeps samples of other data (another {other}); delete it, or give another folder"
            )
        if self.kept and self.record:
            shape = (self.kept, self.record)
            self._samples = np.memmap(self.folder / SAMPLES, dtype=np.uint8, mode="r+", shape=shape)
            self._sums = np.memmap(self.folder / SUMS, dtype=np.uint32, mode="r+", shape=(self.kept,))
        else:
            self.kept = 0

    def _make(self, header: dict[str, Any]) -> None:
        for name, size in ((SAMPLES, self.kept * self.record), (SUMS, 4 * self.kept)):
            with open(self.folder / name, "wb") as file:
                os.truncate(file.fileno(), size)  # Takes room on the disk only where it is written.
        part = self.folder / f"{HEADER}.part"
        part.write_text(json.dumps(header), encoding="utf-8")
        part.replace(self.folder / HEADER)

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        wanted = np.asarray(indices, dtype=np.int64)
        rows: list[np.ndarray | None] = [self._found(int(index)) for index in wanted]
        missing = np.unique(wanted[[row is None for row in rows]]) if len(wanted) else wanted
        if len(missing):
            read = self._read(missing)
            rows = [read[int(index)] if row is None else row for index, row in zip(wanted, rows, strict=True)]
        joined = np.stack([row for row in rows if row is not None]) if rows else np.zeros((0, self.record), np.uint8)
        found, begin = {}, 0
        for name, (kind, shape) in self.entries.items():
            part = np.ascontiguousarray(joined[:, begin : begin + self.sizes[name]])
            begin += self.sizes[name]
            flat = torch.from_numpy(part).reshape(-1)
            found[name] = (
                flat.view(kind).reshape(len(wanted), *shape)
                if flat.numel()
                else torch.empty((len(wanted), *shape), dtype=kind)
            )
        return found

    def _found(self, index: int) -> np.ndarray | None:
        """The bytes of a sample that is kept. A checksum tells one that was not written to its end."""
        if index >= self.kept or not self._sums[index]:
            return None
        row = np.array(self._samples[index])
        return row if _sum(row) == self._sums[index] else None

    def _read(self, missing: np.ndarray) -> dict[int, np.ndarray]:
        """Reads samples, and keeps those that there is room for. Two that read the same one write the same bytes."""
        batch = self.data.batch(missing)
        for name, (kind, shape) in self.entries.items():
            given = batch.get(name)
            if given is None or given.dtype != kind or tuple(given.shape) != (len(missing), *shape):
                what = "nothing" if given is None else f"{list(given.shape[1:])} of {given.dtype}"
                raise JobError(
                    f"entry {name} of samples {missing[:8].tolist()} is {what}, but sample 0 has {list(shape)} of "
                    f"{kind}; a SampleCache needs samples of one shape"
                )
        parts = [
            value.contiguous().reshape(-1).view(torch.uint8).numpy().reshape(len(missing), self.sizes[name])
            for name, value in ((name, batch[name]) for name in self.entries)
            if self.sizes[name]
        ]
        rows = np.concatenate(parts, axis=1) if parts else np.zeros((len(missing), 0), np.uint8)
        for index, row in zip(missing.tolist(), rows, strict=True):
            if index < self.kept:
                self._samples[index] = row
                self._sums[index] = _sum(row)
        return dict(zip(missing.tolist(), rows, strict=True))


def _sum(row: np.ndarray) -> int:
    """Never 0, which means that there is no sample."""
    return zlib.crc32(row.tobytes()) or 1

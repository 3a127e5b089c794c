"""Samples in tar shards, as WebDataset writes them: files of one sample follow each other and share their name up to
the first dot.

    TarData("shards/train-*.tar", x="npy", y="cls")

A shard is indexed once, by its headers; after that a sample is read by its place, so a batch is a function of the
indices like everywhere else. Shards are local files, or fetched into a cache on disk when they are first needed
(`shard_cache.py`). Nothing is unpickled.
"""

from __future__ import annotations

import glob
import io
import json
import os
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.job.data.shard_cache import KNOWN, ShardCache
from shoal.job.errors import JobError

MOST_OPEN = 64
"""Shards that are open at once; the limit of a process is often 1,024 files."""
ATTEMPTS = 5

Place = tuple[int, int]
"""Where a file's bytes begin in its shard, and their number."""
Decoder = Callable[[bytes], Any]


def _npy(content: bytes) -> Any:
    return np.load(io.BytesIO(content), allow_pickle=False)


def _image(content: bytes) -> Any:
    """Height, width, channels as bytes."""
    try:
        from PIL import Image
    except ImportError:
        raise JobError("images in tar shards need the package pillow: pip install pillow") from None
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image.convert("RGB")).copy()


DECODERS: dict[str, Decoder] = {
    "npy": _npy,
    "cls": lambda content: int(content),
    "json": lambda content: json.loads(content),
    "bin": lambda content: np.frombuffer(content, dtype=np.uint8).copy(),
    "png": _image,
    "jpg": _image,
    "jpeg": _image,
}
"""By the end of a file's name."""


class TarData:
    """Samples in tar shards. `entries` names the batch's entries by the ends of the files: `TarData(..., x="npy")`."""

    def __init__(
        self,
        shards: str | Path | Sequence[str | Path],
        *,
        decode: Mapping[str, Decoder] | None = None,
        cache: ShardCache | None = None,
        **entries: str,
    ) -> None:
        """
        Args:
            shards: Paths or URLs, or one pattern of local paths such as `"train-*.tar"`.
            decode: Functions from the bytes of a file to a number, an array or a tensor, by the end of its name. Known
                without: npy, cls (an integer), json, bin, png, jpg.
            cache: Where shards are fetched to. None: they are local files.
            entries: The end of the file that each entry of a batch is read from.
        """
        self.shards = _listed(shards)
        self.cache = cache
        self.decoders = {**DECODERS, **(decode or {})}
        self.entries = entries
        if not entries:
            raise JobError('TarData() was given no entries; name them, for example TarData("a.tar", x="npy", y="cls")')
        unknown = [end for end in entries.values() if end not in self.decoders]
        if unknown:
            raise JobError(f"TarData() cannot decode .{unknown[0]}; give decode={{{unknown[0]!r}: function}}")
        self.samples: list[tuple[int, dict[str, Place]]] = []
        for number, shard in enumerate(self.shards):
            for name, places in self._index(shard).items():
                missing = [end for end in entries.values() if end not in places]
                if missing:
                    known = ", ".join(sorted(places))
                    raise JobError(f"{shard}: sample {name} has no file .{missing[0]}; it has {known}")
                self.samples.append((number, {end: places[end] for end in entries.values()}))
        self._open: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        wanted = [int(index) for index in indices]
        rows = [self._sample(index) for index in wanted or [0]]
        joined = {}
        for name in self.entries:
            try:
                joined[name] = torch.stack([torch.as_tensor(row[name]) for row in rows])
            except (RuntimeError, TypeError, ValueError) as error:
                raise JobError(
                    f"entry {name} of samples {wanted} cannot be joined to a batch ({error}); let decode= give "
                    "tensors of one shape"
                ) from None
        return joined if wanted else {name: value[:0] for name, value in joined.items()}

    def _sample(self, index: int) -> dict[str, Any]:
        number, places = self.samples[index]
        found = {}
        for name, end in self.entries.items():
            begin, size = places[end]
            content = os.pread(self._shard(number), size, begin)
            try:
                if len(content) != size:
                    raise ValueError(f"the shard ends after {len(content)} of {size} bytes")
                found[name] = self.decoders[end](content)
            except JobError:
                raise
            except Exception as error:
                shard = self.shards[number]
                raise JobError(f"{shard}: entry {name} of sample {index} cannot be read ({error})") from None
        return found

    def _shard(self, number: int) -> int:
        """A descriptor of the shard. Reads by place do not disturb each other, also after a fork."""
        if number not in self._open:
            if len(self._open) >= MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[number] = self._opened(self.shards[number])
        return self._open[number]

    def _opened(self, shard: str) -> int:
        for attempt in range(ATTEMPTS):
            try:
                return os.open(self._local(shard), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                if self.cache is None or attempt == ATTEMPTS - 1:
                    raise
                # Another process made room with it between the look and the opening.
        raise AssertionError(shard)

    def _index(self, shard: str) -> dict[str, dict[str, Place]]:
        """Of a cached shard it is kept, so that later runs need not fetch a shard to know its samples."""
        if self.cache is None:
            return index_of(Path(shard))
        kept = self.cache.beside(shard, KNOWN)
        try:
            found = json.loads(kept.read_text(encoding="utf-8"))
            return {name: {end: (int(at[0]), int(at[1])) for end, at in ends.items()} for name, ends in found.items()}
        except (OSError, ValueError, TypeError, LookupError, AttributeError):
            pass  # Absent or damaged: made anew.
        index = index_of(self._local(shard))
        temporary = kept.with_name(f"{kept.name}.{os.getpid()}.part")
        temporary.write_text(json.dumps(index), encoding="utf-8")
        temporary.replace(kept)
        return index

    def _local(self, shard: str) -> Path:
        return Path(shard) if self.cache is None else self.cache.path(shard)


def index_of(path: Path) -> dict[str, dict[str, Place]]:
    """Sample -> end of its file -> place, in the order of the shard, read from the headers alone."""
    found: dict[str, dict[str, Place]] = {}
    try:
        with tarfile.open(path, mode="r:") as shard:  # Compressed shards cannot be read by place.
            for member in shard:
                if member.isreg() and member.offset_data + member.size <= path.stat().st_size:
                    folder, _, file = member.name.rpartition("/")
                    name, _, end = file.partition(".")
                    found.setdefault(f"{folder}/{name}" if folder else name, {})[end.lower()] = (
                        member.offset_data,
                        member.size,
                    )
                elif member.isreg():
                    raise tarfile.ReadError(f"{member.name} is cut off")
    except (OSError, tarfile.TarError) as error:
        raise JobError(f"{path}: it is not an uncompressed tar file ({error})") from None
    if not found:
        raise JobError(f"{path}: it holds no samples")
    return found


def _listed(shards: str | Path | Sequence[str | Path]) -> list[str]:
    if isinstance(shards, str | Path):
        text = str(shards)
        found = sorted(glob.glob(text)) if glob.has_magic(text) and "://" not in text else [text]
        if not found:
            raise JobError(f"no file is called {text}")
        return found
    if not shards:
        raise JobError("TarData() was given no shards")
    return [str(shard) for shard in shards]

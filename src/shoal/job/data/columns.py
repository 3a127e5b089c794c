"""Columns of a dataset of Hugging Face datasets, as the entries of a batch.

    ColumnData(load_from_disk("tokenized"), x="input_ids", y="labels")

A batch is one lookup in the table that the library keeps mapped on disk, not one for each sample.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.job.data.tensors import as_arrays
from shoal.job.errors import JobError


class ColumnData:
    """A `datasets.Dataset`. `entries` names the batch's entries by columns: `ColumnData(dataset, x="input_ids")`."""

    def __init__(self, dataset: Any, **entries: str) -> None:
        """
        Args:
            dataset: With rows by index. A format or transform that was set on it is kept; without one rows are arrays.
            entries: The column that each entry of a batch is read from.
        """
        known = getattr(dataset, "column_names", None)
        if isinstance(known, dict):
            raise JobError(
                f"ColumnData was given a {type(dataset).__name__} with the splits {', '.join(known)}; choose one, such "
                f"as dataset[{next(iter(known), 'train')!r}]"
            )
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__") or known is None:
            raise JobError(
                f"ColumnData needs a datasets.Dataset with rows by index, but got a {type(dataset).__name__}; load it "
                "without streaming, or write it as tar shards (TarData)"
            )
        if not entries:
            raise JobError(f'ColumnData() was given no entries; name them, such as x="{known[0]}"; columns: {known}')
        missing = [column for column in entries.values() if column not in known]
        if missing:
            raise JobError(f"the dataset has no column {missing[0]!r}; it has {', '.join(known)}")
        self.entries = entries
        self.dataset = as_arrays(dataset.select_columns(list(dict.fromkeys(entries.values()))))

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        # An empty batch takes its shapes from the first row.
        wanted = [int(index) for index in indices]
        rows = self.dataset[wanted or [0]]
        found = {name: _tensor(column, rows[column]) for name, column in self.entries.items()}
        return found if wanted else {name: value[:0] for name, value in found.items()}


def _tensor(column: str, values: Any) -> Tensor:
    try:
        if isinstance(values, list):
            return torch.stack([torch.as_tensor(each) for each in values])
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise JobError(
            f"column {column!r} cannot be joined to a batch ({error}); texts must be tokenized, and rows cut or padded "
            "to one length: dataset.map(...)"
        ) from None

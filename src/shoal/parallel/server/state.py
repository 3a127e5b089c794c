"""Parameters and optimiser state on their way between a worker and a server: a JSON table, and its tensors.

A checkpoint is written and read by workers, as for every other owner; so the state of the servers travels to those of
the first replica before a save, and back after a restore.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shoal.job.kept import Common
from shoal.parallel.flat_slice import HeldState, Piece, SavedState
from shoal.parallel.optimizer import SlicedOptimizer

Table = tuple[dict[str, Any], list[torch.Tensor]]


class ReceivedState(HeldState):
    """State from another rank, as a SavedState."""

    def __init__(self, tables: Sequence[Table]) -> None:
        values: dict[str, dict[str, Any]] = {}
        pieces: list[tuple[str, Piece]] = []
        self._common: Common = {}
        for table, tensors in tables:
            values |= _unpacked(table["values"], tensors)
            self._common = self._common or _unpacked(table["common"], tensors)
            rows = table["state"]
            pieces += [(key, Piece(name, tuple(shape), start, tensors[at])) for key, name, shape, start, at in rows]
        super().__init__(values, pieces)

    def common(self) -> Common:
        return self._common


def state_table(optimizer: SlicedOptimizer) -> Table:
    """All that an optimiser keeps."""
    tensors: list[torch.Tensor] = []
    rows = []
    for key, piece in optimizer.state(lambda bucket: (0, bucket.buffer.padded)):
        rows.append([key, piece.name, list(piece.shape), piece.start, len(tensors)])
        tensors.append(piece.values)
    values, kept = _packed(optimizer.values(), tensors), _packed(optimizer.common(), tensors)
    return {"state": rows, "values": values, "common": kept}, tensors


def saved_table(saved: SavedState, pieces: Sequence[Piece]) -> Table:
    """What saved state holds of some ranges of parameters."""
    tensors: list[torch.Tensor] = []
    rows = []
    for piece in pieces:
        for key in saved.keys(piece.name):
            stop = piece.start + piece.values.numel()
            rows.append([key, piece.name, list(piece.shape), piece.start, len(tensors)])
            tensors.append(saved.read(piece.name, key, piece.start, stop))
    names = dict.fromkeys(piece.name for piece in pieces)
    values = _packed({name: saved.values(name) for name in names}, tensors)
    return {"state": rows, "values": values, "common": _packed(saved.common(), tensors)}, tensors


def _packed(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach().cpu())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, dict):
        return {"entries": [[key, _packed(entry, tensors)] for key, entry in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list" if isinstance(value, list) else "tuple": [_packed(entry, tensors) for entry in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(
        f"the optimiser keeps a {type(value).__name__}, and what servers keep is numbers, text, lists, dicts and "
        "tensors; train with via=allreduce()"
    )


def _unpacked(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "entries" in value:
        return {key: _unpacked(entry, tensors) for key, entry in value["entries"]}
    kind: Any = list if "list" in value else tuple
    return kind(_unpacked(entry, tensors) for entry in value["list" if kind is list else "tuple"])

"""Tensors laid out flat for the wire, and cut into the parts of a collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.comm.vector import Vector


class Flat:
    """A tensor laid out flat: itself if it lies so, or a copy that `restore` writes back."""

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu":
            raise ValueError(f"the shoal backend carries tensors in host memory, not on {tensor.device}; use nccl")
        if tensor.is_sparse:
            raise ValueError("the shoal backend carries dense tensors; call to_dense() first")
        self.tensor = tensor.detach()
        self.data = self.tensor.contiguous().view(-1)
        self.vector = Vector(self.data)

    def restore(self) -> None:
        if self.data.data_ptr() != self.tensor.data_ptr():
            self.tensor.copy_(self.data.view(self.tensor.shape))

    def parts(self, counts: Sequence[int]) -> list[Vector]:
        return [Vector(part) for part in self.data.split(list(counts))]


class Joined:
    """Several tensors as one: one message in place of many small ones."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._flats = [Flat(tensor) for tensor in tensors]
        self.data = self._flats[0].data if len(tensors) == 1 else torch.cat([flat.data for flat in self._flats])
        self.vector = self._flats[0].vector if len(tensors) == 1 else Vector(self.data)

    def restore(self) -> None:
        if len(self._flats) > 1:
            for flat, values in zip(self._flats, self.data.split([len(f.data) for f in self._flats]), strict=True):
                flat.data.copy_(values)
        for flat in self._flats:
            flat.restore()


def even_parts(flat: Flat, ranks: int) -> list[Vector]:
    if len(flat.data) % ranks:
        raise ValueError(f"{len(flat.data)} elements do not divide among {ranks} ranks")
    return flat.parts([len(flat.data) // ranks] * ranks)


def parts_by_rows(flat: Flat, rows: Sequence[int], ranks: int) -> list[Vector]:
    """The parts of an all-to-all: so many rows for each rank, or as many for all."""
    if not rows:
        return even_parts(flat, ranks)
    width = len(flat.data) // max(1, flat.tensor.shape[0])
    if len(rows) != ranks or sum(rows) != flat.tensor.shape[0]:
        given = flat.tensor.shape[0]
        raise ValueError(f"split sizes {list(rows)} are not one for each of {ranks} ranks that sum to {given} rows")
    return flat.parts([width * count for count in rows])

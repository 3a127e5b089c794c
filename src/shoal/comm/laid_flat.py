"""Tensors laid out flat for the wire, and cut into the parts of a collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.comm.vector import Vector


class Flat:
    """A tensor laid out flat: itself if it lies so, or a copy that `restore` writes back."""

    __slots__ = ("data", "tensor", "vector")

    def __init__(self, tensor: torch.Tensor) -> None:
        if not tensor.is_cpu:
            raise ValueError(f"the shoal backend carries tensors in host memory, not on {tensor.device}; use nccl")
        if tensor.is_sparse:
            raise ValueError("the shoal backend carries dense tensors; call to_dense() first")
        self.tensor = tensor
        self.data = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
        self.vector = Vector(self.data)

    def restore(self) -> None:
        if self.data is not self.tensor:
            self.tensor.detach().copy_(self.data)

    def parts(self, counts: Sequence[int]) -> list[Vector]:
        """So many elements each, one after the other."""
        start, parts = 0, []
        for count in counts:
            parts.append(self.vector.slice(start, start + count))
            start += count
        return parts


class Joined:
    """Several tensors as one: one message in place of many small ones."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._flats = flats = [Flat(tensor) for tensor in tensors]
        if len(flats) == 1:
            self.data, self.vector = flats[0].data, flats[0].vector
        else:
            self.data = torch.cat([flat.data.detach().view(-1) for flat in flats])
            self.vector = Vector(self.data)

    def restore(self) -> None:
        if len(self._flats) > 1:
            for flat, values in zip(self._flats, self.data.split([len(f.vector) for f in self._flats]), strict=True):
                flat.data.detach().view(-1).copy_(values)
        for flat in self._flats:
            flat.restore()


def even_parts(flat: Flat, ranks: int) -> list[Vector]:
    count = len(flat.vector)
    if count % ranks:
        raise ValueError(f"{count} elements do not divide among {ranks} ranks")
    return flat.parts([count // ranks] * ranks)


def parts_by_rows(flat: Flat, rows: Sequence[int], ranks: int) -> list[Vector]:
    """The parts of an all-to-all: so many rows for each rank, or as many for all."""
    if not rows:
        return even_parts(flat, ranks)
    given = flat.tensor.shape[0]
    if len(rows) != ranks or sum(rows) != given:
        raise ValueError(f"split sizes {list(rows)} are not one for each of {ranks} ranks that sum to {given} rows")
    width = len(flat.vector) // max(1, given)
    return flat.parts([width * count for count in rows])

"""Tensors flattened for the wire, and split into the parts of a collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.comm.vector import Vector


class Flat(Vector):
    """A flattened tensor: itself if it is contiguous, or a copy that `restore` writes back."""

    __slots__ = ("given",)

    def __init__(self, given: torch.Tensor) -> None:
        if not given.is_cpu:
            raise ValueError(f"the shoal backend carries tensors in host memory, not on {given.device}; use nccl")
        if given.is_sparse:
            raise ValueError("the shoal backend carries dense tensors; call to_dense() first")
        super().__init__(given if given.is_contiguous() else given.detach().contiguous())
        self.given = given

    def restore(self) -> None:
        if self.tensor is not self.given:
            self.given.detach().copy_(self.tensor)


class Joined(Vector):
    """Several tensors concatenated: one message instead of many small ones."""

    __slots__ = ("_given",)

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        self._given = [Flat(tensor) for tensor in given]
        super().__init__(torch.cat([flat.tensor.detach().view(-1) for flat in self._given]))

    def restore(self) -> None:
        for flat, values in zip(self._given, self.tensor.split([len(flat) for flat in self._given]), strict=True):
            flat.given.detach().copy_(values.view(flat.given.shape))


def as_few(given: Sequence[torch.Tensor]) -> Sequence[Flat | Joined]:
    """Tensors as one vector if they have one dtype."""
    if len(given) > 1 and len({tensor.dtype for tensor in given}) == 1:
        return [Joined(given)]
    return [Flat(tensor) for tensor in given]


def even_parts(flat: Flat, ranks: int) -> list[Vector]:
    tensor, memory, size = flat.tensor, flat.bytes, flat.nbytes // ranks
    if flat.nbytes % (ranks * tensor.itemsize):
        raise ValueError(f"{len(flat)} elements do not divide among {ranks} ranks")
    return [Vector(tensor, memory[size * rank : size * (rank + 1)]) for rank in range(ranks)]


def parts_by_rows(flat: Flat, rows: Sequence[int], ranks: int) -> list[Vector]:
    """The parts of an all-to-all: the given number of rows for each rank, or equal numbers."""
    if not rows:
        return even_parts(flat, ranks)
    given = flat.given.shape[0]
    if len(rows) != ranks or sum(rows) != given:
        raise ValueError(f"split sizes {list(rows)} are not one for each of {ranks} ranks that sum to {given} rows")
    width, parts, start = len(flat) // max(1, given), [], 0
    for count in rows:
        parts.append(flat.slice(start, start + width * count))
        start += width * count
    return parts

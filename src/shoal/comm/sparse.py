"""A rank's sparse tensor as the dense ones that travel (indices and values), and what all ranks must have alike."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SparseParts:
    """Indices and values of all ranks, in the order of ranks."""

    indices: list[torch.Tensor]
    values: list[torch.Tensor]
    shape: torch.Size

    def sum_into(self, tensor: torch.Tensor, *, divide_by: int) -> None:
        """Makes `tensor` their sum, coalesced."""
        indices, values = torch.cat(self.indices, 1), torch.cat(self.values)
        total = torch.sparse_coo_tensor(indices, values, self.shape, check_invariants=True).coalesce()
        if divide_by > 1:
            total = total.div(divide_by) if total.is_floating_point() or total.is_complex() else total // divide_by
        # Not of a detached tensor: of a sparse one that would be another tensor.
        with torch.no_grad():
            tensor.copy_(total)


class SparsePart:
    """What one rank brings."""

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.layout != torch.sparse_coo or not tensor.is_cpu:
            raise ValueError(f"an all-reduce of sparse tensors takes COO tensors in host memory, not {tensor.layout}")
        own = tensor.detach().coalesce()
        self.indices, self.values, self.shape = own.indices().contiguous(), own.values().contiguous(), own.shape
        kind = f"{tuple(own.shape)} {own.sparse_dim()} {own.dtype}"
        digest = hashlib.sha256(kind.encode()).digest()
        self.about = torch.tensor([own._nnz(), int.from_bytes(digest[:7], "little")])
        """Elements, and a mark of shape and type: two numbers, whatever the tensor."""

    def parts(self, about: Sequence[torch.Tensor]) -> SparseParts:
        """Room for what all ranks bring. Raises where their tensors do not fit."""
        for rank, (_, mark) in enumerate(each.tolist() for each in about):
            if mark != self.about[1]:
                raise ValueError(
                    f"an all-reduce of sparse tensors: rank {rank} has another shape, number of sparse dimensions or "
                    f"type than {list(self.shape)}, {len(self.indices)}, {self.values.dtype} of this rank"
                )
        counts = [int(each[0]) for each in about]
        return SparseParts(
            [self.indices.new_empty(len(self.indices), count) for count in counts],
            [self.values.new_empty(count, *self.values.shape[1:]) for count in counts],
            self.shape,
        )

"""A sparse tensor as the dense tensors that are sent (indices and values), and the check that all ranks match."""

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
        """Sets `tensor` to their coalesced sum."""
        indices, values = torch.cat(self.indices, 1), torch.cat(self.values)
        total = torch.sparse_coo_tensor(indices, values, self.shape, check_invariants=True).coalesce()
        if divide_by > 1:
            total = total.div(divide_by) if total.is_floating_point() or total.is_complex() else total // divide_by
        # Not on a detached tensor: detaching a sparse tensor gives a different one.
        with torch.no_grad():
            tensor.copy_(total)


class SparsePart:
    """The contribution of one rank."""

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.layout != torch.sparse_coo or not tensor.is_cpu:
            raise ValueError(f"an all-reduce of sparse tensors takes COO tensors in host memory, not {tensor.layout}")
        own = tensor.detach().coalesce()
        self.indices, self.values, self.shape = own.indices().contiguous(), own.values().contiguous(), own.shape
        kind = f"{tuple(own.shape)} {own.sparse_dim()} {own.dtype}"
        digest = hashlib.sha256(kind.encode()).digest()
        self.about = torch.tensor([own._nnz(), int.from_bytes(digest[:7], "little")])
        """Number of elements, and a hash of shape and dtype."""

    def parts(self, about: Sequence[torch.Tensor]) -> SparseParts:
        """Buffers for the contributions of all ranks. Raises if their tensors do not match."""
        for rank, (_, mark) in enumerate(each.tolist() for each in about):
            if mark != self.about[1]:
                raise ValueError(
                    f"an all-reduce of sparse tensors: the shape, number of sparse dimensions or dtype of rank {rank} "
                    f"differs from this rank's {list(self.shape)}, {len(self.indices)}, {self.values.dtype}"
                )
        counts = [int(each[0]) for each in about]
        return SparseParts(
            [self.indices.new_empty(len(self.indices), count) for count in counts],
            [self.values.new_empty(count, *self.values.shape[1:]) for count in counts],
            self.shape,
        )

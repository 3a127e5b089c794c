"""A flat tensor for the wire: as bytes to send and as numbers to reduce.

NumPy does the arithmetic if it has the dtype (its slices and sums cost a third of torch's, which dominates small
messages); torch does it for bfloat16 and float16. Parts are sliced from the bytes, not from the tensor, for the same
reason.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from shoal.comm.transport.link import NO_BYTES, Bytes
from shoal.common.numbers import even_part

_AS_NUMPY: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.bool: np.bool_,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
}

_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.restype = ctypes.py_object
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200


@lru_cache(maxsize=1024)
def _bytes_at(address: int, size: int) -> Bytes:
    """Memory as an array. It does not own the memory, so it can be cached for the next tensor at that address.

    Not by `tensor.numpy()`: the storage could then never be resized, as stage 3 of ZeRO does.
    """
    return np.frombuffer(_memory_at(address, size, _WRITABLE), dtype=np.uint8) if size else NO_BYTES


Operation = tuple[Callable[..., Any], Callable[..., Any]]
"""A binary operation with `out`, in NumPy and in torch."""

OPERATIONS: dict[str, Operation] = {
    "sum": (np.add, torch.add),
    "product": (np.multiply, torch.mul),
    "min": (np.minimum, torch.minimum),
    "max": (np.maximum, torch.maximum),
    "band": (np.bitwise_and, torch.bitwise_and),
    "bor": (np.bitwise_or, torch.bitwise_or),
    "bxor": (np.bitwise_xor, torch.bitwise_xor),
}


class Vector:
    """A contiguous range of elements of a tensor, which it keeps alive."""

    __slots__ = ("bytes", "nbytes", "tensor")

    def __init__(self, tensor: torch.Tensor, part: Bytes | None = None) -> None:
        """`part`: the bytes of some of its elements; by default of all."""
        self.tensor = tensor
        self.bytes: Bytes = _bytes_at(tensor.data_ptr(), tensor.nbytes) if part is None else part
        self.nbytes = len(self.bytes)

    @property
    def itemsize(self) -> int:
        return self.tensor.itemsize

    def __len__(self) -> int:
        return self.nbytes // self.itemsize

    def slice(self, start: int, stop: int) -> Vector:
        itemsize = self.tensor.itemsize
        return Vector(self.tensor, self.bytes[start * itemsize : stop * itemsize])

    def parts(self, count: int) -> list[Vector]:
        """Split into `count` parts as evenly as possible, larger ones first."""
        return [self.slice(a, b) for a, b in even_ranges(len(self), count)]

    def like(self) -> Vector:
        """A new buffer of the same length."""
        return Vector(self.tensor.new_empty(len(self)))

    def copy_from(self, other: Vector) -> None:
        if self.nbytes:
            self.bytes[:] = other.bytes

    def reduce(self, start: int, window: Bytes, operation: Operation) -> None:
        """Reduces received bytes (complete elements) into the elements that begin at byte `start`."""
        mine = self.bytes[start : start + len(window)]
        known = _AS_NUMPY.get(self.tensor.dtype)
        if known is not None:
            numbers = mine.view(known)
            operation[0](numbers, window.view(known), out=numbers)
        else:
            own = torch.from_numpy(mine).view(self.tensor.dtype)
            operation[1](own, torch.from_numpy(window).view(own.dtype), out=own)


def even_ranges(length: int, count: int) -> list[tuple[int, int]]:
    """The range [0, length) in `count` parts, larger ones first."""
    return [even_part(length, count, part) for part in range(count)]


def total_bytes(vectors: Sequence[Vector]) -> int:
    return sum(vector.nbytes for vector in vectors)

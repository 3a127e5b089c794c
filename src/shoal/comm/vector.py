"""A tensor as the wire sees it: flat, as bytes to send and as numbers to reduce.

NumPy does the arithmetic where it has the type (a slice and a sum of it cost a third of torch's, which is what small
messages are made of); torch does it for bfloat16 and float16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from shoal.comm.transport.link import Bytes

_AS_NUMPY: dict[torch.dtype, Any] = {
    torch.float32: np.float32, torch.float64: np.float64, torch.int8: np.int8, torch.uint8: np.uint8,
    torch.int16: np.int16, torch.int32: np.int32, torch.int64: np.int64, torch.bool: np.bool_,
    torch.complex64: np.complex64, torch.complex128: np.complex128,
}  # fmt: skip

_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.restype = ctypes.py_object
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200

Operation = tuple[Callable[..., Any], Callable[..., Any]]
"""Of two arguments into `out`: NumPy's and torch's."""

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
    """A contiguous run of elements; `tensor` is flat and shares its memory."""

    __slots__ = ("bytes", "itemsize", "nbytes", "numbers", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.itemsize = tensor.element_size()
        self.nbytes = size = tensor.numel() * self.itemsize
        # Not by `tensor.numpy()`: its storage could never be resized again, as stage 3 of ZeRO does.
        memory = _memory_at(tensor.data_ptr(), size, _WRITABLE) if size else bytearray()
        self.bytes: Bytes = np.frombuffer(memory, dtype=np.uint8)
        known = _AS_NUMPY.get(tensor.dtype)
        self.numbers: Any = self.bytes.view(known) if known is not None else None

    def __len__(self) -> int:
        return self.nbytes // self.itemsize

    def slice(self, start: int, stop: int) -> Vector:
        return Vector(self.tensor[start:stop])

    def parts(self, count: int) -> list[Vector]:
        """Cut into so many parts, as even as can be, the larger ones first."""
        return [self.slice(a, b) for a, b in even_ranges(len(self), count)]

    def like(self) -> Vector:
        """Room for as many elements."""
        return Vector(torch.empty_like(self.tensor))

    def copy_from(self, other: Vector) -> None:
        if len(self.bytes):
            self.bytes[:] = other.bytes

    def reduce(self, start: int, window: Bytes, operation: Operation) -> None:
        """Elements that arrived as bytes are reduced into those that begin at byte `start`."""
        low, high = start // self.itemsize, (start + len(window)) // self.itemsize
        if self.numbers is not None:
            mine = self.numbers[low:high]
            operation[0](mine, window.view(self.numbers.dtype), out=mine)
        else:
            own = self.tensor[low:high]
            operation[1](own, torch.from_numpy(window).view(own.dtype), out=own)


def even_ranges(length: int, count: int) -> list[tuple[int, int]]:
    """The range [0, length) in so many parts, the larger ones first."""
    size, larger = divmod(length, count)
    starts = [size * part + min(part, larger) for part in range(count + 1)]
    return list(pairwise(starts))


def total_bytes(vectors: Sequence[Vector]) -> int:
    return sum(vector.nbytes for vector in vectors)

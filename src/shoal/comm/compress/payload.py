"""Payloads: tensors laid end to end as bytes, elements with their places, and small numbers packed so that none of them
takes more than its bits.

Bits go in planes: the lowest bits of all numbers, then the next ones. A plane is packed eight to a byte by numpy's
vector code where the tensor lies in host memory, by shifts elsewhere; the bytes are the same.
"""

from __future__ import annotations

import numpy as np
import torch

from shoal.comm.compress.sizes import INDEX_BYTES, TRITS_A_BYTE, divided_up


def laid_out(*parts: torch.Tensor) -> torch.Tensor:
    """The parts' bytes, end to end."""
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


class Reader:
    """Takes the parts of a payload off its front, in the order in which they were laid out."""

    def __init__(self, payload: torch.Tensor) -> None:
        self._rest = payload

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        size = count * dtype.itemsize
        part, self._rest = self._rest[:size], self._rest[size:]
        # A view needs an address that its type divides; a copy has one.
        aligned = part.data_ptr() % dtype.itemsize == 0 and part.storage_offset() % dtype.itemsize == 0
        return (part if aligned else part.clone()).view(dtype)


def packed_bits(bits: torch.Tensor) -> torch.Tensor:
    """Truth values (bool, or uint8 where all but 0 is true), eight to a byte, the first in the highest bit."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits.numpy()))
    return shifted_in(bits)


def unpacked_bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Zeros and ones as uint8."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=count))
    return shifted_out(packed, count)


def shifted_in(bits: torch.Tensor) -> torch.Tensor:
    """`packed_bits` on any device."""
    padded = torch.zeros(divided_up(len(bits), 8) * 8, dtype=torch.uint8, device=bits.device)
    padded[: len(bits)] = bits != 0
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=bits.device)
    return (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def shifted_out(packed: torch.Tensor, count: int) -> torch.Tensor:
    """`unpacked_bits` on any device."""
    shifts = torch.tensor([7, 6, 5, 4, 3, 2, 1, 0], dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & 1).view(-1)[:count]


def packed_numbers(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Whole numbers from 0 to 2**bits - 1 (int32), `bits` bits each."""
    planes = []
    for start in range(0, bits, 8):
        byte = (numbers >> start).to(torch.uint8)
        planes += [packed_bits(byte & (1 << bit)) for bit in range(min(8, bits - start))]
    return torch.cat(planes)


def unpacked_numbers(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The numbers as int32."""
    planes = packed.view(bits, -1)
    numbers = torch.zeros(count, dtype=torch.int32, device=packed.device)
    for start in range(0, bits, 8):
        byte = torch.zeros(count, dtype=torch.uint8, device=packed.device)
        for bit, plane in enumerate(planes[start : start + 8]):
            byte |= unpacked_bits(plane, count) << bit
        numbers |= byte.int() << start
    return numbers


def packed_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers of 2 or 4 bits (uint8), 8 / `bits` to a byte. Faster than planes, where `bits` divides a byte."""
    places = 8 // bits
    size = divided_up(len(codes), places)
    planes = torch.zeros(places * size, dtype=torch.uint8, device=codes.device)
    planes[: len(codes)] = codes
    packed, *others = planes.view(places, size).unbind()
    for place, plane in enumerate(others, 1):
        packed |= plane << (bits * place)
    return packed


def unpacked_codes(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The numbers as uint8."""
    planes = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.cat(planes)[:count]


def packed_trits(trits: torch.Tensor) -> torch.Tensor:
    """Numbers 0, 1 and 2 (uint8), five to a byte: 1.6 bits each, where information wants 1.58."""
    size = divided_up(len(trits), TRITS_A_BYTE)
    planes = torch.zeros(TRITS_A_BYTE * size, dtype=torch.uint8, device=trits.device)
    planes[: len(trits)] = trits
    packed = torch.zeros(size, dtype=torch.uint8, device=trits.device)
    for plane in reversed(planes.view(TRITS_A_BYTE, size).unbind()):
        packed = packed.mul_(3).add_(plane)
    return packed


def unpacked_trits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Numbers 0, 1 and 2 as uint8."""
    every_byte = torch.arange(256, dtype=torch.int32, device=packed.device)
    index = packed.int()
    planes = [(every_byte // 3**place % 3).to(torch.uint8).index_select(0, index) for place in range(TRITS_A_BYTE)]
    return torch.cat(planes)[:count]


def sparse_payload(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return laid_out(values, places.int())


def sparse_parts(payload: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and their places."""
    count = len(payload) // (dtype.itemsize + INDEX_BYTES)
    reader = Reader(payload)
    return reader.take(count, dtype), reader.take(count, torch.int32)

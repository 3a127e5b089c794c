"""Rows of a checkpoint's manifest: tensors, the ranges they consist of, and whether these are complete.

Each row is validated when it is read: sizes are numbers, cuts fit their tensors, ranges have no gap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from shoal.checkpoint.files import COMPLEX, DTYPES, dtype_name
from shoal.layout.cuts import Cut, TensorPart

_DTYPES = {dtype_name(dtype): dtype for dtype in (*DTYPES, *COMPLEX)}

MOST_STEPS = 1 << 48
MOST_ELEMENTS = 1 << 62


class CheckpointBroken(ValueError):
    """A checkpoint that is not what was written: truncated, altered, incomplete, or of a newer format."""


@dataclass(frozen=True, slots=True)
class StoredRange:
    """Elements [start, stop) of a flattened tensor (or of one rank's part of it), and the file that holds them."""

    start: int
    stop: int
    file: str
    tensor: str
    of: TensorPart | None = None
    """The part of the tensor, if it was split."""
    is_complex: bool = False
    sum: int | None = None
    """Its checksum (checksum.py); None in checkpoints of earlier versions."""


@dataclass(frozen=True, slots=True)
class Full:
    """An unsplit tensor, as in the model."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class StoredBuffer:
    """A buffer, or one rank's part of it."""

    full: Full
    file: str
    tensor: str
    of: TensorPart | None
    sum: int | None


@dataclass(frozen=True, slots=True)
class Extra:
    """A tensor that belongs to a parameter or to the optimiser and has a shape of its own."""

    file: str
    tensor: str
    is_complex: bool
    sum: int | None


@dataclass(frozen=True, slots=True)
class Stored:
    """The expected form of a tensor in its file; None if the manifest does not specify it."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    is_complex: bool
    """Whether its last dimension holds real and imaginary parts."""
    sum: int | None
    start: int = 0
    of: TensorPart | None = None
    local: tuple[int, ...] = ()
    """The shape of the part that it belongs to, for its checksum."""


def piece(row: dict[str, Any], full: Full, world: int) -> StoredRange:
    of = cut_part(row.get("part"), full.shape, world)
    start, stop = (count_of(row[end], end) for end in ("start", "stop"))
    is_complex = full.dtype in COMPLEX if row["state"] is None else _flag(row)
    return StoredRange(start, stop, str(row["file"]), str(row["tensor"]), of, is_complex, sum_of(row))


def buffer(row: dict[str, Any], world: int) -> StoredBuffer:
    full = full_of(row)
    part = cut_part(row.get("part"), full.shape, world)
    return StoredBuffer(full, str(row["file"]), str(row["tensor"]), part, sum_of(row))


def extra(row: dict[str, Any]) -> Extra:
    return Extra(str(row["file"]), str(row["tensor"]), _flag(row), sum_of(row))


def sum_of(row: dict[str, Any]) -> int | None:
    value = row.get("sum")
    if value is not None and (type(value) is not int or abs(value) > 1 << 63):
        raise ValueError("a checksum that is not an integer of 64 bits")
    return value


def _flag(row: dict[str, Any]) -> bool:
    value = row.get("complex", False)
    if type(value) is not bool:
        raise ValueError(f"complex is {str(value)[:40]}: expected true or false")
    return value


def cut_part(row: dict[str, Any] | None, shape: tuple[int, ...], world: int) -> TensorPart | None:
    if row is None:
        return None
    cut, ranks = row["cut"], count_of(row["ranks"], "ranks", least=1, most=world)
    segments = [count_of(size, "a segment", least=1) for size in cut["segments"]]
    dim = count_of(cut["dim"], "dim", most=len(shape) - 1)
    if sum(segments) != shape[dim]:
        raise ValueError(f"segments {segments} of a dimension of {shape[dim]}")
    return TensorPart(Cut(dim, tuple(segments)), ranks, count_of(row["index"], "index", most=ranks - 1))


def complete(parts: list[StoredRange], shape: tuple[int, ...]) -> bool:
    """Whether sorted ranges cover a tensor of this shape without gap or overlap."""
    if not parts or parts[0].of is None:
        return all(part.of is None for part in parts) and _gapless(parts, prod(shape))
    of = parts[0].of
    groups = [[part for part in parts if part.of == replace(of, index=index)] for index in range(of.ranks)]
    sizes = [prod(replace(of, index=index).local_shape(shape)) for index in range(of.ranks)]
    every = all(_gapless(group, size) for group, size in zip(groups, sizes, strict=True))
    return every and sum(map(len, groups)) == len(parts) and of.cut.size == shape[of.cut.dim]


def _gapless(parts: list[StoredRange], numel: int) -> bool:
    at = 0
    for part in parts:
        if part.start != at or part.stop <= part.start:
            return False
        at = part.stop
    return at == numel


def buffer_complete(rows: list[StoredBuffer]) -> bool:
    """Whether each part of a buffer is present exactly once."""
    first, of = rows[0].full, rows[0].of
    if of is None:
        return len(rows) == 1
    same = [(replace(of, index=index), first) for index in range(of.ranks)]
    return [(row.of, row.full) for row in sorted(rows, key=lambda row: row.of.index if row.of else -1)] == same


def count_of(value: Any, what: str, *, least: int = 0, most: int = MOST_ELEMENTS) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} is {str(value)[:40]}: expected a whole number from {least} to {most}")
    return value


def full_of(entry: dict[str, Any]) -> Full:
    shape = tuple(count_of(size, "a size") for size in entry["shape"])
    if prod(shape) > MOST_ELEMENTS:
        raise ValueError(f"a tensor of shape {list(shape)}")
    return Full(shape, _DTYPES[entry["dtype"]], bool(entry.get("frozen", False)))

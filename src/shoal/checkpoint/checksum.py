"""Checksums of tensors that do not depend on how they were split, to compare what ranks hold with what was saved.

The checksum of a tensor is the sum, modulo 2^64, of a hash of each element's bits and its position. Ranks that hold
parts add up the sums of their parts; if n ranks hold the same element the total is n times the checksum. So one
all-reduce after a restore compares every copy on every rank with the checkpoint, under any strategy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from shoal.checkpoint.buffers import persistent_buffers
from shoal.checkpoint.contents import Contents
from shoal.job.on_disk import has_read
from shoal.layout.cuts import TensorPart
from shoal.parallel.engine import Engine
from shoal.parallel.kept_errors import PRIVATE

AT_ONCE = 1 << 16
"""Elements hashed at a time, so that temporaries stay in the cache."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SPREAD, _MIX = -7046029254386353131, -4658895280553007687
"""Odd constants of the splitmix64 generator (Steele, Lea & Flood 2014), as signed numbers."""


class RestoredWrongly(ValueError):
    """After a restore the values of a rank differ from the checkpoint."""


def checksum(values: torch.Tensor, start: int = 0, part: TensorPart | None = None, shape: tuple[int, ...] = ()) -> int:
    """The checksum of elements of a flattened tensor, the first of which has the number `start`.

    `part`, `shape`: the elements belong to this part of a tensor; the part's own shape.
    """
    flat = values.detach().reshape(-1)
    if flat.is_complex() and flat.element_size() > 8:
        flat = torch.view_as_real(flat.resolve_conj())
    bits = flat.view(_BITS[flat.element_size()])
    columns = bits.shape[1] if bits.dim() > 1 else 1
    total = 0
    for low in range(0, bits.shape[0], AT_ONCE):
        some = bits[low : low + AT_ONCE].to(torch.int64)
        place = torch.arange(start + low, start + low + some.shape[0], device=some.device)
        if part is not None:
            place = _in_full(place, part, shape)
        if columns > 1:
            place = place[:, None] * columns + torch.arange(columns, device=place.device)
        mixed = (some ^ (place * _SPREAD)) * _MIX
        mixed = (mixed ^ (mixed >> 29)) * _SPREAD
        total += int((mixed ^ (mixed >> 32)).sum())
    return _signed(total)


def _in_full(place: torch.Tensor, part: TensorPart, shape: tuple[int, ...]) -> torch.Tensor:
    """Positions of a part's elements in the full tensor."""
    dim, inner = part.cut.dim, prod(shape[part.cut.dim + 1 :])
    intervals = part.cut.intervals(part.ranks, part.index)
    rows = torch.cat([torch.arange(low, high) for low, high in intervals]).to(place.device)
    row, column = place // inner, place % inner
    return (row // shape[dim] * part.cut.size + rows[row % shape[dim]]) * inner + column


def _signed(total: int) -> int:
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def of_contents(contents: Contents, engine: Engine) -> dict[str, int]:
    """Checksums of everything that a rank is about to write: added to the rows of the manifest, and returned for
    parameters and state by the names under which a manifest keeps checksums of full tensors."""
    tensors = dict(contents.tensors)
    local = {slot.name: tuple(slot.shape) for bucket in engine.buckets for slot in bucket.buffer.slots}
    local |= {name: tuple(param.shape) for name, param in engine.model.named_parameters() if name not in local}
    found: dict[str, int] = {}
    for row in contents.pieces:
        part = TensorPart.from_json(row["part"]) if "part" in row else None
        row["sum"] = checksum(tensors[row["tensor"]], row["start"], part, local[row["parameter"]])
        has_read(tensors[row["tensor"]])
        # Compression residuals are redistributed if the number of replicas changes: only their ranges have checksums.
        if row["state"] is None or not row["state"].startswith(PRIVATE):
            _add(found, name_of(row["parameter"], row["state"]), row["sum"])
    for key, entry in contents.buffers.items():
        name, values = entry.get("buffer", key), tensors[entry["tensor"]]
        entry["sum"] = checksum(values, 0, engine.part_of(name), tuple(values.shape))
    for entry in contents.extras.values():
        entry["sum"] = checksum(tensors[entry["tensor"]])
    return found


def combined(tables: list[dict[str, int]], buffers: dict[str, Any]) -> dict[str, int]:
    """The sum of all ranks' checksums. `buffers`: the manifest's rows; several ranks may hold the same buffer."""
    total: dict[str, int] = {}
    for table in tables:
        for name, value in table.items():
            _add(total, name, value)
    for key, entry in buffers.items():
        _add(total, f"buffer {entry.get('buffer', key)}", entry["sum"])
    return total


def added(sums: Iterable[int | None]) -> int | None:
    """The checksum of a tensor from those of its ranges; None if one of them is unknown."""
    known = list(sums)
    return None if None in known else _signed(sum(each for each in known if each is not None))


def _add(total: dict[str, int], name: str, value: int) -> None:
    total[name] = _signed(total.get(name, 0) + value)


def name_of(parameter: str, state: str | None) -> str:
    return f"parameter {parameter}" if state is None else f"{state} of {parameter}"


def _held(engine: Engine) -> Iterator[tuple[str, torch.Tensor, int, TensorPart | None, tuple[int, ...]]]:
    """Everything on this rank that a checkpoint holds, including copies: name, values, start, part and the part's
    own shape."""
    for piece in engine.owner.held():
        yield name_of(piece.name, None), piece.values, piece.start, engine.part_of(piece.name), piece.shape
    sharded = {slot.name for bucket in engine.buckets for slot in bucket.buffer.slots}
    for name, param in engine.model.named_parameters():
        if name not in sharded and name not in engine.absent:
            yield name_of(name, None), param, 0, engine.part_of(name), tuple(param.shape)
    for name, buffer in persistent_buffers(engine.model).items():
        if name not in engine.absent:
            yield f"buffer {name}", buffer, 0, engine.part_of(name), tuple(buffer.shape)
    for key, piece in engine.optimizer.state(lambda bucket: (0, bucket.buffer.padded)):
        yield name_of(piece.name, key), piece.values, piece.start, engine.part_of_piece(piece), piece.shape


def compare(engine: Engine, saved: dict[str, Any], shapes: dict[str, tuple[int, ...]], where: str) -> None:
    """Raises RestoredWrongly, naming the tensor, if the values of any rank differ from the checkpoint. Collective.

    `saved`: the checkpoint's checksums; `shapes`: those of its full tensors, by the same names if known.
    """
    names = sorted(saved)
    numbers = {name: n for n, name in enumerate(names)}
    mine = torch.zeros(2, len(names), dtype=torch.int64)
    sums = [0] * len(names)
    for name, values, start, part, shape in _held(engine):
        if name in numbers:
            sums[numbers[name]] += checksum(values, start, part, shape)
            mine[1, numbers[name]] += values.numel()
    mine[0] = torch.tensor([_signed(value) for value in sums], dtype=torch.int64)
    total = mine.to(engine.device)
    if engine.placement.world.group is not None:
        dist.all_reduce(total, group=engine.placement.world.group)
    for name, value, count in zip(names, *total.cpu().tolist(), strict=True):
        numel = prod(shapes[name]) if name in shapes else None
        if not count and (numel == 0 or not name.startswith(("parameter ", "buffer "))):
            continue  # State that this strategy or optimiser does not have.
        copies = count // numel if numel else 1
        if numel and (not count or count % numel or value != _signed(copies * int(saved[name]))):
            raise RestoredWrongly(
                f"after the restore of {where} the ranks' {name} differs from the checkpoint: its checksum over "
                f"{copies} {'copies' if copies != 1 else 'copy'} differs. No step was made. Resume again; if it "
                "happens again, memory or a rank is at fault"
            )

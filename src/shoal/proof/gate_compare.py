"""What a rank computed in the gate's steps, compared with the serial ones: its slices of gradients, updates, buffers.

Every element of every gradient must be there on some rank; what is found is rows of (relative difference, kind, where).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from shoal.job.buffers import EXACT, BufferMode
from shoal.parallel.engine import Engine
from shoal.parallel.owner.base import Gradients
from shoal.proof.gate_serial import SerialSteps

SMALLEST = 1e-4
"""A gradient is compared by the size of its tensor's largest element, or by this part of the model's largest: where the
true gradient is zero (the bias of an attention key) there is nothing but rounding. An update likewise."""

COMPLEX = "complex"
"""Which tensors of the file are pairs of real numbers."""

Kind = Literal["gradient", "loss", "buffer", "update"]


class Row(NamedTuple):
    """One comparison."""

    difference: float
    kind: Kind
    where: str


def worst(rows: list[Row]) -> Row:
    """The row that decides: a NaN counts as the largest of all."""
    return max(rows, key=lambda row: (math.isnan(row.difference), row.difference))


def save_serial(found: SerialSteps, path: Path) -> None:
    """Writes what ranks compare with."""
    tables = {
        "gradient": found.gradients,
        "buffer": found.buffers,
        "before": found.before,
        "after": found.after,
        "peak": found.peaks,
    }
    tensors = {f"{kind}:{name}": value for kind, table in tables.items() for name, value in table.items()}
    least = SMALLEST * max(map(size_of, found.gradients.values()), default=0.0)
    tensors |= {"limit": torch.tensor(found.limit).double(), "least": torch.tensor(least).double()}
    complex_ones = [key for key, value in tensors.items() if value.is_complex()]
    flat = {key: torch.view_as_real(v.resolve_conj()) if v.is_complex() else v for key, v in tensors.items()}
    save_file(
        {key: value.contiguous().clone() for key, value in flat.items()},
        path,
        metadata={COMPLEX: json.dumps(complex_ones)},
    )


def _read(reference: Any, key: str) -> torch.Tensor:
    value: torch.Tensor = reference.get_tensor(key)
    # A file's tensors are not aligned for complex numbers.
    return torch.view_as_complex(value.clone()) if key in json.loads(reference.metadata()[COMPLEX]) else value


class GradientWatch:
    """Keeps the gradients of one step as the optimiser gets them: reduced, averaged and clipped."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.gradients: dict[int, torch.Tensor] = {}
        self.peaks: dict[int, torch.Tensor] = {}
        """The largest gradient of each element, over the steps."""
        self.unused: frozenset[str] = frozenset()
        engine.owner.before_update.append(self._keep)

    def _keep(self, gradients: Gradients) -> None:
        self.gradients = {id(bucket): bucket.reduced().detach().clone() for bucket in self.engine.buckets}
        for bucket, gradient in self.gradients.items():
            peak = gradient.abs()
            self.peaks[bucket] = torch.maximum(self.peaks[bucket], peak) if bucket in self.peaks else peak
        self.unused = gradients.unused

    def stop(self) -> None:
        self.engine.owner.before_update.remove(self._keep)


class GateComparison:
    """This rank's slices of the serial run, read from its file."""

    def __init__(self, engine: Engine, path: str, modes: dict[str, BufferMode]) -> None:
        self.engine, self.path, self.modes = engine, path, modes

    def gradients(self, watch: GradientWatch) -> tuple[list[Row], int]:
        """Rows for the gradients of the first step, and how many elements were compared."""
        engine, rows, elements = self.engine, [Row(0.0, "gradient", "nothing")], 0
        with safe_open(self.path, framework="pt") as reference:
            known = {key for key in reference.keys() if key.startswith("gradient:")}  # noqa: SIM118
            least = float(reference.get_tensor("least"))
            for bucket in engine.buckets:
                (low, high), offset = engine.owner.owned(bucket), bucket.offset
                for slot in bucket.buffer.slots:
                    start, stop = max(slot.start, low), min(slot.stop, high)
                    key = f"gradient:{slot.name}"
                    if start >= stop or slot.name in watch.unused:
                        continue
                    if key not in known:
                        where = f"the gradient of {slot.name}, which has none in a serial step,"
                        rows.append(Row(math.inf, "gradient", where))
                        continue
                    mine = watch.gradients[id(bucket)][start - offset : stop - offset]
                    full = _read(reference, key)
                    there = self._own(slot.name, full).reshape(-1)
                    elements += mine.numel()
                    by = max_diff(mine, there[start - slot.start : stop - slot.start])
                    size = max(size_of(full), least) or 1.0
                    rows.append(Row(by / size, "gradient", f"the gradient of {slot.name}"))
        return rows, elements

    def buffers(self) -> list[Row]:
        """Rows for the buffers after the first step, but for those that the job leaves to the replicas."""
        rows = []
        with safe_open(self.path, framework="pt") as reference:
            known = set(reference.keys())
            for name, buffer in self.engine.model.named_buffers():
                skipped = self.modes.get(name, "average") not in EXACT or name in self.engine.absent
                if f"buffer:{name}" in known and buffer.numel() and not skipped:
                    other = self._own(name, _read(reference, f"buffer:{name}"))
                    rows.append(Row(max_diff(buffer, other) / max(size_of(other), 1.0), "buffer", f"the buffer {name}"))
        return rows

    def updates(self, watch: GradientWatch) -> list[Row]:
        """Rows for what the optimiser did to each parameter, by the size of what it does in one process."""
        rows, peaks = [Row(0.0, "update", "nothing")], self._peaks(watch)
        with safe_open(self.path, framework="pt") as reference:
            limit = float(reference.get_tensor("limit"))
            for piece in self.engine.owner.parameters():
                before, after, peak = (
                    self._own(piece.name, _read(reference, f"{kind}:{piece.name}"))
                    for kind in ("before", "after", "peak")
                )
                there = slice(piece.start, piece.start + piece.values.numel())
                sure = ~unsure(peak.reshape(-1)[there], peaks[piece.name, piece.start], limit)
                by = max_diff(piece.values.reshape(-1).cpu()[sure], after.reshape(-1)[there][sure])
                rows.append(Row(by / scale_of_update(before, after), "update", piece.name))
        return rows

    def _peaks(self, watch: GradientWatch) -> dict[tuple[str, int], torch.Tensor]:
        """The largest gradients of the pieces that this rank owns, by parameter and first element."""
        found, engine = {}, self.engine
        for bucket in engine.buckets:
            (low, high), offset = engine.owner.owned(bucket), bucket.offset
            for slot in bucket.buffer.slots:
                start, stop = max(slot.start, low), min(slot.stop, high)
                if start < stop:
                    peak = watch.peaks[id(bucket)][start - offset : stop - offset]
                    found[slot.name, start - slot.start] = peak.cpu()
        return found

    def _own(self, name: str, full: torch.Tensor) -> torch.Tensor:
        part = self.engine.part_of(name)
        return full if part is None else part.of(full)


def unsure(one: torch.Tensor, other: torch.Tensor, limit: float) -> torch.Tensor:
    """Where two runs' largest gradients of an element may both be rounding of a zero, and are not zero in both."""
    return (one <= limit) & (other <= limit) & ((one > 0) | (other > 0))


def scale_of_update(before: torch.Tensor, after: torch.Tensor) -> float:
    return max(size_of(after - before), SMALLEST * size_of(after)) or 1.0


def size_of(values: torch.Tensor) -> float:
    """The largest element."""
    return float(_wide(values).abs().max()) if values.numel() else 0.0


def max_diff(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference; where both are the same infinity there is none."""
    one, other = _wide(one.detach().cpu()), _wide(other)
    if not one.numel():
        return 0.0
    return float(torch.where(one == other, torch.zeros((), dtype=one.dtype), one - other).abs().max())


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.complex128) if values.is_complex() else values.double()

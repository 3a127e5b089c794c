"""What a rank computed in the gate's steps, compared with the serial ones: its slices of gradients, updates, buffers.

Every element of every gradient must be there on some rank; what is found is rows of (relative difference, kind, where).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from shoal.job.buffers import EXACT, BufferMode
from shoal.parallel.engine import Engine
from shoal.train.verify.gate_serial import SerialSteps

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
        "gradient": found.gradients, "buffer": found.buffers, "before": found.before, "after": found.after,
        "unsure": found.unsure,
    }  # fmt: skip
    tensors = {f"{kind}:{name}": value for kind, table in tables.items() for name, value in table.items()}
    complex_ones = [key for key, value in tensors.items() if value.is_complex()]
    flat = {key: torch.view_as_real(v.resolve_conj()) if v.is_complex() else v for key, v in tensors.items()}
    save_file(
        {key: value.contiguous().clone() for key, value in flat.items()}, path,
        metadata={COMPLEX: json.dumps(complex_ones)},
    )  # fmt: skip


def _read(reference: Any, key: str) -> torch.Tensor:
    value: torch.Tensor = reference.get_tensor(key)
    # A file's tensors are not aligned for complex numbers.
    return torch.view_as_complex(value.clone()) if key in json.loads(reference.metadata()[COMPLEX]) else value


class GradientWatch:
    """Keeps the gradients of one step as the optimiser gets them: reduced, averaged and clipped."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.gradients: dict[int, torch.Tensor] = {}
        self.unused: frozenset[str] = frozenset()
        self._update: Callable[..., Any] = engine.update
        engine.update = self._watched  # type: ignore[method-assign]

    def _watched(
        self, gradients: dict[int, torch.Tensor], lr_factor: float, unused: frozenset[str], *more: Any, **named: Any
    ) -> Any:
        self.gradients = {bucket: gradient.detach().clone() for bucket, gradient in gradients.items()}
        self.unused = unused
        return self._update(gradients, lr_factor, unused, *more, **named)

    def stop(self) -> None:
        del self.engine.update


class Comparison:
    """This rank's slices of the serial run, read from its file."""

    def __init__(self, engine: Engine, path: str, modes: dict[str, BufferMode]) -> None:
        self.engine, self.path, self.modes = engine, path, modes

    def gradients(self, watch: GradientWatch) -> tuple[list[Row], int]:
        """Rows for the gradients of the first step, and how many elements were compared."""
        engine, rows, elements = self.engine, [Row(0.0, "gradient", "nothing")], 0
        with safe_open(self.path, framework="pt") as reference:
            known = {key for key in reference.keys() if key.startswith("gradient:")}  # noqa: SIM118
            sizes = {key: _size(_read(reference, key)) for key in known}
            least = SMALLEST * max(sizes.values(), default=0.0)
            for bucket, offset in zip(engine.buckets, engine.offsets, strict=True):
                low, high = engine.owned(bucket)
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
                    there = self._own(slot.name, _read(reference, key)).reshape(-1)
                    elements += mine.numel()
                    apart = _apart(mine, there[start - slot.start : stop - slot.start])
                    size = max(sizes[key], least) or 1.0
                    rows.append(Row(apart / size, "gradient", f"the gradient of {slot.name}"))
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
                    rows.append(Row(_apart(buffer, other) / max(_size(other), 1.0), "buffer", f"the buffer {name}"))
        return rows

    def updates(self) -> list[Row]:
        """Rows for what the optimiser did to each parameter, by the size of what it does in one process."""
        rows = [Row(0.0, "update", "nothing")]
        with safe_open(self.path, framework="pt") as reference:
            for piece in self.engine.owned_parameters():
                before, after, unsure = (
                    self._own(piece.name, _read(reference, f"{kind}:{piece.name}"))
                    for kind in ("before", "after", "unsure")
                )
                scale = max(_size(after - before), SMALLEST * _size(after)) or 1.0
                there = slice(piece.start, piece.start + piece.values.numel())
                sure = ~unsure.reshape(-1)[there]
                apart = _apart(piece.values.reshape(-1).cpu()[sure], after.reshape(-1)[there][sure])
                rows.append(Row(apart / scale, "update", piece.name))
        return rows

    def _own(self, name: str, full: torch.Tensor) -> torch.Tensor:
        part = self.engine.part_of(name)
        return full if part is None else part.of(full)


def _size(values: torch.Tensor) -> float:
    return float(_wide(values).abs().max()) if values.numel() else 0.0


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference; where both are the same infinity there is none."""
    one, other = _wide(one.detach().cpu()), _wide(other)
    if not one.numel():
        return 0.0
    return float(torch.where(one == other, torch.zeros((), dtype=one.dtype), one - other).abs().max())


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.complex128) if values.is_complex() else values.double()

"""What a rank holds after a proof's steps, compared with the serial run: its slices of parameters, gradients and
optimiser state, its buffers and its frozen parameters.

A difference is max|a-b| over what is compared by max|b| over the tensor. Elements whose true gradient is zero are
compared absolutely. Each rank compares what it holds, so nothing is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open

from shoal.job.buffers import EXACT as SAME_AS_ONE_PROCESS
from shoal.job.buffers import buffer_modes
from shoal.layout.cuts import TensorPart
from shoal.parallel.engine import Engine
from shoal.parallel.flat_slice import Piece, pieces_within
from shoal.parallel.owner.base import Gradients
from shoal.proof.optimizer_trials import amplifies_rounding
from shoal.proof.reference import Reference, summed
from shoal.proof.tolerance import EXACT, GRADIENT, LOSS, MARGIN
from shoal.runtime.setup import Prepared

ZERO_GRADIENT = 1e-8
"""Largest absolute drift, of elements whose true gradient is zero: Adam divides their rounding by its epsilon, 1e-8."""
SMALLEST = 1e-4
"""A gradient is compared by the size of its tensor's largest element, or by this part of the model's largest: small
ones are sums of large ones that cancel, and have their rounding."""
WORST = 5
"""Rows that a rank reports."""


class GradientSums:
    """Sums up each step's gradients on this rank, as the optimiser gets them: reduced, averaged and clipped."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sums: dict[int, torch.Tensor] = {}
        engine.owner.before_update.append(self._add)

    def _add(self, gradients: Gradients) -> None:
        for bucket in self.engine.buckets:
            gradient, offset = bucket.reduced().detach().clone(), bucket.offset
            for slot in bucket.buffer.slots:
                if slot.name in gradients.unused:
                    gradient[max(0, slot.start - offset) : max(0, slot.stop - offset)] = 0
            summed(self.sums.setdefault(id(bucket), torch.zeros_like(gradient)), gradient)

    def stop(self) -> None:
        """Leaves the engine as it was."""
        self.engine.owner.before_update.remove(self._add)

    def owned(self) -> Iterator[Piece]:
        """This rank's slices, by parameter."""
        for bucket in self.engine.buckets:
            if id(bucket) in self.sums:
                yield from pieces_within(bucket, self.sums[id(bucket)], bucket.offset, *self.engine.owner.owned(bucket))


def compare(ready: Prepared, path: str, *, zero_gradient: float = ZERO_GRADIENT) -> dict[str, Any]:
    """The largest relative differences of what this rank holds from the serial run in the file at `path`.

    Args:
        ready: The rank after its steps.
        path: The tensors that `serial_run` saved.
        zero_gradient: Largest absolute drift of elements whose true gradient is zero.
    """
    engine = ready.engine
    engine.owner.gather_state()
    rows: list[tuple[float, str]] = []
    noisy: set[str] = set()
    compared: dict[str, int] = {}
    declared = _declared(ready)
    amplified = amplifies_rounding(ready.job, beyond=ZERO_GRADIENT)
    with safe_open(path, framework="pt") as reference:
        known = set(reference.keys())

        def own(kind: str, name: str, like: torch.Tensor, *, part: TensorPart | None) -> torch.Tensor:
            full = reference.get_tensor(f"{kind}:{name}")
            if like.is_complex() and kind != "rounding":
                full = torch.view_as_complex(full.clone())  # A file's tensors are not aligned for complex numbers.
            return full if part is None else part.of(full)

        def check(kind: str, piece: Piece, label: str, least: float = 0.0) -> None:
            part = engine.part_of_piece(piece)
            serial = own(kind, piece.name, piece.values, part=part).reshape(-1)
            there = slice(piece.start, piece.start + piece.values.numel())
            rounding = own("rounding", piece.name, piece.values, part=part).reshape(-1)[there]
            difference = distance(piece.values, serial[there])
            if rounding.any():
                noisy.add(piece.name)
                drift = float(difference[rounding].max())
                if not drift <= zero_gradient and not (amplified and kind != GRADIENT):
                    rows.append((math.inf, f"{label} (by {drift:.1e}, where the true gradient is zero)"))
                difference = difference[~rounding]
            compared[kind] = compared.get(kind, 0) + piece.values.numel()
            if difference.numel():
                rows.append((float(difference.max()) / _size(serial, least), label))

        for piece in engine.owner.parameters():
            check("parameter", piece, f"parameter {piece.name}")
        for key, piece in engine.owner.state():
            if f"{key}:{piece.name}" not in known:
                rows.append((math.inf, f"{key} of {piece.name} (the serial optimiser has none)"))
                continue
            check(key, piece, f"{key} of {piece.name}")
        for key, piece in _of_scalars(engine):
            if f"{key}:{piece.name}" in known:
                check(key, piece, f"{key} of {piece.name}")
        sums = [reference.get_tensor(key) for key in known if key.startswith(f"{GRADIENT}:")]
        least = SMALLEST * max(map(_size, sums), default=0.0)
        for piece in ready.watched.owned() if ready.watched is not None else ():
            check(GRADIENT, piece, f"the gradient of {piece.name}", least)
        replicated = _replicated(engine)
        for (kind, name), held in replicated.items():
            if f"{kind}:{name}" not in known or (kind, name) in declared:
                continue
            other = own(kind, name, held, part=engine.part_of(name))
            drift = float(distance(held, other).max())
            relative = drift / _size(other)
            moved = f"follows:{kind}:{name}"
            allowed = MARGIN * float(reference.get_tensor(moved)) if moved in known else 0.0
            if relative > EXACT and drift <= min(allowed, zero_gradient):
                noisy.add(f"{kind} {name}")
            else:
                rows.append((relative, f"{_KINDS[kind]} {name}"))
    rows.sort(key=lambda row: (row[0] != row[0], row[0]), reverse=True)
    return {
        "worst": rows[:WORST],
        "zero_gradient": sorted(noisy),
        "compared": compared,
        "amplified": amplified and bool(noisy),
        "replicated": sorted(f"{kind}:{name}" for kind, name in replicated),
        "declared": {name: mode for (_, name), mode in declared.items()},
    }


def _of_scalars(engine: Engine) -> Iterator[tuple[str, Piece]]:
    """Single numbers that the optimiser keeps for parameters of no dimension, where it has full parameters: Adam's
    moments are such, and so is its number of steps."""
    for name, kept in engine.optimizer.values(engine.owner.owned).items():
        for key, value in kept.items() if engine.shapes[name][0] == () else ():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                yield key, Piece(name, (), 0, value.reshape(-1))


_KINDS = {"buffer": "buffer", "frozen": "frozen parameter"}


def _replicated(engine: Engine) -> dict[tuple[str, str], torch.Tensor]:
    """(kind, name) -> what this rank holds and the optimiser does not step."""
    held = {("buffer", name): buffer for name, buffer in engine.model.named_buffers()}
    # Not those that a forward has frozen in the course of training: they are compared with all that learned.
    held |= {("frozen", name): p for name, p in engine.model.named_parameters() if name not in engine.names}
    return {key: value for key, value in held.items() if value.numel() and key[1] not in engine.absent}


def _declared(ready: Prepared) -> dict[tuple[str, str], str]:
    """Buffers that are not those of one process by the job's own declaration."""
    place = ready.engine.placement
    if place.samples.size * place.context.size * place.planes.size == 1:
        return {}
    modes = buffer_modes(ready.job.buffers, ready.engine.model)
    return {("buffer", name): mode for name, mode in modes.items() if mode not in SAME_AS_ONE_PROCESS}


def moves(one: Reference, other: Reference) -> list[tuple[str, float]]:
    """(kind, relative difference) of two serial runs, as `compare` takes them."""
    rows = [(LOSS, abs(a - b) / max(abs(a), 1e-300)) for a, b in zip(one.losses, other.losses, strict=True)]

    def add(
        kind: str, a: torch.Tensor, b: torch.Tensor, without: torch.Tensor | None = None, least: float = 0.0
    ) -> None:
        difference = distance(b, a)
        if without is not None:
            difference = difference[~without.reshape(difference.shape)]
        if difference.numel():
            rows.append((kind, float(difference.max()) / _size(a, least)))

    least = SMALLEST * max(map(_size, one.gradients.values()), default=0.0)
    for name, param in one.parameters.items():
        add(GRADIENT, one.gradients[name], other.gradients[name], one.rounding[name], least)
        add("parameter", param, other.parameters[name], one.rounding[name])
        for key, value in one.state[name].items():
            if key in other.state[name]:
                add(key, value, other.state[name][key], one.rounding[name])
    following = follows(one, other)
    for kind, name, value, there in _pairs(one, other):
        if f"{kind}:{name}" not in following:
            add(kind, value, there)
    return rows


def follows(one: Reference, other: Reference) -> dict[str, torch.Tensor]:
    """Buffers that follow parameters whose true gradient is zero (the running mean behind a bias that batch norm
    cancels), and how far they moved: more than their conditioning, less than such a parameter may drift."""
    if not any(mask.any() for mask in one.rounding.values()):
        return {}
    found = {}
    for kind, name, value, there in _pairs(one, other):
        drift = float(distance(there, value).max())
        if drift <= ZERO_GRADIENT and drift / _size(value) > EXACT / MARGIN:
            found[f"{kind}:{name}"] = torch.tensor(drift, dtype=torch.float64)
    return found


def _pairs(one: Reference, other: Reference) -> Iterator[tuple[str, str, torch.Tensor, torch.Tensor]]:
    for kind, held, there in (("buffer", one.buffers, other.buffers), ("frozen", one.frozen, other.frozen)):
        for name, value in held.items():
            if value.numel() and (value.dtype.is_floating_point or value.is_complex()):
                yield kind, name, value, there[name]


def distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """How far each element is from the other's; 0 where both are the same infinity, as in a mask."""
    a, b = wide(one), wide(other)
    return torch.where(a == b, torch.zeros((), dtype=a.dtype), a - b).abs()


def _size(serial: torch.Tensor, least: float = 0.0) -> float:
    """The largest finite element, or `least`; 1 if there is neither."""
    sizes = wide(serial).abs()
    sizes = sizes[sizes.isfinite()]
    return max(float(sizes.max()) if sizes.numel() else 0.0, least) or 1.0


def real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as pairs of real numbers; any other as it is."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """In double precision, on the host."""
    return tensor.detach().cpu().to(torch.complex128 if tensor.is_complex() else torch.float64)

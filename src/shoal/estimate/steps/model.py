"""`JobModel`: what of a job decides its step's time, as plain numbers: operations, pieces, what may be cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.estimate.steps.operations import Operation


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of the model between two places where a pipeline may cut."""

    name: str
    is_block: bool
    parameter_bytes: int
    crossing_bytes: int
    """Of one sample, across a cut just before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobModel:
    """Built by `train/job_model.py`, which runs the job's forward once without memory."""

    name: str
    global_batch: int
    samples: int
    """Of the traced forward, which `operations` are of."""
    operations: tuple[Operation, ...]
    pieces: tuple[Piece, ...]
    stages: Mapping[int, tuple[tuple[int, int], ...]]
    """Number of stages -> the pieces of each, as the engine would cut."""
    tensor_cut: Mapping[str, str]
    """Module -> the side of its product that tensor parallelism cuts; "between" for what lies between."""
    tensor_inputs: int
    """Regions: each sends a stream's worth of activations, twice forward and backward in all."""
    vocabulary_cut: bool
    loss_cut: bool
    context_loss_cut: bool
    stream_bytes: int
    """Of one sample: what flows from block to block."""
    synchronised_norms: bool
    """Whether batch norms see the samples of all replicas."""
    optimizer: str
    shapes: tuple[tuple[int, ...], ...]
    """Of all parameters."""

    @property
    def parameter_bytes(self) -> int:
        return sum(piece.parameter_bytes for piece in self.pieces)

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(piece.name for piece in self.pieces if piece.is_block)

"""`JobModel`: what of a job decides its step's time, as plain numbers: operations, pieces, what may be cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.estimate.steps.operations import Operation
from shoal.layout.forward import Forward, JobShapes


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePiece:
    """A part of the model between two places where a pipeline may cut."""

    name: str
    is_block: bool
    parameter_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaneModel:
    """What becomes of a job where planes are cut."""

    forward: Forward
    """With what ranks exchange."""
    modules: frozenset[str]
    """Those that compute on parts; "" is the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobModel:
    """Built by `calibration/job_model.py`, which runs the job's forward once without memory."""

    name: str
    global_batch: int
    samples: int
    """Of the traced forward, which `operations` are of."""
    operations: tuple[Operation, ...]
    pieces: tuple[StagePiece, ...]
    tensor_cut: Mapping[str, str]
    """Module -> the side of its product that tensor parallelism cuts; "between" for what lies between."""
    loss_cut: bool
    context_loss_cut: bool
    optimizer: str
    shapes: JobShapes
    """What its traffic follows from: parameters, and where the model may be cut."""
    forward: Forward
    """Of a typical micro-batch."""
    planes: Mapping[tuple[int, int], PlaneModel] = field(default_factory=dict)
    """By ranks along the height and the width."""

    @property
    def stages(self) -> Mapping[int, tuple[tuple[int, int], ...]]:
        """Number of stages -> the pieces of each, as the engine would cut."""
        return self.shapes.stages

    @property
    def synchronised_norms(self) -> bool:
        """Whether batch norms see the samples of all replicas."""
        return self.shapes.synchronised_norms

    @property
    def parameter_bytes(self) -> int:
        return sum(piece.parameter_bytes for piece in self.pieces)

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(piece.name for piece in self.pieces if piece.is_block)

"""One serial forward of a micro-batch, and how the model can be partitioned, as plain numbers.

`observe.py` fills these records from the job's own model, unchanged by any engine; the traffic formulas of the
estimate room read them. Events of a forward have positions, which only give their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

from shoal.layout.spatial.grid import FULL, Part
from shoal.layout.spatial.plan import PlaneEvent
from shoal.layout.tensor.plan import TensorPlan


@dataclass(frozen=True, slots=True)
class Flow:
    """A tensor that a module receives or returns."""

    value: int
    """Its identity; changes when the tensor is written to."""
    shape: tuple[int, ...]
    itemsize: int
    floating: bool
    learns: bool
    """Whether it receives a gradient."""
    part: Part = FULL
    """How ranks of spatial cut it."""

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.itemsize

    def resized(self, before: int, now: int) -> Flow:
        """The same for another number of samples."""
        exact = [n for n, size in enumerate(self.shape) if size == before]
        multiples = [n for n, size in enumerate(self.shape) if size and size % before == 0]
        place = next(iter(exact or multiples), None)
        if place is None:
            return self
        size = self.shape[place] // before * now
        return replace(self, shape=(*self.shape[:place], size, *self.shape[place + 1 :]))


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module."""

    path: str
    start: int
    stop: int
    arguments: tuple[Flow | None, ...]
    """Flattened; None for arguments that are not tensors."""
    results: tuple[Flow | None, ...]
    opaque: bool
    """Whether it returns an opaque object that may contain tensors."""
    fused_attention: bool = False
    """Whether it is an nn.MultiheadAttention, which computes its output projection itself."""


@dataclass(frozen=True, slots=True)
class AttentionSeen:
    """One call of `scaled_dot_product_attention`."""

    at: int
    module: str
    query: Flow
    key: Flow
    value: Flow


@dataclass(frozen=True, slots=True)
class LossSeen:
    """One cross entropy."""

    at: int
    targets: Flow
    """Number of rows of logits."""
    itemsize: int
    """Bytes per element of the logits."""
    sums: int
    """Numbers per row that a loss on split logits all-reduces."""


@dataclass(frozen=True, slots=True)
class NormSeen:
    """One batch norm that computes the statistics of its batch."""

    module: str
    channels: int
    itemsize: int
    """Bytes per element of a statistic."""
    learns: bool = True
    """Whether backward comes to it: not where it is frozen, and all in front of it."""
    of_planes: bool = False
    """Whether ranks of spatial hold parts of what it normalises."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Forward:
    """One forward, loss included. Compared by identity, so that results derived from it can be cached."""

    samples: int
    calls: tuple[ModuleCall, ...]
    attention: tuple[AttentionSeen, ...]
    losses: tuple[LossSeen, ...]
    norms: tuple[NormSeen, ...]
    saved: tuple[int, ...]
    """Positions at which a tensor was saved for backward, in order."""
    outputs: tuple[Flow | None, ...]
    """The outputs of the model."""
    autocast_itemsize: int = 0
    """Bytes per element that autocast casts float32 to; 0: autocast is off."""
    planes: tuple[PlaneEvent, ...] = ()
    """What ranks of spatial exchange."""

    def calls_of(self, path: str) -> list[ModuleCall]:
        return [call for call in self.calls if call.path == path]

    def of_samples(self, samples: int) -> Forward:
        """The same forward for another number of samples, scaling the sizes that are proportional to it."""
        return self if samples == self.samples else _resized(self, samples)


@lru_cache(maxsize=64)
def _resized(forward: Forward, samples: int) -> Forward:
    def flow(given: Flow) -> Flow:
        return given.resized(forward.samples, samples)

    def flows(given: tuple[Flow | None, ...]) -> tuple[Flow | None, ...]:
        return tuple(None if each is None else flow(each) for each in given)

    return replace(
        forward,
        samples=samples,
        outputs=flows(forward.outputs),
        calls=tuple(replace(c, arguments=flows(c.arguments), results=flows(c.results)) for c in forward.calls),
        attention=tuple(
            replace(a, query=flow(a.query), key=flow(a.key), value=flow(a.value)) for a in forward.attention
        ),
        losses=tuple(replace(each, targets=flow(each.targets)) for each in forward.losses),
        planes=tuple(event.of_samples(forward.samples, samples) for event in forward.planes),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterShape:
    """One parameter of the model."""

    names: tuple[str, ...]
    """All of its names, the model's own first; a tied weight has several."""
    shape: tuple[int, ...]
    itemsize: int
    dtype: str
    options: int
    """Index of its set of optimiser options."""
    block: int
    """Number of the only block that holds it; -1: the root."""
    trains: bool

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True, slots=True)
class WireShape:
    """A tensor that crosses a cut: a result or an argument of a piece, in one of its calls."""

    piece: int
    call: int
    leaf: int
    is_argument: bool
    learns: bool
    """Whether a gradient comes back: code behind the cut may detach it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceShape:
    """A part of the model between two possible pipeline cuts."""

    path: str
    parameters: frozenset[str]
    wires: tuple[WireShape, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceShape:
    """How context parallelism splits the sequence."""

    length: int
    blocks: tuple[str, ...]
    gathers: bool
    """Whether the residual stream is gathered after the last block."""
    views: tuple[str, ...]
    """Modules that implement attention themselves: their traffic depends on their own code. "" is the model."""
    whole_from: str = ""
    """If the model is one of them: the first module that is called after it gathers, if any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShape:
    """One set of experts."""

    path: str
    owner: str
    count: int
    stacked: bool
    parameters: tuple[str, ...]
    width: int
    result_width: int
    members: tuple[str, ...] = ()
    """Listed: the key of each expert in its list."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobShapes:
    """Everything that determines the traffic of a step, except the strategy."""

    parameters: tuple[ParameterShape, ...]
    blocks: tuple[str, ...]
    written: Mapping[str, tuple[int, bool]] = field(default_factory=dict)
    pieces: tuple[PieceShape, ...] = ()
    stages: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Number of stages -> the pieces of each stage."""
    tensor: TensorPlan | None = None
    stream: tuple[str, ...] = ()
    """Blocks in which tp(sequence=True) splits the residual stream."""
    sequence: SequenceShape | None = None
    experts: tuple[ExpertShape, ...] = ()
    synchronised_norms: bool = False
    loss_over_batch: bool = False
    full_parameters: bool = False
    """Whether the optimiser needs full parameters (LARS, LAMB, Muon)."""
    buffers: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Buffers that the job declares: name -> (number of elements, synchronisation mode)."""
    floats: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of floating-point buffers, which independently stepping islands average."""
    complex_floats: bool = False
    """Whether one of them is complex: then all are averaged as complex numbers."""

    def in_block(self, path: str) -> bool:
        return any(path == block or path.startswith(block + ".") for block in self.blocks)

"""What one serial forward of a micro-batch shows, and how the model may be cut, as plain numbers.

`observe.py` fills these records from the job's own model, which no engine has touched; the traffic formulas of the
estimate room read them. Events of a forward have positions: they only tell what came before what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

from shoal.layout.tensor.plan import TensorPlan


@dataclass(frozen=True, slots=True)
class Flow:
    """A tensor that a module is given or gives back."""

    value: int
    """Its identity: a tensor that is written to is another one afterwards."""
    shape: tuple[int, ...]
    itemsize: int
    floating: bool
    learns: bool
    """Whether a gradient comes back for it."""

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
    """Laid flat; None for what is no tensor."""
    results: tuple[Flow | None, ...]
    opaque: bool
    """Whether it gives back something that may hide tensors."""
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
    """Of which each is a row of logits."""
    itemsize: int
    """Of the logits."""
    sums: int
    """Numbers of each row that a loss on cut logits adds up."""


@dataclass(frozen=True, slots=True)
class NormSeen:
    """One batch norm that takes the statistics of its batch."""

    module: str
    channels: int
    itemsize: int
    """Of a statistic."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Forward:
    """One forward, loss included. Compared by identity, so that what is derived of it can be kept."""

    samples: int
    calls: tuple[ModuleCall, ...]
    attention: tuple[AttentionSeen, ...]
    losses: tuple[LossSeen, ...]
    norms: tuple[NormSeen, ...]
    saved: tuple[int, ...]
    """Positions at which something was kept for backward, in order."""
    outputs: tuple[Flow | None, ...]
    """Of the model."""
    autocast_itemsize: int = 0
    """Bytes of what autocast makes of a float32; 0: autocast is off."""

    def calls_of(self, path: str) -> list[ModuleCall]:
        return [call for call in self.calls if call.path == path]

    def of_samples(self, samples: int) -> Forward:
        """The same forward of another number of samples, as far as sizes are proportional to it."""
        return self if samples == self.samples else _resized(self, samples)


@lru_cache(maxsize=64)
def _resized(forward: Forward, samples: int) -> Forward:
    def flow(given: Flow) -> Flow:
        return given.resized(forward.samples, samples)

    def flows(given: tuple[Flow | None, ...]) -> tuple[Flow | None, ...]:
        return tuple(None if each is None else flow(each) for each in given)

    return replace(
        forward, samples=samples, outputs=flows(forward.outputs),
        calls=tuple(replace(c, arguments=flows(c.arguments), results=flows(c.results)) for c in forward.calls),
        attention=tuple(
            replace(a, query=flow(a.query), key=flow(a.key), value=flow(a.value)) for a in forward.attention
        ),
        losses=tuple(replace(each, targets=flow(each.targets)) for each in forward.losses),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterShape:
    """One parameter of the model."""

    names: tuple[str, ...]
    """All of its names, the model's own first; a tied weight has several."""
    shape: tuple[int, ...]
    itemsize: int
    dtype: str
    options: int
    """Which set of optimiser options it has."""
    block: int
    """Number of the block that alone holds it; -1: the root."""
    trains: bool

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True, slots=True)
class WireShape:
    """What crosses a cut: a result or an argument of a piece, in one of its calls."""

    piece: int
    call: int
    leaf: int
    is_argument: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceShape:
    """A part of the model between two places where a pipeline may cut."""

    path: str
    parameters: frozenset[str]
    wires: tuple[WireShape, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceShape:
    """How context parallelism cuts the sequence."""

    length: int
    blocks: tuple[str, ...]
    gathers: bool
    """Whether the stream is gathered behind the last block."""
    views: tuple[str, ...]
    """Modules that write attention out themselves: what they send follows from their own code. "" is the model."""
    whole_from: str = ""
    """Where the model is one of them: the first module behind what it gathers, if any is called there."""


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
    """All that the traffic of a step follows from, but the strategy."""

    parameters: tuple[ParameterShape, ...]
    blocks: tuple[str, ...]
    written: Mapping[str, tuple[int, bool]] = field(default_factory=dict)
    pieces: tuple[PieceShape, ...] = ()
    stages: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Number of stages -> the pieces of each."""
    tensor: TensorPlan | None = None
    stream: tuple[str, ...] = ()
    """Blocks along which tp(sequence=True) cuts the stream."""
    sequence: SequenceShape | None = None
    experts: tuple[ExpertShape, ...] = ()
    synchronised_norms: bool = False
    loss_over_batch: bool = False
    buffers: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Buffers that the job declares: name -> (numbers, how replicas bring them together)."""
    floats: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of floating-point buffers, which replicas that step by themselves average."""
    complex_floats: bool = False
    """Whether one of them is complex: then they are averaged as complex numbers."""

    def in_block(self, path: str) -> bool:
        return any(path == block or path.startswith(block + ".") for block in self.blocks)

"""A compressor that runs: how a tensor becomes bytes, what is kept as error, and how payloads are exchanged.

The base of every file in `technique/compress`. It is a term, a frozen value without memory: what a payload does not
hold, `draw` does, and what is kept from step to step is passed in. A payload that is gathered is bytes (uint8),
everything needed to read it included. Payloads that add (`adds`) are numbers, so that an all-reduce of payloads is the
payload of the sum.

The class is declared wherever strategies are read, so torch is imported inside the functions that compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.comm.compress.sizes import LARGEST_INDEX
from shoal.strategy.terms.compress import CompressTerm

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shoal.comm.compress.exchange import Total
    from shoal.comm.compress.given import Draw, Over, State


class CompressError(ValueError):
    """A tensor, a state or a group that a compression cannot take."""


class Compressor(CompressTerm):
    """Encode, exchange, settle. A file overrides `encode` and `decode`, or all of `total`."""

    family = "compress"
    adds: ClassVar[bool] = False
    """Whether payloads of ranks may be added."""

    extras: ClassVar[tuple[str, ...]] = ()
    """What else it keeps, of another size than the parameter, the same on all ranks; part of a checkpoint."""

    @property
    def keeps(self) -> tuple[str, ...]:
        """What it keeps of each element; part of a checkpoint."""
        return ("residual",) if self.loss == "feedback" else ()

    def memory(self) -> float:
        """What remains of a residual from one step to the next, as a factor."""
        return 1.0

    def take_up(
        self, x: torch.Tensor, state: State, over: Over, clip: float | None = None
    ) -> tuple[torch.Tensor, State]:
        """What to encode in place of the gradient, and the state as it would be if nothing were sent. Error feedback
        (Seide et al. 2014): what was not sent of x + memory e is the next e. `clip`: the job's bound on the gradient's
        norm."""
        if self.loss != "feedback":
            return x, {}
        import torch

        before = kept_before(state, "residual", x)
        total = x.clone() if before is None else torch.add(x, before, alpha=self.memory())
        return total, {"residual": total}

    def encode(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The payload of a flat tensor."""
        raise TypeError(f"{self} does not define how a tensor becomes a payload")

    def decode(self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw) -> torch.Tensor:
        """The flat tensor that a payload encodes."""
        raise TypeError(f"{self} does not define how a payload becomes a tensor")

    def add(self, payload: torch.Tensor, into: torch.Tensor, draw: Draw, *, alpha: int = 1) -> None:
        """Adds `alpha` times what a payload encodes; cheaper than `decode` where that is mostly zeros."""
        into.add_(self.decode(payload, len(into), into.dtype, draw), alpha=alpha)

    def settle(self, kept: State, payload: torch.Tensor, draw: Draw) -> None:
        """Takes what was sent, by the very payload, out of the state that `take_up` gave."""
        if "residual" in self.keeps:
            self.add(payload, kept["residual"], draw, alpha=-1)

    def total(self, value: torch.Tensor, shape: torch.Size, kept: State, over: Over, draw: Draw) -> Total:
        """The sum of what all ranks send of their flat values, and out of `kept` what was sent. NaN on any rank must
        come out as NaN on all."""
        from shoal.comm.compress.exchange import Gather, Sum

        payload = self.encode(value, draw)
        if self.adds:
            total = self.decode((yield Sum(payload)), len(value), value.dtype, draw)
        else:
            total = self.added((yield Gather(payload, equal=not self.sized_by_data)), value, draw)
        self.settle(kept, payload, draw)
        return total

    def added(self, payloads: Sequence[torch.Tensor], like: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The sum of what payloads encode, in their order."""
        total = self.decode(payloads[0], len(like), like.dtype, draw)
        for payload in payloads[1:]:
            self.add(payload, total, draw)
        return total


class SparseCompressor(Compressor):
    """Some of the elements, with their places: values in the tensor's own type, then indices of 32 bits."""

    family = "compress"
    sends_places = True

    def choose(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The places of the elements to send, int64, each once."""
        raise TypeError(f"{self} does not define which elements are sent")

    def encode(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        if len(x) > LARGEST_INDEX:
            raise CompressError(f"{len(x)} elements have no places of 32 bits; compress a part of the tensor at a time")
        from shoal.comm.compress.payload import sparse_payload

        places = self.choose(x, draw)
        return sparse_payload(x[places], places)

    def decode(self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw) -> torch.Tensor:
        dense = payload.new_zeros(num_elements, dtype=dtype)
        self.add(payload, dense, draw)
        return dense

    def add(self, payload: torch.Tensor, into: torch.Tensor, draw: Draw, *, alpha: int = 1) -> None:
        from shoal.comm.compress.payload import sparse_parts

        values, places = sparse_parts(payload, into.dtype)
        into.index_add_(0, places, values, alpha=alpha)


def kept_before(state: State, name: str, x: torch.Tensor) -> torch.Tensor | None:
    """An entry of the state in x's type and place; None at the start."""
    before = state.get(name)
    if before is None:
        return None
    if before.shape != x.shape:
        raise CompressError(
            f'the state\'s "{name}" has shape {list(before.shape)}; expected {list(x.shape)}, as the gradient laid out '
            "flat: it belongs to another parameter, or to a part that was cut otherwise"
        )
    return before.to(x)

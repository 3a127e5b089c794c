"""The exponential moving average of the weights (EMA; Polyak averaging): smoother weights to evaluate and export.

Each rank averages the slices that it updates, so the average is sharded as the optimiser's state is and costs no
communication: average = decay * average + (1 - decay) * weights, after every update. Buffers are not averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from shoal.parallel.flat_slice import Piece
from shoal.parallel.owner.base import Owner, Range

AVERAGE = "average of the weights"
"""Its key in a checkpoint; optimisers name no state so."""


class WeightAverage:
    """The average of one engine's weights."""

    def __init__(self, owner: Owner, decay: float) -> None:
        self.owner, self.decay = owner, decay
        self.values = [master.detach().clone() for master in owner.masters]

    def update(self) -> None:
        """After the optimiser's step."""
        torch._foreach_lerp_(self.values, [master.detach() for master in self.owner.masters], 1.0 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the averaged weights, then its own again. All ranks call it alike."""
        own = [master.detach().clone() for master in self.owner.masters]
        self._put(self.values)
        try:
            yield
        finally:
            self._put(own)

    def pieces(self, owned: Range) -> Iterator[Piece]:
        """Ranges of named parameters, to be saved."""
        yield from self.owner.pieces_of(self.values, owned)

    def load(self, read: Callable[[str, int, int], torch.Tensor]) -> None:
        """From a checkpoint; `read(parameter, start, stop)` gives elements of this rank's part of it."""
        for piece in self.pieces(lambda bucket: (0, bucket.buffer.padded)):
            piece.values.copy_(read(piece.name, piece.start, piece.start + piece.values.numel()))

    def _put(self, values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            self.owner.release()
            self.owner.barrier()  # Where memory is shared, another rank may still be reading.
            for master, new in zip(self.owner.masters, values, strict=True):
                master.copy_(new)
            self.owner.publish()

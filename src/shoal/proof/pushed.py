"""Compressed pushes in the replay of a proof: what each worker sends of its mean gradient, and what it keeps.

Where a parameter is cut follows from the strategy (`estimate/server_calls.py`), not from the engine; the codec itself
is the method's. What is kept is what was taken up less what the payload decodes to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.comm.compress.compressor import Compressor
from shoal.comm.compress.given import Draw, Over, State
from shoal.estimate.server_calls import PushedPart

Piece = tuple[str, int, int]


class SimulatedPushes:
    """All workers of a run that began at step 0."""

    def __init__(self, parts: Sequence[PushedPart], term: Compressor, *, seed: int, clip: float | None) -> None:
        found = (row for part in parts for row in part.compressed(term))
        self.pieces: list[Piece] = [(slot.name, low, high) for slot, low, high in found]
        self.term, self.seed, self.clip = term, seed, clip
        self.kept: dict[tuple[int, Piece], State] = {}

    def __call__(self, worker: int, number: int, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        sent = {name: gradient.clone() for name, gradient in gradients.items()}
        for piece in self.pieces:
            name, low, high = piece
            if name not in gradients:
                continue
            values = gradients[name].reshape(-1)[low:high].clone()
            draw = Draw(self.seed, number, f"{name}[{low}:{high}]", worker)
            before = self.kept.get((worker, piece), {})
            value, taken_up = self.term.take_up(values, before, Over(), self.clip)
            given = value.clone()
            payload = self.term.encode(value, draw)
            decoded = self.term.decode(payload, len(values), values.dtype, draw)
            kept = {**before, **taken_up}
            self.term.settle(kept, payload, draw)
            if "residual" in self.term.keeps:
                kept["residual"] = given - decoded
            self.kept[worker, piece] = kept
            sent[name].view(-1)[low:high] = decoded
        return sent

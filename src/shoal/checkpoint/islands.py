"""What each island keeps for itself, to and from checkpoints.

A checkpoint's parameters are those that all islands agree on, and its optimiser state is the first island's, so any
strategy can go on from it. Beside them lies what islands hold otherwise: their parameters and buffers between two
exchanges, the optimiser state of the others, and what they learned from since the last exchange. The same number of
islands goes on from these, to the bit; any other number begins with the agreed parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shoal.checkpoint.buffers import persistent_buffers
from shoal.parallel.engine import Engine
from shoal.parallel.kept_errors import ISLANDS

if TYPE_CHECKING:
    from shoal.checkpoint.contents import Contents
    from shoal.checkpoint.restore import OwnView

PARAMETER = "parameter"


def label(engine: Engine, what: str = "") -> str:
    """How a checkpoint names something of this rank's island."""
    place = engine.placement.islands
    return f"{ISLANDS}{place.index} of {place.size} {what}".rstrip()


def add_island(contents: Contents, engine: Engine, own: list[torch.Tensor]) -> None:
    """Adds what this rank writes of its island; `own` is what `Engine.consensus` yields."""
    outer, place, owner = engine.outer, engine.placement, engine.owner
    if outer is None:
        return
    masters = owner.masters
    own_buffers = {id(b): mine for b, mine in zip(outer.buffers, own[len(masters) :], strict=False)}
    for piece in owner.pieces_of(own[: len(masters)], owner.owned_in_island) if own else ():
        contents.add_state(label(engine, PARAMETER), piece, engine.part_of(piece.name))
    for name in persistent_buffers(engine.model):
        mine = own_buffers.get(id(engine.model.get_buffer(name)))
        if mine is not None and name not in engine.absent and engine.speaks_for(name, of_island=True):
            contents.add_extra(f"buffer {name}", label(engine), mine, engine.part_of(name))
    if place.islands.index:
        firsts = {piece.name for piece in owner.pieces_of(masters, owner.owned_in_island) if piece.start == 0}
        for key, piece in owner.optimizer.state(owner.owned_in_island):
            contents.add_state(label(engine, key), piece, engine.part_of(piece.name))
        for name, values in engine.optimizer.values().items():
            if name in firsts:
                of = label(engine, name)
                contents.optimizer[of] = {key: contents.encoded(of, key, value) for key, value in values.items()}
    if place.island.index == 0:
        counts = {"count": outer.count, "steps": outer.steps}
        contents.optimizer[label(engine)] = {
            key: contents.encoded(label(engine), key, value) for key, value in counts.items()
        }


def load_island(engine: Engine, saved: OwnView) -> None:
    """Takes up what a checkpoint holds of this rank's island, where it has as many islands. All ranks call it alike."""
    outer = engine.outer
    if outer is None:
        return
    outer.count, outer.steps = 0.0, 0
    counts = saved.common().get(label(engine))
    if counts is None:
        return
    outer.count, outer.steps = float(counts["count"]), int(counts["steps"])
    if outer.steps:
        engine.owner.load_parameters(lambda name, start, stop: saved.read(name, label(engine, PARAMETER), start, stop))
        for name, buffer in persistent_buffers(engine.model).items():
            values = saved.extra(f"buffer {name}", label(engine), engine.part_of(name))
            if values is not None and name not in engine.absent:
                buffer.copy_(values.view(buffer.shape))
    if engine.placement.islands.index:
        engine.owner.load(_IslandState(engine, saved))


class _IslandState:
    """The optimiser state of one island, as a SavedState."""

    def __init__(self, engine: Engine, saved: OwnView) -> None:
        self._engine, self._saved = engine, saved
        self._common = saved.common()

    def keys(self, name: str) -> list[str]:
        return [key for key in self._saved.keys_of(name, label(self._engine) + " ") if key != PARAMETER]

    def read(self, name: str, key: str, start: int, stop: int) -> torch.Tensor:
        return self._saved.read(name, label(self._engine, key), start, stop)

    def values(self, name: str) -> dict[str, Any]:
        return dict(self._common.get(label(self._engine, name), {}))

    def common(self) -> dict[str, dict[str, Any]]:
        return self._common

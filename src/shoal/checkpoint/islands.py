"""Saves and restores the private state of each island.

A checkpoint's parameters are the consensus of all islands, and its optimiser state is that of the first island, so any
strategy can continue from it. In addition it holds what differs between islands: their parameters and buffers (between
two exchanges, or always, where a scheme leaves them different), what the scheme keeps, the optimiser state of the other
islands, and the samples seen since the last exchange. The same number of islands continues from these to the bit; any
other number begins with the consensus.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shoal.checkpoint.buffers import persistent_buffers
from shoal.parallel.engine import Engine
from shoal.parallel.kept_errors import ISLANDS
from shoal.parallel.sync.scheme import Kept

if TYPE_CHECKING:
    from shoal.checkpoint.contents import Contents
    from shoal.checkpoint.restore import OwnView
    from shoal.parallel.sync.outer import OuterLevel

PARAMETER = "parameter"
KEPT = "kept"
"""What the names of a scheme's own state begin with; optimisers name none so."""
NUMBER = "number"
"""Likewise for numbers that it keeps."""
DIFFERS = "differs"
"""Whether the island's own parameters are not the consensus."""


def label(engine: Engine, what: str = "", *, source: tuple[int, int] | None = None) -> str:
    """The name of an entry of this rank's island in a checkpoint; of another island, or of as many as there were when
    it was written, if `source` is given as (number, of how many)."""
    place = engine.placement.islands
    number, of = source or (place.index, place.size)
    return f"{ISLANDS}{number} of {of} {what}".rstrip()


def source_of(engine: Engine) -> tuple[int, int]:
    """The island of the checkpoint that this one goes on from."""
    place = engine.placement.islands
    return (engine.outer and engine.outer.goes_on_from) or (place.index, place.size)


def _kept(outer: OuterLevel) -> dict[str, list[torch.Tensor]]:
    """What the schemes of one or two loose levels keep, by name."""
    near = {} if outer.near is None else {f"near {what}": kept for what, kept in outer.near.kept.items()}
    return {**outer.kept, **near}


def add_island(contents: Contents, engine: Engine, own: list[torch.Tensor]) -> None:
    """Adds what this rank writes of its island; `own` is what `Engine.consensus` yields."""
    outer, place, owner = engine.outer, engine.placement, engine.owner
    if outer is None:
        return
    outer.settle()
    masters = owner.masters
    own_buffers = {id(b): mine for b, mine in zip(outer.buffers, own[len(masters) :], strict=False)}
    for piece in owner.pieces_of(own[: len(masters)], owner.owned_in_island) if own else ():
        contents.add_state(label(engine, PARAMETER), piece, engine.part_of(piece.name))
    for name in persistent_buffers(engine.model):
        mine = own_buffers.get(id(engine.model.get_buffer(name)))
        if mine is not None and name not in engine.absent and engine.speaks_for(name, of_island=True):
            contents.add_extra(f"buffer {name}", label(engine), mine, engine.part_of(name))
    for what, kept in _kept(outer).items():
        for piece in owner.pieces_of(kept, owner.owned_in_island):
            contents.add_state(label(engine, f"{KEPT} {what}"), piece, engine.part_of(piece.name))
    if place.islands.index:
        for key, piece in owner.optimizer.state(owner.owned_in_island):
            contents.add_state(label(engine, key), piece, engine.part_of_piece(piece))
        for name, values in engine.optimizer.values(owner.owned_in_island).items():
            of = label(engine, name)
            contents.optimizer[of] = {key: contents.encoded(of, key, value) for key, value in values.items()}
    if place.island.index == 0:
        counts = {
            "count": outer.count,
            "steps": outer.steps,
            DIFFERS: int(bool(own)),
            **{f"{KEPT} {what}": 1 for what in _kept(outer)},
            **({} if outer.near is None else {"near count": outer.near.count, "near steps": outer.near.steps}),
            **{f"{NUMBER} {name}": number for name, number in outer.kept.numbers.items()},
        }
        contents.optimizer[label(engine)] = {
            key: contents.encoded(label(engine), key, value) for key, value in counts.items()
        }


def load_island(engine: Engine, saved: OwnView) -> None:
    """Restores this rank's island from a checkpoint with the same number of islands. Collective."""
    outer = engine.outer
    if outer is None:
        return
    source = source_of(engine)
    outer.count, outer.steps = 0.0, 0
    outer.kept = Kept(outer.term, outer.masters)
    counts = saved.common().get(label(engine, source=source))
    if counts is None:
        return
    outer.count, outer.steps = float(counts["count"]), int(counts["steps"])
    if outer.near is not None:
        outer.near.kept = Kept(outer.near.term, outer.near.masters)
        outer.near.count = float(counts.get("near count", 0.0))
        outer.near.steps = int(counts.get("near steps", 0))
    for what, kept in _kept(outer).items():
        if f"{KEPT} {what}" not in counts:  # Saved under another scheme.
            continue
        for piece in engine.owner.pieces_of(kept, engine.owner.owned_in_island):
            stop = piece.start + len(piece.values)
            of = label(engine, f"{KEPT} {what}", source=source)
            piece.values.copy_(saved.read(piece.name, of, piece.start, stop))
    for name in outer.kept.numbers:
        if f"{NUMBER} {name}" in counts:
            outer.kept.numbers[name] = float(counts[f"{NUMBER} {name}"])
    if int(counts.get(DIFFERS, outer.steps)) and (outer.steps or not outer.term.equal):
        whose = label(engine, PARAMETER, source=source)
        engine.owner.load_parameters(lambda name, start, stop: saved.read(name, whose, start, stop))
        for name, buffer in persistent_buffers(engine.model).items():
            values = saved.extra(f"buffer {name}", label(engine, source=source), engine.part_of(name))
            if values is not None and name not in engine.absent:
                buffer.copy_(values.view(buffer.shape))
    if source[0]:
        engine.owner.load(_IslandState(engine, saved))


class _IslandState:
    """The optimiser state of one island, as a SavedState."""

    def __init__(self, engine: Engine, saved: OwnView) -> None:
        self._engine, self._saved, self._source = engine, saved, source_of(engine)
        self._common = saved.common()

    def keys(self, name: str) -> list[str]:
        keys = self._saved.keys_of(name, label(self._engine, source=self._source) + " ")
        return [key for key in keys if key != PARAMETER and not key.startswith(KEPT)]

    def read(self, name: str, key: str, start: int, stop: int) -> torch.Tensor:
        return self._saved.read(name, label(self._engine, key, source=self._source), start, stop)

    def read_full(self, name: str, key: str, start: int, stop: int) -> torch.Tensor:
        return self._saved.read_full(name, label(self._engine, key, source=self._source), start, stop)

    def values(self, name: str) -> dict[str, Any]:
        return dict(self._common.get(label(self._engine, name, source=self._source), {}))

    def common(self) -> dict[str, dict[str, Any]]:
        return self._common

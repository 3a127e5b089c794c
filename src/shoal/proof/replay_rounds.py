"""Replays rounds with a quorum in the serial run of a proof (`parallel/sync/quorum.py`).

Which island computed which share, and whose moves made a round, is decided by timing: a proof takes both from logs and
everything else from plain PyTorch. Rows of an island, in their order:

    update    (.., island, number, step, share)    an update from a share of the batch of a step, from 0
    push      (.., island, fragment, version, ..)  it sends how far it is from the anchor of this version
    take      (.., island, fragment, version, ..)  it takes the anchor of this version

The first island's log of merges has rows of fragment, version and the islands whose moves were merged into the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shoal.parallel.sync.averaged import Averaged
from shoal.parallel.sync.fragments import fragments_of
from shoal.parallel.sync.simulated import merged
from shoal.proof.islands import Island
from shoal.proof.replay import ContradictoryLog, Update


class _Rounds:
    """The anchors of all versions, and the moves that were sent."""

    def __init__(self, scheme: Averaged, copies: Sequence[Island], merges: Sequence[Sequence[Any]]) -> None:
        self.scheme, self.plan, self.copies = scheme, scheme.plan, copies
        names = list(copies[0].named)
        self.places = [
            [at for at, name in enumerate(names) if name in group] for group in fragments_of(names, self.plan.fragments)
        ]
        state = {what: copies[0].kept[what] for what in scheme.outer_state}
        self.centre = {"anchor": [param.detach().clone() for param in copies[0].named.values()], **state}
        self.anchors = {(p, 0): self._of(p) for p in range(self.plan.fragments)}
        self.moves: dict[tuple[int, int, int], tuple[float, dict[int, torch.Tensor]]] = {}
        self.merges = [list(merge) for merge in merges]
        self.seen = [[[0.0, 0] for _ in self.places] for _ in copies]

    def _of(self, p: int) -> dict[int, torch.Tensor]:
        return {at: self.centre["anchor"][at].clone() for at in self.places[p]}

    def learned(self, island: int, count: float) -> None:
        for each in self.seen[island]:
            each[0] += count
            each[1] += 1

    def push(self, island: int, p: int, version: int) -> None:
        copy, (learned, steps) = self.copies[island], self.seen[island][p]
        self.seen[island][p] = [0.0, 0]
        count = {"samples": learned, "equal": 1.0, "tokens2/steps": learned**2 / steps}[self.plan.weight]
        values = [*copy.named.values()]
        move = {at: copy.kept["anchor"][at] - values[at].detach() for at in self.places[p]}
        self.moves[p, version, island] = count, move

    def merge(self) -> None:
        """All merges whose moves are there."""
        for row in list(self.merges):
            p, version, islands = row
            if (p, version) not in self.anchors or any((p, version, i) not in self.moves for i in islands):
                continue
            self.merges.remove(row)
            found = [self.moves[p, version, island] for island in islands]
            total = sum(count for count, _ in found)
            for at in self.places[p]:
                mean = merged([move[at] for _, move in found], [count / total for count, _ in found], self.plan.merge)
                before = {what: tensors[at] for what, tensors in self.centre.items()}
                for what, value in self.scheme.simulate_outer(mean, before).items():
                    self.centre[what][at] = value
            self.anchors[p, version + 1] = self._of(p)

    def take(self, island: int, p: int, version: int) -> bool:
        self.merge()
        if (p, version) not in self.anchors:
            return False
        copy, blend = self.copies[island], self.plan.blend
        values = [*copy.named.values()]
        for at, anchor in self.anchors[p, version].items():
            copy.kept["anchor"][at] = anchor.clone()
            values[at].copy_(blend * values[at] + (1 - blend) * anchor)
        return True


def replay_rounds(
    scheme: Averaged, logs: Sequence[Any], copies: Sequence[Island], update: Update
) -> list[tuple[float, float]]:
    """Does what the logs say; the first island's sums."""
    *own, merges = logs
    rounds, rows, sums, moved = _Rounds(scheme, copies, merges), [list(log) for log in own], [], True
    while moved:
        moved = False
        for island, log in enumerate(rows):
            while log:
                kind, _, one, two, three = log[0]
                if kind == "update":
                    before = copies[island].counted
                    found = update(island, two, three)
                    rounds.learned(island, copies[island].counted - before)
                    if island == 0:
                        sums.append(found)
                with torch.no_grad():
                    if kind == "push":
                        rounds.push(island, one, two)
                    if kind == "take" and not rounds.take(island, one, two):
                        break
                log.pop(0)
                moved = True
    if any(rows):
        raise ContradictoryLog(f"no merge explains what islands took at {[log[0] for log in rows if log]}")
    return sums

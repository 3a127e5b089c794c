"""What the tests of gossip and elastic averaging run on real ranks: sums before and after exchanges, and faults."""

from __future__ import annotations

from typing import Any

import torch

from distributed.island_targets import _ready, prove_islands
from shoal.comm.json_exchange import exchange as exchange_json
from shoal.comm.ledger import BOOK
from shoal.launch.join import join, leave
from shoal.parallel.sync.neighbours import Arrived, NeighbourMessages
from shoal.parallel.sync.outer import OuterLevel
from shoal.proof.conditions import Conditions
from shoal.technique.sync.elastic import elastic
from shoal.technique.sync.gossip import gossip


def kept_sums(arguments: list[str], channel: Any) -> list[dict[str, Any]]:
    """For each strategy, over 6 steps: how far exchanges moved this rank, and by which fraction what they must keep."""
    me, rows = join(), []
    for text in arguments:
        ready, seen = _ready(me, "plain", text), list[tuple[float, float]]()
        level = ready.engine.outer
        assert level is not None
        scheme = level.term
        right = type(scheme).exchange

        def watched(self: Any, level: OuterLevel, weight: float, right: Any = right, seen: Any = seen) -> None:
            before, own = _sums(level, began=False), [tensor.clone() for tensor in level.masters]
            right(self, level, weight)
            lost = max(_relative(a, b) for a, b in zip(before, _sums(level, began=True), strict=True))
            moved = max(float((a - b).abs().max()) for a, b in zip(own, level.masters, strict=True))
            seen.append((lost, moved))

        type(scheme).exchange = watched  # type: ignore[method-assign]
        BOOK.take()
        kinds, counter = set(), 0
        with Conditions()():
            for step in range(6):
                ready.runner.step(step, counter)
                counter = ready.runner.order.next(counter)
                kinds |= {key.kind for key in BOOK.take().only("outer").entries if key.axis == "dp"}
        type(scheme).exchange = right  # type: ignore[method-assign]
        rows.append({
            "lost": max(lost for lost, _ in seen), "moved": max(moved for _, moved in seen),
            "kinds": sorted(kinds), "weight": level.kept.numbers.get("weight", 1.0),
        })  # fmt: skip
        ready.close()
    leave()
    return rows


def _sums(level: OuterLevel, *, began: bool) -> list[torch.Tensor]:
    """What an exchange must keep, summed over islands; outside the ledger's phase."""
    with BOOK.during("evaluate"):
        if isinstance(level.term, elastic):
            # Every rank keeps the same centre: it counts once.
            return [total + c for total, c in zip(_over(level.masters), level.kept["centre"], strict=True)]
        if isinstance(level.term, gossip) and level.term.mode == "push-sum":
            biased = level.kept["biased"] if began else level.term._biased(level)
            return [*_over(biased), *_over([torch.tensor([level.kept.numbers["weight"]], dtype=torch.float64)])]
        return _over(level.masters)


def _over(tensors: Any) -> list[torch.Tensor]:
    rows = exchange_json({"values": [tensor.tolist() for tensor in tensors]})
    columns = zip(*(row["values"] for row in rows), strict=True)
    return [torch.tensor(column, dtype=torch.float64).sum(0) for column in columns]


def _relative(before: torch.Tensor, after: torch.Tensor) -> float:
    return float((before - after).abs().max() / before.abs().max())


def stopped(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """One rank is asked to stop in a step: after which step does each stop?"""
    me = join()
    ready = _ready(me, "plain", arguments["strategy"])
    BOOK.take()
    counter, after = 0, None
    with Conditions()():
        for step in range(20):
            ready.engine.stop_requested = me.rank == arguments["rank"] and step == arguments["at"]
            if ready.runner.step(step, counter).stop:
                after = step
                break
            counter = ready.runner.order.next(counter)
    kinds = sorted({key.kind for key in BOOK.take().only("outer").entries})
    ready.close()
    leave()
    return {"stopped": after, "kinds": kinds}


def wrong_weight(arguments: dict[str, Any], channel: Any) -> Any:
    """The first neighbour counts for a little more, the island itself for as much less."""
    def mix(self: gossip, level: OuterLevel, turn: Any, tensors: Any) -> None:
        own = [tensor.clone() for tensor in tensors]
        right(self, level, turn, tensors)
        for tensor, mine in zip(tensors, own, strict=True):
            tensor.add_(mine, alpha=-1e-3).mul_(1 / (1 - 1e-3))

    right = gossip._mix
    gossip._mix = mix  # type: ignore[method-assign]
    return prove_islands(arguments, channel)


def _altered(arguments: Any, channel: Any, alter: Any) -> Any:
    """Changes what arrives from neighbours on rank 1."""
    right = NeighbourMessages.exchange

    def exchange(self: NeighbourMessages, *args: Any) -> list[Arrived]:
        arrived = right(self, *args)
        return alter(arrived) if channel.rank == 1 else arrived

    NeighbourMessages.exchange = exchange  # type: ignore[method-assign]
    return prove_islands(arguments, channel)


def one_round_behind(arguments: dict[str, Any], channel: Any) -> Any:
    """One rank mixes with what its first neighbour sent a round ago."""
    before: list[Arrived] = []

    def late(arrived: list[Arrived]) -> list[Arrived]:
        found = [before.pop() if before else arrived[0], *arrived[1:]]
        before.append(arrived[0])
        return found

    return _altered(arguments, channel, late)


def skipped_neighbour(arguments: dict[str, Any], channel: Any) -> Any:
    """One rank leaves a neighbour out."""
    return _altered(arguments, channel, lambda arrived: arrived[1:])


def weights_stay(arguments: dict[str, Any], channel: Any) -> Any:
    """Push-sum without its weights: what is biased is computed with."""
    return _altered(arguments, channel, lambda arrived: [each._replace(number=0.5) for each in arrived])


def wrong_pull(arguments: dict[str, Any], channel: Any) -> Any:
    """The centre is pushed away from the islands."""
    def exchange(self: elastic, level: OuterLevel, weight: float) -> None:
        before = [centre.clone() for centre in level.kept["centre"]]
        right(self, level, weight)
        for centre, was in zip(level.kept["centre"], before, strict=True):
            centre.copy_(2 * was - centre)

    right = elastic.exchange
    elastic.exchange = exchange  # type: ignore[method-assign]
    return prove_islands(arguments, channel)

"""What the tests of gossip and elastic averaging run on real ranks: sums before and after exchanges, and faults."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from distributed.island_targets import _ready, _run, prove_islands
from distributed.proofs import JOBS, _from_rank_0
from shoal.checkpoint.restore import restore
from shoal.checkpoint.save import open_checkpoint, save
from shoal.comm.json_exchange import exchange as exchange_json
from shoal.comm.ledger import BOOK
from shoal.comm.points import on_reach
from shoal.launch.join import join, leave
from shoal.parallel.sync.neighbours import Arrived, NeighbourMessages
from shoal.parallel.sync.outer import OuterLevel
from shoal.parallel.sync.pairs import Pairs
from shoal.proof.compare import compare
from shoal.proof.conditions import Conditions
from shoal.proof.options import ProofOptions
from shoal.proof.runs import replayed, train_steps
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
        rows.append(
            {
                "lost": max(lost for lost, _ in seen),
                "moved": max(moved for _, moved in seen),
                "kinds": sorted(kinds),
                "weight": level.kept.numbers.get("weight", 1.0),
            }
        )
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


def prove_async(arguments: dict[str, Any], channel: Any) -> list[dict[str, Any]]:
    """For each (job, strategy): a run whose order timing decides, its replay, and the largest difference of the two.
    `slow` is a rank that sleeps in every step; `tickets`: islands take shares of the data as they are free."""
    me, steps, rows = join(), arguments["steps"], []
    if me.rank == arguments.get("slow"):
        on_reach(lambda point: time.sleep(0.1) if point == "step: forward" else None)
    with tempfile.TemporaryDirectory() as own:
        folder = _from_rank_0(own)
        for number, (name, text) in enumerate(arguments["cases"]):
            options = ProofOptions(
                job=f"{JOBS}:{name}", strategy=text, num_steps=steps, reference=f"{folder}/{number}.safetensors"
            )
            ready = _ready(me, name, text)
            trained = train_steps(ready, steps, by_tickets=arguments.get("tickets", False))
            with ready.engine.consensus():
                replayed(ready, options)
                compared = compare(ready, options.reference)
            outer = ready.engine.outer
            assert outer is not None
            assert outer.tickets is not None
            office = outer.tickets.office
            difference, where = max(compared["worst"], default=(0.0, "nothing"))
            rows.append(
                {
                    "difference": difference,
                    "where": where,
                    "ledger": trained["ledger_differences"],
                    "compared": sum(compared["compared"].values()),
                    "log": outer.tickets.log if outer.pairs is None else outer.pairs.log,
                    "taken_over": 0 if office is None else office.shares.taken_over,
                    "merged": {} if office is None or office.merging is None else dict(office.merging.merged),
                    "consistency": outer.consistency.summary(),
                }
            )
            ready.close()
    leave()
    return rows


def lost_average(arguments: dict[str, Any], channel: Any) -> Any:
    """The island that asks keeps its model."""
    right = Pairs._move

    def move(self: Pairs, mine: Any, theirs: Any) -> None:
        right(self, [tensor.clone() for tensor in mine] if mine is self.level.kept["model"] else mine, theirs)

    Pairs._move = move  # type: ignore[method-assign]
    return prove_async(arguments, channel)


def overwritten(arguments: dict[str, Any], channel: Any) -> Any:
    """An update is written over what others have done meanwhile, in place of being added to it."""
    right = Pairs.step

    def step(self: Pairs, *, stop: bool) -> bool:
        for model, was in zip(self.level.kept["model"], self.level.kept["read"], strict=True):
            model.copy_(was)
        return right(self, stop=stop)

    Pairs.step = step  # type: ignore[method-assign]
    return prove_async(arguments, channel)


def restored(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """What an island keeps when it is saved, and after it was restored; and a few steps from there on."""
    me = join()
    ready = _ready(me, "norm", arguments["strategy"])
    _, counter = _run(ready, 0, 5, 0)
    folder = Path(arguments["folder"])
    save(folder, ready.engine, step=5, progress={"counter": counter})
    before = _held(ready)
    ready.close()
    again = _ready(me, "norm", arguments["strategy"])
    restore(again.engine, open_checkpoint(folder / "step-00000005"))
    same = all(map(torch.equal, before, _held(again)))
    losses, _ = _run(again, 5, 8, counter)
    clock = again.engine.outer.kept.numbers["clock"]  # type: ignore[union-attr]
    again.close()
    leave()
    return {"same": same, "losses": losses, "clock": clock}


def _held(ready: Any) -> list[torch.Tensor]:
    """An island's own values, once no other asks."""
    outer = ready.engine.outer
    with BOOK.during("setup"):
        outer.total(0.0)
    kept = [tensor.clone() for name in sorted(outer.kept) for tensor in outer.kept[name]]
    return [*(master.clone() for master in outer.masters), *kept, torch.tensor([outer.kept.numbers["clock"]])]

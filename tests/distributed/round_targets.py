"""What the tests of compressed rounds run on real ranks, in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from distributed.island_targets import _ready, resumed
from shoal.checkpoint import restore as restoring
from shoal.comm.ledger import BOOK
from shoal.launch.join import join, leave
from shoal.parallel.sync import streams
from shoal.parallel.sync.compressed import CompressedMoves
from shoal.proof.runs import train_steps


def compressed(arguments: dict[str, Any], channel: Any) -> list[dict[str, Any]]:
    """For each strategy: how the ledger differs from its prediction, and by how much what was sent and what is kept,
    over all islands, differ from what was to be sent."""
    me, rows = join(), []
    off: list[float] = []
    total = CompressedMoves.total

    def checked(self: CompressedMoves, moves: list[torch.Tensor], weight: float, number: int) -> None:
        decay = arguments.get("decay", 1.0)
        due = torch.cat(moves).mul(weight) + decay * _kept(self)
        total(self, moves, weight, number)
        after = torch.stack([due, _kept(self)])
        with BOOK.during("agreement"):
            dist.all_reduce(after, group=self.buckets[0].route.between.group)
        off.append(float((after[0] - after[1] - torch.cat(moves)).abs().max() / after[0].abs().max()))

    CompressedMoves.total = checked  # type: ignore[method-assign]
    for text in arguments["strategies"]:
        off.clear()
        ready = _ready(me, "language:tiny", text)
        trained = train_steps(ready, arguments["steps"])
        saved = ready.engine.consistency
        ready.close()
        rows.append(
            {
                "ledger": trained["ledger_differences"],
                "off": max(off, default=0.0),
                "rounds": saved.rounds,
                "losses": trained["losses"],
            }
        )
    leave()
    return rows


def _kept(codec: CompressedMoves) -> torch.Tensor:
    """What was not sent, laid out as moves are."""
    joined = []
    for bucket, ranges in zip(codec.buckets, codec.portion.ranges, strict=True):
        flat = torch.zeros(bucket.compressed.stop - bucket.compressed.start, dtype=torch.float64)
        for each in codec.compression.fragments[id(bucket)]:
            if "residual" in each.state:
                each.within(flat, bucket.compressed.start).copy_(each.state["residual"])
        joined += [flat[low:high] for low, high in ranges]
    return torch.cat(joined)


def sent_bytes(arguments: dict[str, Any], channel: Any) -> list[list[int]]:
    """For each strategy: what this rank sent between islands in each step."""
    me, found = join(), []
    for text in arguments["strategies"]:
        ready, counter, sizes = _ready(me, "language:tiny", text), 0, []
        for step in range(arguments["steps"]):
            BOOK.take()
            ready.runner.step(step, counter)
            counter = ready.runner.order.next(counter)
            sizes.append(sum(e.bytes for key, e in BOOK.take().entries.items() if key.phase == "outer"))
        ready.close()
        found.append(sizes)
    leave()
    return found


def saves_no_traffic(arguments: dict[str, Any], channel: Any) -> Any:
    """A scheme that accumulates for h steps and sends in each of them all the same."""
    right = streams.after_update

    def after_update(scheme: Any, level: Any, step: int, *, stop: bool) -> bool:
        if step % scheme.plan.h:
            level.take_back(level.agree())
        return right(scheme, level, step, stop=stop)

    streams.after_update = after_update  # type: ignore[assignment]
    return prove_ledger(arguments, channel)


def prove_ledger(arguments: dict[str, Any], channel: Any) -> list[list[str]]:
    """How the ledgers of steps differ from their predictions."""
    me = join()
    ready = _ready(me, "plain", arguments["strategy"])
    found = train_steps(ready, arguments["steps"])["ledger_differences"]
    ready.close()
    leave()
    return list(found)


def forgets_outer_momentum(arguments: dict[str, Any], channel: Any) -> Any:
    """A checkpoint without the state of the outer optimiser."""
    right = restoring.load_island

    def load_island(engine: Any, saved: Any) -> None:
        right(engine, saved)
        for momentum in engine.outer.kept["momentum"]:
            momentum.zero_()

    restoring.load_island = load_island
    return resumed(arguments, channel)

"""What the tests of islands run on real ranks, in float64: steps, a checkpoint in between, and a serial simulation."""

from __future__ import annotations

import inspect
import os
import signal
import tempfile
from collections import Counter
from copy import copy
from pathlib import Path
from typing import Any

import torch

from distributed import slow_momentum  # noqa: F401 (declares slowmo)
from distributed.proofs import JOBS, _barrier, _from_rank_0
from shoal.checkpoint.restore import restore
from shoal.checkpoint.save import open_checkpoint, save
from shoal.comm.ledger import BOOK
from shoal.comm.points import on_reach
from shoal.job import load_job
from shoal.launch.join import join, leave
from shoal.parallel import apply
from shoal.parallel.sync import streams
from shoal.parallel.sync.averaged import RoundPlan
from shoal.parallel.sync.moments import Moments
from shoal.parallel.sync.outer import NearLevel, OuterLevel
from shoal.parallel.sync.rounds import OuterRound
from shoal.parallel.sync.scheme import Kept
from shoal.parallel.sync.streams import Stream
from shoal.proof.compare import compare
from shoal.proof.conditions import Conditions, for_proof
from shoal.proof.entry import serial_run
from shoal.proof.runs import train_steps
from shoal.runtime.setup import Prepared, prepare
from shoal.strategy import parse
from shoal.technique.sync.diloco import diloco
from shoal.training.entry import train_run


def _ready(me: Any, name: str, strategy: str) -> Prepared:
    job = for_proof(load_job(name if ":" in name else f"{JOBS}:{name}"))
    return prepare(job, parse(strategy), rank=me.rank, backend=me.backend, device=me.device, dtype=torch.float64)


def stale_inner_anchor(arguments: dict[str, Any], channel: Any) -> list[dict[str, Any]]:
    """The inner level goes on from what it had before the outer one exchanged."""
    NearLevel.go_on = lambda self: None  # type: ignore[method-assign]
    return prove_islands(arguments, channel)


def moments_stay(arguments: dict[str, Any], channel: Any) -> list[dict[str, Any]]:
    """Moments of the inner optimiser are sent and not taken."""
    right = Moments._mean
    Moments._mean = lambda self, *given: [(flat, []) for flat, _ in right(self, *given)]  # type: ignore[method-assign]
    return prove_islands(arguments, channel)


def prove_islands(arguments: dict[str, Any], channel: Any) -> list[dict[str, Any]]:
    """For each (job, strategy, strategy of the serial run): the largest difference from it, and the ledger."""
    me, steps, rows = join(), arguments["steps"], []
    with tempfile.TemporaryDirectory() as own:
        folder = Path(_from_rank_0(own))
        for number, (name, text, judge) in enumerate(arguments["cases"]):
            path = folder / f"{number}.safetensors"
            if me.rank == 0:
                serial_run(
                    {
                        "job": f"{JOBS}:{name}",
                        "strategy": judge,
                        "reference": str(path),
                        "exact": True,
                        "num_steps": steps,
                        "micro_batches": arguments.get("micro_batches", 1),
                    },
                    None,
                )
            _barrier()
            ready = _ready(me, name, text)
            trained = train_steps(ready, steps)
            with ready.engine.consensus():
                compared = compare(ready, str(path))
            ready.close()
            difference, where = max(compared["worst"], default=(0.0, "nothing"))
            rows.append(
                {
                    "difference": difference,
                    "where": where,
                    "ledger": trained["ledger_differences"],
                    "compared": sum(compared["compared"].values()),
                }
            )
            _barrier()
    leave()
    return rows


def _run(ready: Prepared, first: int, stop: int, counter: int) -> tuple[list[float], int]:
    losses = []
    with Conditions()():
        for step in range(first, stop):
            losses.append(ready.runner.step(step, counter).loss)
            counter = ready.runner.order.next(counter)
    BOOK.take()
    return losses, counter


def resumed(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """A run without a break and one that is saved and taken up again: losses and parameters of this rank."""
    me, at, steps = join(), arguments["at"], arguments["steps"]
    name, strategy = arguments["job"], arguments["strategy"]
    unbroken = _ready(me, name, strategy)
    losses, counter = _run(unbroken, 0, at, 0)
    save(Path(arguments["folder"]), unbroken.engine, step=at, progress={"counter": counter})
    more, _ = _run(unbroken, at, steps, counter)
    values = [master.clone() for master in unbroken.engine.owner.masters]
    buffers = [buffer.clone() for buffer in unbroken.engine.model.buffers()]
    unbroken.close()
    again = _ready(me, name, arguments.get("under", strategy))
    checkpoint = open_checkpoint(Path(arguments["folder"]) / f"step-{at:08}")
    restore(again.engine, checkpoint)
    then, _ = _run(again, at, steps, checkpoint.progress["counter"])
    same = all(map(torch.equal, values, again.engine.owner.masters)) and all(
        map(torch.equal, buffers, again.engine.model.buffers())
    )
    again.close()
    leave()
    return {"losses": losses, "more": more, "then": then, "same": same}


def never_averaged(arguments: dict[str, Any], channel: Any) -> Any:
    """Islands exchange their numbers and keep their parameters."""
    Stream._step = lambda self, mean, **how: None  # type: ignore[method-assign]
    return prove_islands(arguments, channel)


def equal_weights(arguments: dict[str, Any], channel: Any) -> Any:
    """Islands count alike, however much they learned from."""
    RoundPlan.counts = lambda self, learned, steps: 1.0  # type: ignore[method-assign]
    return prove_islands(arguments, channel)


def wrong_sign(arguments: dict[str, Any], channel: Any) -> Any:
    """The outer optimiser takes how far islands moved with the wrong sign."""
    right = diloco.outer_step
    diloco.outer_step = lambda self, moved, kept: right(self, -moved, kept)  # type: ignore[method-assign]
    return prove_islands(arguments, channel)


def ends_exchanged(arguments: dict[str, Any], channel: Any) -> Any:
    """What an island keeps of its own values and what it takes of the anchor are exchanged."""

    class Exchanged(Stream):
        def _step(self, mean: list[torch.Tensor], **how: Any) -> None:
            self.plan = self.plan._replace(blend=1 - self.plan.blend)
            super()._step(mean, **how)

    streams.Stream = Exchanged  # type: ignore[misc]
    return prove_islands(arguments, channel)


def one_round_behind(arguments: dict[str, Any], channel: Any) -> Any:
    """One island applies what the round before brought."""

    class Late(Stream):
        before: dict[int, list[torch.Tensor]] = {}  # noqa: RUF012

        def _step(self, mean: list[torch.Tensor], **how: Any) -> None:
            late = self.before.get(self.number, [torch.zeros_like(flat) for flat in mean])
            self.before[self.number] = [flat.clone() for flat in mean]
            super()._step(late if self.level.islands.index else mean, **how)

    streams.Stream = Late  # type: ignore[misc]
    return prove_islands(arguments, channel)


def fragments_in_another_order(arguments: dict[str, Any], channel: Any) -> Any:
    """On one rank layers go to the fragments in reverse."""
    if channel.rank == 1:
        right = streams.fragments_of
        streams.fragments_of = lambda names, fragments: right(names, fragments)[::-1]  # type: ignore[assignment]
    return prove_islands(arguments, channel)


def forgetful(arguments: dict[str, Any], channel: Any) -> Any:
    """A checkpoint's slow momentum is not taken up."""

    class Forgets(OuterLevel):
        @property
        def kept(self) -> Kept:
            kept = copy(self._kept)
            if "load_island" in [frame.function for frame in inspect.stack()[1:3]]:
                kept.clear()
            return kept

        @kept.setter
        def kept(self, kept: Kept) -> None:
            self._kept = kept

    apply.OuterLevel = Forgets  # type: ignore[misc]
    return resumed(arguments, channel)


def train_and_be_killed(arguments: dict[str, Any], channel: Any) -> Any:
    """A training run in which ranks are killed: `arguments["killed"]` has (rank, point, how often it is reached)."""
    for rank, point, times in arguments.pop("killed"):
        if rank == channel.rank:
            _die_at(point, times)
    return train_run(arguments, channel)


def _die_at(point: str, times: int) -> None:
    """Kills this process when it comes to a point for the given time; "average" is in the middle of an exchange."""
    seen: Counter[str] = Counter()
    arrive = OuterRound.arrive

    def arrived(at: str) -> None:
        seen[at] += 1
        if at == point and seen[at] == times:
            os.kill(os.getpid(), signal.SIGKILL)

    def averaged(self: OuterRound) -> Any:
        arrived("average")
        return arrive(self)

    OuterRound.arrive = averaged  # type: ignore[method-assign]
    on_reach(arrived)

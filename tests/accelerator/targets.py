"""Functions that the tests of the device run on its ranks."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist

from shoal.job import load_job
from shoal.launch.join import join, leave
from shoal.parallel.engine import Engine
from shoal.parallel.pipeline.executor import Pipeline, _needs
from shoal.runtime.setup import prepare
from shoal.strategy import parse


def surroundings(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Where a rank computes, and a sum over all of them on that device."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        me = join(backend=arguments.get("backend"))
    value = torch.full((3,), float(me.rank + 1), device=me.device)
    dist.all_reduce(value)
    notes = [str(each.message) for each in said]
    leave()
    return {"device": str(me.device), "backend": me.backend, "sum": float(value[0]), "notes": notes}


def fork_after_use(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Whether the server that this rank was forked from had touched the device; what a child of the rank gets."""
    before = torch.reef._is_in_bad_fork() or torch.reef.is_initialized()
    torch.ones(2, device="reef")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.ones(2, device="reef")
            os.write(write, b"used it")
        except RuntimeError as error:
            os.write(write, str(error).splitlines()[0].encode())
        os._exit(0)
    os.waitpid(child, 0)
    return {"used_before": before, "child": os.read(read, 4096).decode()}


def refuses_host_memory(arguments: dict[str, Any], channel: Any) -> str:
    """What `via=shared()` says on the device."""
    me = join()
    try:
        job, strategy = load_job(arguments["job"]), parse(arguments["strategy"])
        prepare(job, strategy, rank=me.rank, backend=me.backend, device=me.device)
    except ValueError as error:
        return str(error)
    return "accepted"


def barriers_know_their_device(arguments: dict[str, Any], channel: Any) -> list[str]:
    """What torch warns of while an engine is made and closed."""
    me = join()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ready = prepare(load_job(arguments["job"]), parse("dp(2)"), rank=me.rank, backend=me.backend, device=me.device)
        ready.engine.close()
    leave()
    return [str(each.message) for each in said if "barrier" in str(each.message)]


def waits_of_steps(arguments: dict[str, Any], channel: Any) -> list[dict[str, Any]]:
    """For each strategy: how often the host waits for the device in a steady step, before the end of the last backward
    and after it; and peak memory as the run would record it."""
    from shoal.launch.devices import peak_memory_bytes

    me = join()
    rows = []
    for spec, text in arguments["cases"]:
        strategy = parse(text)
        ready = prepare(load_job(spec), strategy, rank=me.rank, backend=me.backend, device=me.device)
        ended: list[int] = []
        close = Engine.close_backward

        def closing(self: Engine, close: Any = close, ended: list[int] = ended) -> None:
            ended.append(torch.reef.waits())
            if arguments.get("errors"):
                torch.reef.waits_are_errors(False)
            close(self)

        counter = 0
        for step in range(2):
            ready.runner.step(step, counter)
            counter = ready.runner.order.next(counter)
        Engine.close_backward = closing
        count = Engine.count
        if arguments.get("reads_the_loss"):
            Engine.count = lambda self, loss, by: (float(loss), count(self, loss, by))  # type: ignore[method-assign]
        try:
            start = torch.reef.waits()
            torch.reef.waits_are_errors(bool(arguments.get("errors")))
            ready.runner.step(2, counter)
        finally:
            torch.reef.waits_are_errors(False)
            Engine.close_backward, Engine.count = close, count  # type: ignore[method-assign]
        rows.append(
            {
                "case": text,
                "before": ended[-1] - start,
                "after": torch.reef.waits() - ended[-1],
                "peak": peak_memory_bytes(me.device),
                "exact_peak": torch.reef.max_memory_allocated(),
            }
        )
        ready.engine.close()
    leave()
    return rows


def looks_ahead_first(arguments: dict[str, Any], channel: Any) -> Any:
    """A pipeline that posts the next action's receive before this one's, and does not ask in which order the other rank
    sends: with tags it is right, without it swaps micro-batches of the same shape."""
    from shoal.parallel.pipeline.borders import Borders

    def faulty(self: Pipeline, number: int, key: Any) -> None:
        for action in self.actions[number + 1 : number + 2]:
            message = _needs(action, self.num_stages)
            if message is not None:
                self.borders.expect(message, key(action.micro))

    honest, Pipeline._look_ahead = Pipeline._look_ahead, faulty
    order, Borders._ahead_of = Borders._ahead_of, lambda self, message: iter(())  # type: ignore[method-assign]
    try:
        from distributed.proofs import prove_many

        return prove_many(arguments, channel)
    finally:
        Pipeline._look_ahead, Borders._ahead_of = honest, order  # type: ignore[method-assign]


def without_lanes(arguments: dict[str, Any], channel: Any) -> Any:
    """A pipeline whose messages of all kinds share one group."""
    from distributed.proofs import prove_many
    from shoal.parallel.pipeline.borders import Borders

    Borders._lane = lambda self, kind, source, to: self.members.group  # type: ignore[method-assign]
    return prove_many(arguments, channel)


def trained_codecs(arguments: dict[str, Any], channel: Any) -> list[dict[str, Any]]:
    """For each compression: the losses of a few steps, whether ranks end alike, and how the ledger differs."""
    from shoal.comm.ledger import BOOK

    me = join()
    rows = []
    for text in arguments["terms"]:
        ready = prepare(
            load_job(arguments["job"]),
            parse(f"dp({me.world}, compress={text})"),
            rank=me.rank,
            backend=me.backend,
            device=me.device,
        )
        losses, unlike, counter = [], [], 0
        for step in range(arguments["steps"]):
            BOOK.take()
            losses.append(ready.runner.step(step, counter).loss)
            counted = BOOK.take()
            if step:
                unlike += ready.differences(counted)
            counter = ready.runner.order.next(counter)
        sums = [float(piece.detach().double().sum()) for piece in ready.engine.model.parameters()]
        rows.append({"term": text, "losses": losses, "sums": sums, "ledger": unlike})
        ready.engine.close()
    leave()
    return rows


def losses(arguments: dict[str, Any], channel: Any) -> list[float]:
    """Of a few steps in float64."""
    me = join()
    ready = prepare(
        load_job(arguments["job"]),
        parse(arguments["strategy"]),
        rank=me.rank,
        backend=me.backend,
        device=me.device,
        dtype=torch.float64,
    )
    found, counter = [], 0
    for step in range(arguments["num_steps"]):
        found.append(ready.runner.step(step, counter).loss)
        counter = ready.runner.order.next(counter)
    ready.engine.close()
    leave()
    return found

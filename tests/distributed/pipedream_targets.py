"""What the tests of PipeDream run on real ranks: the executor beside its simulation, and looked at from inside."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

import shoal.parallel.pipeline.stash as stash
from distributed.pipedream_serial import Simulated, simulate, stages_of
from distributed.watched_layer import SEEN, mark
from shoal.comm.ledger import BOOK
from shoal.job import load_job
from shoal.launch.join import join, leave
from shoal.parallel.pipeline.pipedream import PipeDream
from shoal.parallel.result import NonFinite
from shoal.runtime.float64 import KeepFloat64
from shoal.runtime.setup import Prepared, prepare
from shoal.strategy import parse, pp

JOBS = str(Path(__file__).parent / "jobs" / "unflushed.py")


def _prepare(me: Any, job_name: str, text: str, dtype: torch.dtype | None = torch.float64) -> Prepared:
    job = load_job(f"{JOBS}:{job_name}")
    return prepare(job, parse(text), rank=me.rank, backend=me.backend, device=me.device, dtype=dtype)


def _always_the_newest_weights() -> None:
    """A planted fault: backward finds the newest weights in place of those of its forward."""
    attach = stash.WeightStash.attach
    stash.WeightStash.attach = lambda self, version=None: attach(self, None)  # type: ignore[method-assign]


def beside_the_simulation(arguments: dict[str, Any], channel: Any) -> list[dict[str, Any]]:
    """For each (job, strategy, steps, steps after which to drain): how far this rank's slices, its losses and its
    ledger are from what they should be."""
    me = join()
    if arguments.get("fault"):
        _always_the_newest_weights()
    rows = [_beside(me, *case) for case in arguments["cases"]]
    leave()
    return rows


def curves(arguments: dict[str, Any], channel: Any) -> list[list[float]]:
    """The losses of a job's steps under each of some strategies, without a drain in between."""
    me = join()
    found = []
    for text in arguments["strategies"]:
        job = load_job(arguments["job"])
        ready = prepare(job, parse(text), rank=me.rank, backend=me.backend, device=me.device, dtype=torch.float64)
        counter, losses = 0, []
        for step in range(arguments["steps"]):
            losses.append(ready.runner.step(step, counter).loss)
            counter = ready.runner.order.next(counter)
        ready.close()
        found.append(losses)
    leave()
    return found


def _beside(me: Any, job_name: str, text: str, steps: int, drained_after: list[int]) -> dict[str, Any]:
    ready = _prepare(me, job_name, text)
    engine, runner = ready.engine, ready.runner
    pipeline = ready.executor
    assert isinstance(pipeline, PipeDream)
    losses, unlike, counter, filling = [], [], 0, 0
    with KeepFloat64():
        for step in range(steps):
            if step in drained_after:
                pipeline.settle()
                filling = step
            BOOK.take()
            losses.append(runner.step(step, counter).loss)
            counted = BOOK.take()
            if step - filling >= pipeline.first_steady_step:
                unlike += counted.differences(ready.predicted)
            counter = runner.order.next(counter)
        still_out = len(pipeline._underway)
        pipeline.settle()
    with KeepFloat64():
        expected = simulate(ready.job, ready.strategy, steps=steps, drained_after=frozenset(drained_after))
    row = {
        "difference": _difference(ready, expected),
        "losses": _loss_difference(ready, expected, losses),
        "ledger": unlike,
        "staleness": sorted(pipeline.staleness().items()),
        "versions": pipeline.stash.most_versions,
        "in_flight": pipeline.most_in_flight,
        "still_out": still_out,
        "stage": pipeline.stage,
        "updates": pipeline.updates,
    }
    engine.close()
    return row


def _difference(ready: Prepared, expected: Simulated) -> float:
    """The largest relative difference of the parameters, optimiser state and buffers that this rank holds."""
    engine, apart = ready.engine, [0.0]
    held = {name for name, stage in stages_of(ready.job, ready.strategy).items() if stage == ready.executor.stage}

    def own(name: str, whole: torch.Tensor) -> torch.Tensor:
        part = engine.part_of(name)
        return whole if part is None else part.of(whole)

    def compare(mine: torch.Tensor, theirs: torch.Tensor) -> None:
        largest = float(theirs.abs().max()) or 1.0
        apart.append(float((mine - theirs).abs().max()) / largest)

    shown = dict(engine.model.named_parameters())
    for name in held:
        compare(shown[name].detach(), own(name, expected.parameters[name]))
    for bucket, master in zip(engine.buckets, engine.owner.masters, strict=True):
        for slot in bucket.buffer.slots:
            compare(master[slot.start : slot.stop], own(slot.name, expected.parameters[slot.name]).reshape(-1))
    states = 0
    for key, piece in engine.optimizer.state(lambda bucket: (0, bucket.buffer.padded)):
        compare(piece.values, own(piece.name, expected.state[piece.name][key]).reshape(-1))
        states += 1
    assert states == sum(len(expected.state[name]) for name in held)
    for name, buffer in engine.model.named_buffers():
        if name not in engine.absent:
            compare(buffer.double(), expected.buffers[name].double())
    return max(apart)


def _loss_difference(ready: Prepared, expected: Simulated, losses: list[float]) -> float:
    term = ready.strategy.term(pp)
    assert term is not None
    apart, told = [0.0], 0
    for step, loss in enumerate(losses):
        upto = (step + 1) * term.micro - (term.n - 1) if term.micro >= term.n else step * term.micro + 1
        rows = expected.losses[told:upto]
        mean = sum(total for total, _ in rows) / sum(count for _, count in rows)
        apart.append(abs(loss - mean) / abs(mean))
        told = upto
    return max(apart)


def saved_weights(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Everything that autograd saves in a forward, hashed then and when backward asks for it again; and what layers
    that watch their own weights were given in the two passes (and in a recomputation)."""
    me = join()
    if arguments.get("fault"):
        _always_the_newest_weights()
    ready = _prepare(me, arguments["job"], arguments["strategy"])
    saved, changed = 0, 0

    def pack(tensor: torch.Tensor) -> Any:
        return tensor, mark(tensor)

    def unpack(packed: Any) -> torch.Tensor:
        nonlocal saved, changed
        tensor, then = packed
        saved += 1
        changed += mark(tensor) != then
        return tensor

    SEEN.clear()
    counter = 0
    with saved_tensors_hooks(pack, unpack):
        for step in range(arguments["steps"]):
            ready.runner.step(step, counter)
            counter = ready.runner.order.next(counter)
        ready.executor.settle()
    seen = list(SEEN)
    leave()
    return {"saved": saved, "changed": changed, "seen": seen, "stage": ready.executor.stage}


def first_ahead_of_last(arguments: dict[str, Any], channel: Any) -> int:
    """The last rank does not begin the last micro-batch of a step before the first rank is done with that step; how
    many steps went by like that."""
    me = join()
    ready = _prepare(me, "adamw", arguments["strategy"])
    pipeline, counter = ready.executor, 0
    begin, step_now = pipeline._begin, 0

    def begin_when_told(micro: int, *rest: Any) -> None:
        sign = Path(arguments["folder"]) / str(step_now)
        while pipeline.holds_loss and micro == pipeline.term.micro - 1 and not sign.exists():
            time.sleep(0.002)
        begin(micro, *rest)

    pipeline._begin = begin_when_told
    for step_now in range(3):
        ready.runner.step(step_now, counter)
        counter = ready.runner.order.next(counter)
        if pipeline.stage == 0:
            (Path(arguments["folder"]) / str(step_now)).touch()
    ready.executor.settle()
    leave()
    return step_now + 1


def no_number(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Steps until one has no loss or no gradient: what was said, after how many, and whether parameters are numbers."""
    me = join()
    ready = _prepare(me, arguments["job"], arguments["strategy"])
    said, done, counter = "", 0, 0
    try:
        for step in range(arguments["steps"]):
            ready.runner.step(step, counter)
            counter = ready.runner.order.next(counter)
            done += 1
        ready.executor.settle()
    except NonFinite as error:
        said = str(error)
    finite = all(bool(torch.isfinite(piece.values).all()) for piece in ready.engine.owner.parameters())
    leave()
    return {"said": said, "done": done, "finite": finite}

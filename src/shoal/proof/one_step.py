"""The gate on the ranks: two steps in float64, serial and under a strategy, and how far they differ.

The steps are those of the job, with its own optimiser, but for what a strategy does not depend on: the batch is the
smallest that gives every share two samples, nothing is dropped at random, and no parameter starts at zero
(`gate_model.py`). First the gradients, the loss and the buffers are compared, then what the optimiser made of them.
"""

from __future__ import annotations

import hashlib
import math
import socket
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.comm.group import BACKENDS
from shoal.comm.json_exchange import exchange
from shoal.comm.ledger import BOOK
from shoal.job import Job
from shoal.job.buffers import buffer_modes
from shoal.job.randomness import CannotPlace
from shoal.launch.join import Rank, join, leave
from shoal.layout.experts.rehearsal import ParametersKept, rehearsing
from shoal.layout.held_outside import Outside
from shoal.layout.held_state import HeldNow
from shoal.parallel.result import NonFinite
from shoal.proof.data_reads import same_values, why_data_differ
from shoal.proof.gate import NUMBER, TOLERANCES, is_settled, require_right
from shoal.proof.gate_compare import GateComparison, GradientWatch, Kind, Row, save_serial, worst
from shoal.proof.gate_conditioning import Moved, allowed, hidden, movement
from shoal.proof.gate_model import gate_model
from shoal.proof.gate_question import CannotCheck, question, require_independent_once
from shoal.proof.gate_serial import FACTORS, STEPS, serial_steps
from shoal.proof.model_fails import naming_what_cut_it
from shoal.proof.undropped import Undropped, drawing_alike
from shoal.runtime.compiled import running_eagerly
from shoal.runtime.float64 import KeepFloat64, model_in_float64, to_float64
from shoal.runtime.setup import prepare
from shoal.runtime.step import build_model
from shoal.strategy import ModelFacts, Strategy, parse

UNSTEADY = (
    "two calls of the model on the same samples differ, although random numbers are drawn alike: it keeps state "
    "outside its modules, such as a counter in a global"
)


def on_own_ranks(job: Job, question: dict[str, Any], backend: str | None) -> dict[str, Any]:
    """On every rank of a group that was started for this: what `compared` gives."""
    me = join(backend=BACKENDS.get(backend or ""))
    report = compared(job, question, me)
    leave()
    return report


def gate_here(
    job: Job, strategy: Strategy, facts: ModelFacts, me: Rank, channel: Any, *, backend: str | None = None
) -> None:
    """On every rank of a running job without a parent process: the same checks, before training."""
    asked: dict[str, Any] | None = None
    wrong = ""
    settled = True
    if me.rank == 0:
        try:
            asked = question(job, strategy, facts, backend=backend)
            for message in require_independent_once(job, strategy, facts, asked, backend=backend):
                channel.say(message)
            settled = asked is None or is_settled(asked, channel.say)
        except ValueError as error:
            wrong = str(error)
    first = exchange({"asked": asked, "settled": settled, "wrong": wrong})[0]
    if first["wrong"]:
        raise CannotCheck(first["wrong"])
    if first["settled"]:
        return
    # Only rank 0 prints and remembers; all stop alike.
    report = compared(job, first["asked"], me)
    require_right(report, first["asked"], channel.say if me.rank == 0 else _in_silence)


def _in_silence(message: dict[str, Any]) -> None:
    pass


def compared(job: Job, asked: dict[str, Any], me: Rank) -> dict[str, Any]:
    """The difference that decides, of what kind and where, over all ranks; or why there is none."""
    strategy = parse(asked["strategy"])
    steps = STEPS if asked["updates"] else 1
    beyond, given = Outside(job), job.global_batch
    job = replace(
        job, model=gate_model(job), global_batch=asked["batch"], schedule=FACTORS.__getitem__, batch_norm="sync"
    )
    about = exchange({"host": socket.gethostname(), "data": _data_digest(job)})
    if differ := why_data_differ([row["data"] for row in about]):
        return {"skip": differ, "data": True}
    hosts = [row["host"] for row in about]
    writer = hosts.index(hosts[me.rank])
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-gate-"))
        # A small batch may count nothing, or be too small for the model: then the job's own is taken.
        for batch in dict.fromkeys((asked["batch"], given)):
            job = replace(job, global_batch=batch)
            mine: dict[str, Any] = {"path": "", "skip": ""}
            if me.rank == writer:
                # One rank of each host: the reference is a file.
                with beyond.kept():
                    mine = _serial(job, strategy, Path(folder) / "reference.safetensors", steps)
            reports = exchange(mine)
            skip = next((row["skip"] for row in reports if row["skip"]), "")
            if not skip:
                break
        if skip:
            return {"skip": skip}
        serial = reports[writer]
        stack.enter_context(running_eagerly())
        stack.enter_context(beyond.kept())
        ready = prepare(job, strategy, rank=me.rank, backend=me.backend, device=me.device, dtype=torch.float64)
        # A rank that stopped here would leave the others waiting.
        ready.runner.randomness.notes_only = True
        comparison = GateComparison(ready.engine, serial["path"], buffer_modes(job.buffers, ready.engine.model))
        watch = GradientWatch(ready.engine)
        moved: Moved | None = None
        counter, decided, outside, skip, unclear = 0, {"difference": "0.0"}, [], "", ""
        for step in range(steps):
            rows, elements = [], 0
            try:
                with KeepFloat64(), Undropped(), naming_what_cut_it(strategy):
                    loss = ready.runner.step(step, counter).loss
            except NonFinite:
                rows, loss = [Row(math.nan, "loss", "the loss or the gradient")], math.nan
                with KeepFloat64(), Undropped():
                    outside = ready.runner.read_outside(counter)
            else:
                if step == 0:
                    rows, elements = comparison.gradients(watch)
                    rows += comparison.buffers()
                else:
                    rows = comparison.updates(watch)
            there = serial["losses"][step]
            # The loss of a later step follows from the updates: what is wrong is in them.
            kind: Kind = "loss" if step == 0 or math.isnan(loss) else "update"
            rows.append(Row(abs(loss - there) / max(abs(there), 1e-300), kind, f"the loss of step {step + 1}"))
            if skip := _noted(ready.runner.randomness.unplaced):
                break
            expected = serial["elements"] if step == 0 else 0
            decided = _decided(rows, elements, expected, moved or {})
            if decided["wrong"] and moved is None and math.isfinite(float(decided["difference"])):
                # Rounding alone may have done it.
                mine = {"moved": movement(job, strategy, serial, steps=steps) if me.rank == writer else {}}
                moved = exchange(mine)[writer]["moved"]
                decided = _decided(rows, elements, expected, moved)
            unclear = "" if decided["wrong"] else unclear or decided["hidden"]
            if decided["wrong"]:
                if not outside and math.isnan(float(decided["difference"])):
                    # A buffer that follows parameters, read where they are not gathered.
                    with KeepFloat64(), Undropped():
                        outside = ready.runner.read_outside(counter)
                break
            counter = ready.runner.order.next(counter)
        watch.stop()
        ready.close()
        BOOK.take()
    return {
        "skip": skip or unclear,
        "outside": outside,
        "attributes": serial["attributes"],
        "declared": dict(comparison.modes),
        **decided,
    }


def _noted(mine: list[str]) -> str:
    """What some rank could not draw as a serial run does; empty if there is nothing. All ranks call it alike."""
    return next((text for row in exchange({"unplaced": mine}) for text in row["unplaced"]), "")


def _decided(rows: list[Row], elements: int, expected: int, moved: Moved) -> dict[str, Any]:
    """The worst of all ranks: of gradients and loss, then of buffers, then of updates. `moved`: what rounding does in a
    serial step, where that was asked. All ranks call it alike."""
    kinds = {row.kind for row in rows}
    mine = [worst([row for row in rows if row.kind == kind]) for kind in sorted(kinds)]
    mine += [row for row in rows if not row.difference <= TOLERANCES[row.kind] and row not in mine]
    # Infinity and NaN are no JSON numbers.
    every = exchange({"rows": [(repr(row.difference), row.kind, row.where) for row in mine], "elements": elements})
    found = [Row(float(row[0]), row[1], row[2]) for report in every for row in report["rows"]]
    there = sum(report["elements"] for report in every)
    if expected and there != expected and not any(math.isnan(row.difference) for row in found):
        found.append(Row(math.inf, "gradient", f"{NUMBER}: {there} where a serial step has {expected}"))
    wrong = [row for row in found if not row.difference <= allowed(row, moved)]
    first = [row for row in wrong if row.kind in ("gradient", "loss")]
    row = worst(first or wrong or found)
    buffers = [row.where for row in wrong if row.kind == "buffer"]
    return {
        "difference": repr(row.difference),
        "kind": row.kind,
        "where": row.where,
        "buffers": sorted(set(buffers)),
        "wrong": bool(wrong),
        "tolerance": allowed(row, moved),
        "hidden": hidden(found, moved),
    }


def _serial(job: Job, strategy: Strategy, path: Path, steps: int) -> dict[str, Any]:
    before = torch.get_rng_state()
    try:
        # Built before float64 is kept, as ranks build theirs.
        model, other = (model_in_float64(build_model(job)) for _ in range(2))
        with KeepFloat64(), Undropped(), running_eagerly():
            differs, changed = _examined(job, other)
            if differs:
                return {"path": "", "skip": UNSTEADY}
            found = serial_steps(job, strategy, model, has_state=bool(changed), steps=steps)
    except CannotPlace as error:
        return {"path": "", "skip": str(error)}
    except Exception as error:  # Whatever the user's code raises in float64 says nothing about the layout.
        return {"path": "", "skip": f"its serial step in float64 fails: {type(error).__name__}: {error}"}
    finally:
        torch.set_rng_state(before)
    for step, loss in enumerate(found.losses):
        if not math.isfinite(loss):
            return {"path": "", "skip": f"the loss of step {step + 1} is {loss} in a serial run in float64 already"}
    save_serial(found, path)
    elements = sum(value.numel() for value in found.gradients.values())
    buffers = {name for name, _ in model.named_buffers()}
    attributes = [name for name in changed if name not in buffers]
    return {
        "path": str(path),
        "skip": "",
        "losses": found.losses,
        "elements": elements,
        "attributes": attributes,
        "has_state": bool(changed),
    }


def _examined(job: Job, model: nn.Module) -> tuple[bool, list[str]]:
    """Whether two calls of the model on the same samples differ, and what a call changes of what modules hold, by name.
    The model is as it was afterwards."""
    model.train()
    batch = {name: to_float64(entry) for name, entry in job.train.batch(job.order().indices(0)).items()}
    losses, changed = [], []
    outside = Outside(job)
    for _ in range(2):
        with ParametersKept(model), rehearsing(model), outside.kept(), drawing_alike():
            before, beyond = HeldNow(model.modules()), HeldNow((), outside.held)
            params = {name: param.detach().clone() for name, param in model.named_parameters()}
            losses.append(float(job.loss_of(job.run_model(model, batch), batch)[0].detach()))
            changed = before.changed_names(model)
            changed += [name for name, param in model.named_parameters() if not same_values(params.get(name), param)]
            if beyond.changed()[0]:
                changed.append("what the loss, a closure or a global holds")
    return losses[0] != losses[1] and not all(math.isnan(loss) for loss in losses), changed


def _data_digest(job: Job) -> str:
    """Of the first batch as this rank reads it."""
    digest = hashlib.sha256()
    for name, entry in sorted(job.train.batch(job.order().indices(0)).items()):
        values = entry.detach().cpu().contiguous()
        digest.update(f"{name}{tuple(values.shape)}{values.dtype}".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes() if values.numel() else b"")
    return digest.hexdigest()

"""One step in float64, serial and under a strategy, and how far their gradients are apart: the gate on the ranks.

The step is that of the job but for three things, none of which a layout depends on: the batch is the smallest that
gives every share two samples (with one, code that mixes samples would go unnoticed), nothing is dropped at random, and
the optimiser is plain SGD with momentum, whose state after one step is the gradient itself.
"""

from __future__ import annotations

import math
import socket
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from shoal.comm.ledger import BOOK
from shoal.job import Job, constant, no_options
from shoal.job.facts import build_without_memory, has_batch_norm
from shoal.strategy import ModelFacts, Strategy, contract, is_legal, parse
from shoal.train.checkpoint.exchange import exchange
from shoal.train.gate import cutting_axes, exact_twin, is_settled, require_right
from shoal.train.launch.join import Rank, join, leave
from shoal.train.proven import remember
from shoal.train.setup import Prepared, job_from, prepare
from shoal.train.step import build_model, cast
from shoal.train.verify.conditions import Conditions
from shoal.train.verify.fingerprint import fingerprint
from shoal.train.verify.float64 import KeepFloat64
from shoal.train.verify.reference import train_serially
from shoal.train.verify.undropped import Undropped, undropped

GRADIENT = "momentum_buffer"
"""What SGD calls the gradient after one step."""
SMALLEST = 1e-4
"""A gradient is compared by the size of its tensor's largest element, or by this part of the model's largest: where the
true gradient is zero (the bias of an attention key) there is nothing but rounding."""
COPIES = 4
"""Of the parameters, in float64, that a step holds: themselves, gradients, the optimiser's state and the reference."""


def question(job: Job, strategy: Strategy, facts: ModelFacts) -> dict[str, Any] | None:
    """What there is to check, as JSON, and whether it can be; None if the strategy leaves the model whole."""
    axes = cutting_axes(strategy)
    if not axes:
        return None
    twin = exact_twin(strategy)
    model = build_without_memory(job)
    return {
        "key": fingerprint(job, model, twin), "job": job.name, "strategy": str(twin), "axes": list(axes),
        "world": twin.world, "batch": _batch(twin, facts),
        "skip": _why_not(twin, replace(facts, batch_norm=facts.batch_norm and "sync"), model),
    }  # fmt: skip


def remember_layout(job: Job, strategy: Strategy, difference: float) -> None:
    """Enters a layout as proven that was proven by other means."""
    if cutting_axes(strategy):
        twin = exact_twin(strategy)
        key = fingerprint(job, build_without_memory(job), twin)
        remember(key, job=job.name, strategy=str(twin), difference=difference)


def _batch(strategy: Strategy, facts: ModelFacts) -> int:
    most = facts.global_batch or 1
    shares = strategy.replicas * strategy.micro_batches
    batches = (batch for batch in range(2 * shares, most, shares))
    return next((b for b in batches if is_legal(strategy, facts=replace(facts, global_batch=b))), most)


def _why_not(strategy: Strategy, facts: ModelFacts, model: torch.nn.Module) -> str:
    promised = contract(strategy, facts)
    if promised.kind != "exact":
        return f"{strategy} does not promise the numbers of a serial run ({promised.reasons[0]})"
    needed = 8 * sum(param.numel() for param in model.parameters()) * max(COPIES, strategy.world)
    free = psutil.virtual_memory().available
    if needed > free / 2:
        return f"in float64 it would need {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
    return ""


def one_step(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """On every rank of a group that was started for this: what `compared` gives."""
    me = join()
    told = compared(job_from(arguments), arguments["question"], me)
    leave()
    return told


def gate_here(job: Job, strategy: Strategy, facts: ModelFacts, me: Rank, channel: Any) -> None:
    """On every rank of a running job, where no process stands above them: the same check, before training."""
    asked = question(job, strategy, facts)
    if asked is None:
        return
    settled = me.rank == 0 and is_settled(asked, channel.say)
    answers = exchange({"settled": settled, "skip": asked["skip"]})
    if any(answer["skip"] for answer in answers) or answers[0]["settled"]:
        return
    # Only rank 0 says what there is to say, and remembers; all stop alike.
    told = compared(job, asked, me)
    require_right(told, asked, channel.say if me.rank == 0 else _in_silence)


def _in_silence(message: dict[str, Any]) -> None:
    pass


def compared(job: Job, asked: dict[str, Any], me: Rank) -> dict[str, Any]:
    """The largest relative difference over all ranks and where it is; or why there is none."""
    strategy = parse(asked["strategy"])
    job = replace(
        job, model=undropped(job.model), global_batch=asked["batch"], options=no_options, schedule=constant,
        batch_norm="sync", optimizer=partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    )  # fmt: skip
    hosts = [row["host"] for row in exchange({"host": socket.gethostname()})]
    writer = hosts.index(hosts[me.rank])
    with ExitStack() as stack:
        mine: dict[str, Any] = {"path": "", "skip": ""}
        if me.rank == writer:
            # One rank of each host: the reference is a file.
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-gate-"))
            mine = _serial(job, strategy, Path(folder) / "reference.safetensors")
        reports = exchange(mine)
        skip = next((row["skip"] for row in reports if row["skip"]), "")
        if skip:
            return {"skip": skip}
        ready = prepare(job, strategy, rank=me.rank, backend=me.backend, device=me.device, dtype=torch.float64)
        with KeepFloat64(), Undropped():
            loss = ready.runner.step(0, 0).loss
        rows, elements = _differences(ready, reports[writer]["path"])
        serial = reports[writer]["loss"]
        rows.append((abs(loss - serial) / max(abs(serial), 1e-300), "the loss"))
        ready.engine.close()
        BOOK.take()
        # Infinity and NaN are no JSON numbers; a NaN counts as the largest of all.
        worst, where = max(rows, key=lambda row: (math.isnan(row[0]), row[0]))
        every = exchange({"worst": repr(worst), "where": where, "elements": elements})
    found = [(float(row["worst"]), row["where"]) for row in every]
    there, expected = sum(row["elements"] for row in every), reports[writer]["elements"]
    if there != expected:
        found.append((math.inf, f"the number of gradient elements, {there} where a serial step has {expected},"))
    difference, where = max(found, key=lambda row: (math.isnan(row[0]), row[0]))
    return {"skip": "", "difference": repr(difference), "where": where}


def _serial(job: Job, strategy: Strategy, path: Path) -> dict[str, Any]:
    before = torch.get_rng_state()
    try:
        per_micro = strategy.micro_batches if has_batch_norm(job.model()) else 1
        reference = train_serially(job, steps=1, micro_batches=per_micro, conditions=Conditions())
        with KeepFloat64(), Undropped():
            if not _draws_nothing(job):
                return {"path": "", "skip": "the model draws random numbers that cannot be turned off"}
    except Exception as error:  # Whatever the user's code raises in float64 says nothing about the layout.
        return {"path": "", "skip": f"its serial step in float64 fails: {type(error).__name__}: {error}"}
    finally:
        torch.set_rng_state(before)
    if not math.isfinite(reference.losses[0]):
        return {"path": "", "skip": f"the loss of its first step is {reference.losses[0]}"}
    tensors = {f"gradient:{name}": state[GRADIENT] for name, state in reference.state.items() if GRADIENT in state}
    elements = sum(value.numel() for value in tensors.values())
    tensors |= {f"buffer:{name}": value for name, value in reference.buffers.items()}
    save_file({key: value.contiguous().clone() for key, value in tensors.items()}, path)
    return {"path": str(path), "skip": "", "loss": reference.losses[0], "elements": elements}


def _draws_nothing(job: Job) -> bool:
    """Whether the loss is the same for other random numbers. Asked of one sample: draws do not wait for a second."""
    model = build_model(job, torch.float64).train()
    batch = cast(job.train.batch(job.order().indices(0)[:2]), torch.float64)
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            losses.append(float(job.loss(job.run_model(model, batch), batch)[0]))
    return losses[0] == losses[1] or all(math.isnan(loss) for loss in losses)


def _differences(ready: Prepared, path: str) -> tuple[list[tuple[float, str]], int]:
    """This rank's slices of gradients and buffers beside the serial ones; and how many elements were compared."""
    engine = ready.engine
    rows, elements = [(0.0, "nothing")], 0

    def own(name: str, whole: torch.Tensor) -> torch.Tensor:
        part = engine.part_of(name)
        return whole if part is None else part.of(whole)

    with safe_open(path, framework="pt") as reference:
        known = set(reference.keys())
        sizes = {key: float(reference.get_tensor(key).abs().max()) for key in known if key.startswith("gradient:")}
        least = SMALLEST * max(sizes.values(), default=0.0)
        for key, piece in engine.owned_state():
            if key != GRADIENT:
                continue
            if f"gradient:{piece.name}" not in known:
                rows.append((math.inf, f"the gradient of {piece.name}, which has none in a serial step,"))
                continue
            whole = own(piece.name, reference.get_tensor(f"gradient:{piece.name}")).reshape(-1)
            there = whole[piece.start : piece.start + piece.values.numel()]
            elements += piece.values.numel()
            if there.numel():
                apart = float((piece.values.cpu().double() - there.double()).abs().max())
                size = max(sizes[f"gradient:{piece.name}"], least) or 1.0
                rows.append((apart / size, f"the gradient of {piece.name}"))
        for name, buffer in engine.model.named_buffers():
            if f"buffer:{name}" in known and name not in engine.absent and buffer.numel() and not buffer.is_complex():
                other = own(name, reference.get_tensor(f"buffer:{name}")).double()
                apart = float((buffer.cpu().double() - other).abs().max())
                rows.append((apart / max(float(other.abs().max()), 1.0), f"the buffer {name}"))
    return rows, elements

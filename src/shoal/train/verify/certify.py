"""`verify`: trains serially and in parallel from the same start, and certifies how far the two are apart.

An `exact` strategy is held to 1e-10 in float64 over every parameter, the optimiser state, the buffers and the loss
curve, and its ledger to the prediction, to the byte. A strategy with a weaker contract is held to the band it states.
The serial run is plain PyTorch (`reference.py`); each rank compares the slice it holds, so nothing is gathered.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from shoal.comm.ledger import BOOK
from shoal.job import Job
from shoal.parallel.optimizer import Piece
from shoal.strategy import Strategy, contract, parse, pp, require_legal
from shoal.train.setup import Prepared, job_from, prepare
from shoal.train.verify.float64 import KeepFloat64
from shoal.train.verify.reference import train_serially
from shoal.workload.layout import facts_of, layout_of

EXACT = 1e-10
"""Largest relative difference of an exact strategy in float64. Correct ones measure 1e-15, faults 1e-5 and more."""
FILLS = 8
"""How many times over a pipeline without flush is filled, at least, before its loss curve is judged."""
ZERO_GRADIENT = 1e-8
"""Largest absolute drift, of elements whose true gradient is zero: Adam divides their rounding by its epsilon, 1e-8."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What was proven, or what was not."""

    job: str
    strategy: str
    world: int
    contract: str
    passed: bool
    max_rel_diff: float
    tolerance: float
    worst: str
    """Where the largest difference is: a parameter, its optimiser state, a buffer or the loss."""
    ledger_matches: bool
    steps: int
    ledger_differences: list[str] = field(default_factory=list)
    zero_gradient: list[str] = field(default_factory=list)
    """Parameters with elements whose true gradient is zero, and buffers that follow them (the running mean behind a
    bias that batch norm cancels); those elements are compared absolutely."""
    widened: dict[str, int] = field(default_factory=dict)
    """Modules that asked for float32 inside the float64 run, and how often; they computed in float64."""
    float32_drift: float | None = None
    """The same difference for a float32 run: information, not a criterion."""
    losses: list[float] = field(default_factory=list)
    serial_losses: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def verify(
    job_spec: str,
    strategy: Strategy,
    *,
    steps: int = 10,
    size: str | None = None,
    overrides: dict[str, Any] | None = None,
    target: str = "shoal.train.verify.certify:parallel_run",
    progress: Callable[[str], None] = lambda text: None,
) -> Certificate:
    """Runs both and compares. `target` names the parallel run's function: tests plant faults there."""
    from shoal.train.launch import run_ranks, warm_up

    warm_up()
    arguments = {"job": job_spec, "size": size, **(overrides or {}), "strategy": str(strategy)}
    job = job_from(arguments)
    facts = facts_of(job, layout_of(job, strategy))
    require_legal(strategy, facts=facts)
    promised = contract(strategy, facts)
    exact = promised.kind == "exact"
    notes = list(promised.reasons)
    if _unflushed_ranks(strategy):
        # As many updates as it takes for staleness to show: each stage's own, several times over.
        steps = max(steps, -(-FILLS * _unflushed_ranks(strategy) // strategy.micro_batches))
    # Dropout draws its masks by micro-batch and rank. Batch norm, on the other hand, wants whole micro-batches.
    parts = strategy.data_parallel if facts.dropout and not facts.batch_norm else 1
    arguments |= {"exact": exact, "parts": parts, "steps_to_verify": steps}
    cut = [axis.name for axis in strategy.axes if not axis.name.startswith("dp")]
    if facts.dropout and (facts.batch_norm or cut):
        arguments["dropout_off"] = True
        because = "batch norm" if facts.batch_norm else " and ".join(cut)
        notes.append(f"dropout is off in this proof: with {because} no serial run draws the same masks")
    with tempfile.TemporaryDirectory(prefix="shoal-verify-") as folder:
        arguments["reference"] = str(Path(folder) / "reference.safetensors")
        progress(f"{steps} serial steps in {'float64' if exact else 'float32'}")
        serial = run_ranks("shoal.train.verify.certify:serial_run", arguments, ranks=1)[0]
        progress(f"{steps} steps on {strategy.world} ranks under {strategy}")
        ranks = run_ranks(target, arguments, ranks=strategy.world)
    losses = ranks[0]["losses"]
    curve = [abs(a - b) / max(abs(b), 1e-300) for a, b in zip(losses, serial["losses"], strict=True)]
    differences = [tuple(row) for rank in ranks for row in rank["worst"]]
    if exact:
        # Every element of every tensor must have been compared, by some rank.
        for kind, elements in serial["elements"].items():
            compared = sum(rank["compared"].get(kind, 0) for rank in ranks)
            if compared != elements:
                differences.append((float("inf"), f"{kind}: {compared} of {elements} elements are there to compare"))
    zero_gradient = sorted({name for rank in ranks for name in rank["zero_gradient"]})
    if exact:
        differences += [(d, f"loss of step {step + 1}") for step, d in enumerate(curve)]
        tolerance = EXACT
    else:
        differences = [(sum(curve) / len(curve), "mean difference of the loss curve")]
        tolerance = promised.within
    # A NaN compares as the largest of all.
    largest, where = max(differences, key=lambda row: (row[0] != row[0], row[0]))
    unlike = [f"rank {rank['rank']}: {line}" for rank in ranks for line in rank["ledger_differences"]]
    return Certificate(
        job=job.name, strategy=str(strategy), world=strategy.world, contract=str(promised),
        passed=largest <= tolerance and not unlike, max_rel_diff=largest, tolerance=tolerance, worst=where,
        ledger_matches=not unlike, steps=steps, ledger_differences=unlike[:20], zero_gradient=zero_gradient,
        widened=serial["widened"], losses=losses, serial_losses=serial["losses"], notes=notes,
        float32_drift=max((rank["float32_drift"] or 0.0) for rank in ranks) if exact else None,
    )  # fmt: skip


def _unflushed_ranks(strategy: Strategy) -> int:
    """How many ranks its pipeline has, if that is one without flush; else 0."""
    pipeline = strategy.term(pp)
    return pipeline.n if pipeline is not None and pipeline.schedule == "pipedream" else 0


def _job_of(arguments: dict[str, Any]) -> Job:
    job = job_from(arguments)
    if not arguments.get("dropout_off"):
        return job

    def without_dropout(build: Callable[[], nn.Module] = job.model) -> nn.Module:
        model = build()
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
        return model

    return replace(job, model=without_dropout)


def serial_run(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """In a process of its own: the serial run, left behind as a file of tensors."""
    dtype = torch.float64 if arguments["exact"] else None
    strategy = parse(arguments["strategy"])
    with KeepFloat64() as kept:
        reference = train_serially(
            _job_of(arguments), steps=arguments["steps_to_verify"], micro_batches=strategy.micro_batches,
            parts=arguments["parts"], dtype=dtype, unflushed_ranks=_unflushed_ranks(strategy),
        )  # fmt: skip
    tensors = {f"parameter:{name}": value for name, value in reference.parameters.items()}
    tensors |= {f"rounding:{name}": mask for name, mask in reference.rounding.items()}
    tensors |= {f"buffer:{name}": value for name, value in reference.buffers.items()}
    for name, state in reference.state.items():
        tensors |= {f"{key}:{name}": value for key, value in state.items()}
    save_file({key: value.contiguous().clone() for key, value in tensors.items()}, arguments["reference"])
    elements = {"parameter": sum(value.numel() for value in reference.parameters.values())}
    for state in reference.state.values():
        for key, value in state.items():
            elements[key] = elements.get(key, 0) + value.numel()
    return {"losses": reference.losses, "widened": kept.modules, "elements": elements}


def parallel_run(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """On every rank: the run under the strategy, compared slice by slice."""
    from shoal.train.launch.join import join, leave

    me = join()
    job, strategy = _job_of(arguments), parse(arguments["strategy"])
    report: dict[str, Any] = {"rank": me.rank, "float32_drift": None}
    steps = arguments["steps_to_verify"]
    if arguments["exact"]:
        ready = prepare(job, strategy, rank=me.rank, backend=me.backend, device=me.device, dtype=torch.float64)
        with KeepFloat64():
            report |= _train(ready, steps)
        report |= compare(ready, arguments["reference"])
        ready.engine.close()
        narrow = prepare(job, strategy, rank=me.rank, backend=me.backend, device=me.device)
        _train(narrow, steps)
        report["float32_drift"] = max((row[0] for row in compare(narrow, arguments["reference"])["worst"]), default=0.0)
    else:
        ready = prepare(job, strategy, rank=me.rank, backend=me.backend, device=me.device)
        report |= _train(ready, steps) | {"worst": [], "zero_gradient": []}
    leave()
    return report


def _train(ready: Prepared, steps: int) -> dict[str, Any]:
    """The steps' losses, and how the ledger of each full step after the first differs from its prediction."""
    losses, unlike, counter = [], [], 0
    steady = ready.engine.pipeline.first_steady_step if ready.engine.pipeline is not None else 1
    order = ready.runner.order
    for step in range(steps):
        BOOK.take()
        losses.append(ready.runner.step(step, counter).loss)
        # What a pipeline tells about shapes that it has not seen before is no part of a step.
        counted = BOOK.take().without("shapes")
        # The first step also settles who has gradients at all; every other one must be as predicted, once a pipeline
        # without flush is full.
        if step >= steady or steps == 1:
            unlike += ready.differences(counted)
        counter = order.next(counter)
    return {"losses": losses, "ledger_differences": sorted(set(unlike)), "predicted": ready.predicted.to_json()}


def compare(ready: Prepared, path: str) -> dict[str, Any]:
    """The largest relative differences of this rank's slices: max|a-b| over the slice by max|b| over the tensor."""
    engine = ready.engine
    rows: list[tuple[float, str]] = []
    noisy: set[str] = set()
    compared: dict[str, int] = {}
    with safe_open(path, framework="pt") as reference:
        known = set(reference.keys())

        def own(name: str, whole: torch.Tensor) -> torch.Tensor:
            part = engine.part_of(name)
            return whole if part is None else part.of(whole)

        def check(kind: str, piece: Piece, label: str) -> None:
            whole = own(piece.name, reference.get_tensor(f"{kind}:{piece.name}")).reshape(-1)
            there = slice(piece.start, piece.start + piece.values.numel())
            rounding = own(piece.name, reference.get_tensor(f"rounding:{piece.name}")).reshape(-1)[there]
            apart = (piece.values.double().cpu() - whole[there].double()).abs()
            if rounding.any():
                noisy.add(piece.name)
                drift = float(apart[rounding].max())
                if drift > ZERO_GRADIENT:
                    rows.append((drift, f"{label} (absolute, where the true gradient is zero)"))
                apart = apart[~rounding]
            compared[kind] = compared.get(kind, 0) + piece.values.numel()
            scale = float(whole.abs().max())
            if apart.numel():
                rows.append((float(apart.max()) / (scale or 1.0), label))

        for piece in engine.owned_parameters():
            check("parameter", piece, f"parameter {piece.name}")
        for key, piece in engine.owned_state():
            if f"{key}:{piece.name}" not in known:
                rows.append((float("inf"), f"{key} of {piece.name} (the serial optimiser has none)"))
                continue
            check(key, piece, f"{key} of {piece.name}")
        drifts = any(reference.get_tensor(key).any() for key in known if key.startswith("rounding:"))
        for name, buffer in engine.model.named_buffers():
            if buffer.numel() and not buffer.is_complex() and f"buffer:{name}" in known and name not in engine.absent:
                other = own(name, reference.get_tensor(f"buffer:{name}")).double()
                drift = float((buffer.double().cpu() - other).abs().max())
                relative = drift / (float(other.abs().max()) or 1.0)
                if drifts and relative > EXACT and drift <= ZERO_GRADIENT:
                    noisy.add(f"buffer {name}")
                else:
                    rows.append((relative, f"buffer {name}"))
    rows.sort(key=lambda row: (row[0] != row[0], row[0]), reverse=True)
    return {"worst": rows[:5], "zero_gradient": sorted(noisy), "compared": compared}

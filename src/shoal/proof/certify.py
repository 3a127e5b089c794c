"""`verify`: trains serially and in parallel from the same start, and certifies how far the two are apart.

The serial run is the model that one process would have trained (`reference.py`). An `exact` strategy is held to it in
float64 over every parameter, the optimiser state, the buffers and the loss curve, and its ledger to the prediction, to
the byte. How far the serial run itself moves under another order of sums is measured: that is the conditioning, and
the tolerance follows from it. A strategy with a weaker contract is held to the band it states. Each rank compares the
slice it holds, so nothing is gathered.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from shoal.comm.ledger import BOOK
from shoal.job.facts import build_without_memory
from shoal.layout.held_outside import Outside
from shoal.layout.layout import facts_of, layout_of
from shoal.parallel.pipeline.pipedream import micros_told
from shoal.proof.compare import EXACT, GRADIENT, LOSS, MARGIN, GradientSums, compare, follows, moves, real
from shoal.proof.conditions import Conditions, for_proof
from shoal.proof.coupling import SamplesCoupled, couples_samples, refusal
from shoal.proof.model_fails import naming_what_cut_it
from shoal.proof.reference import Disturbed, Islands, Reference, train_serially
from shoal.runtime.compiled import compiled_parts, running_eagerly
from shoal.runtime.setup import Prepared, job_from, prepare, try_job
from shoal.strategy import Strategy, contract, dp, local, parse, pp, require_legal

WIDEST = 1e-7
"""The widest tolerance: a hundredth of what the smallest planted fault shows. A job that would need more cannot be
proven, whatever its difference is."""
DISTURBANCES = 2
"""Serial runs with another order of sums."""
FILLS = 8
"""How many times over a pipeline without flush is filled, at least, before its loss curve is judged."""
AMPLIFIED = (
    "where the true gradient is zero only gradients are compared, not what the optimiser makes of them: it steps by "
    "the sign of a gradient, or the like, so rounding alone moves those elements"
)
NOT_COVERED = {
    "exact": "steps and samples beyond these, other sizes of the batch, precision other than float64, optimiser state "
    "without a value for each element, validation, speed, and whether the job trains well",
    "loss curve": "parameters, optimiser state and buffers (the contract promises the loss curve only), steps and "
    "samples beyond these, other sizes of the batch, validation, speed, and whether the job trains well",
}
"""By what is compared."""


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
    seed: int = 0
    compared: dict[str, int] = field(default_factory=dict)
    """What was compared: elements of parameters, of each kind of optimiser state and of buffers, and losses."""
    serial: str = ""
    """The serial run that it was compared with."""
    conditioning: dict[str, float] = field(default_factory=dict)
    """How far the serial run moves under another order of sums, by the same kinds; the largest sets the tolerance."""
    not_covered: str = ""
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
    provable: bool = True
    """Whether rounding moves the serial run too little to hide a fault; a job that is not provable never passes."""

    @property
    def verdict(self) -> str:
        return "PASSED" if self.passed else "FAILED" if self.provable else "CANNOT BE PROVEN"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def verify(
    job_spec: str,
    strategy: Strategy,
    *,
    steps: int = 10,
    size: str | None = None,
    overrides: dict[str, Any] | None = None,
    target: str = "shoal.proof.certify:parallel_run",
    progress: Callable[[str], None] = lambda text: None,
) -> Certificate:
    """Runs both and compares. `target` names the parallel run's function: tests plant faults there.

    Raises:
        IllegalStrategy: The strategy cannot train this job.
        SamplesCoupled: It splits batches whose samples depend on each other; the text says how.
    """
    from shoal.launch import run_ranks, warm_up

    warm_up()
    arguments = {"job": job_spec, "size": size, **(overrides or {}), "strategy": str(strategy)}
    job = job_from(arguments)
    try_job(job, strategy)
    facts = facts_of(job, layout_of(job, strategy))
    require_legal(strategy, facts=facts)
    # Islands that step by themselves are simulated in one process, and the simulation is met to the last digit.
    exact = contract(_synchronous(strategy), facts).kind == "exact"
    averaging = _averaging(strategy)
    if averaging is not None:
        steps = max(steps, averaging.h + 1)
    if _unflushed_ranks(strategy):
        # As many updates as it takes for staleness to show: each stage's own, several times over.
        steps = max(steps, -(-FILLS * _unflushed_ranks(strategy) // strategy.micro_batches))
    arguments |= {"exact": exact, "steps_to_verify": steps}
    with tempfile.TemporaryDirectory(prefix="shoal-verify-") as folder:
        arguments["reference"] = str(Path(folder) / "reference.safetensors")
        progress("one pass over a batch, at once and in parts")
        examined = run_ranks("shoal.proof.certify:examine", arguments, ranks=1)[0]
        if examined["refused"]:
            raise SamplesCoupled(examined["refused"])
        promised = contract(strategy, replace(facts, forward_state=tuple(examined["state"])))
        arguments |= {"micro_batches": promised.micro_batches, "parts": promised.parts}
        # Where samples may depend on each other, their order may mean something.
        arguments["disturbances"] = DISTURBANCES if exact else 0
        arguments["reverse"] = examined["reversible"] and not examined["state"] and job.loss_over == "samples"
        progress(f"{steps} serial steps in {'float64' if exact else 'float32'}")
        serial = run_ranks("shoal.proof.certify:serial_run", arguments, ranks=1)[0]
        progress(f"{steps} steps on {strategy.world} ranks under {strategy}")
        ranks = run_ranks(target, arguments, ranks=strategy.world)
    notes = [*promised.reasons, *examined["notes"]]
    if any(rank.get("amplified") for rank in ranks):
        notes.append(AMPLIFIED)
    losses = ranks[0]["losses"]
    curve = [abs(a - b) / max(abs(b), 1e-300) for a, b in zip(losses, serial["losses"], strict=True)]
    conditioning = serial["conditioning"]
    declared = {name: mode for rank in ranks for name, mode in rank["declared"].items()}
    if exact:
        found = _found(ranks, serial, curve)
    else:
        found = [(sum(curve) / len(curve), "mean difference of the loss curve")]
    # A NaN compares as the largest of all.
    largest, where = max(found, key=lambda row: (row[0] != row[0], row[0]))
    unlike = [f"rank {rank['rank']}: {line}" for rank in ranks for line in rank["ledger_differences"]]
    moves = max(conditioning.values(), default=0.0)
    tolerance = min(WIDEST, max(EXACT, MARGIN * moves)) if exact else promised.within
    provable = MARGIN * moves <= WIDEST
    if not provable:
        notes.append(
            f"this job cannot be proven at {steps} steps: the serial run itself moves by {moves:.1e} under another "
            f"order of sums, and {MARGIN:g} times that is more than the widest tolerance, {WIDEST:.0e}; try fewer steps"
        )
    suspects = examined["state"] if strategy.replicas > 1 and job.buffers is None else []
    notes += _about_buffers(where if not largest <= tolerance else "", declared, suspects)
    if not all(map(math.isfinite, serial["losses"])):
        notes.append("the loss of the serial run itself is not a finite number, so there is nothing to compare with")
    if not ranks[0]["ledger_compared"]:
        notes.append("the ledger was not compared: the optimiser decides in each step how often the loss is computed")
    return Certificate(
        job=job.name, strategy=str(strategy), world=strategy.world, contract=str(promised),
        passed=largest <= tolerance and not unlike and provable,
        max_rel_diff=largest, tolerance=tolerance, worst=where,
        ledger_matches=not unlike, steps=steps, seed=job.seed, ledger_differences=unlike[:20],
        compared=serial["elements"] | _replicated(serial, declared) | {LOSS: steps} if exact else {LOSS: steps},
        serial=_described(promised.micro_batches, promised.parts, exact=exact, islands=_islands(strategy)),
        conditioning=conditioning,
        zero_gradient=sorted({name for rank in ranks for name in rank["zero_gradient"]}),
        not_covered=NOT_COVERED["exact" if exact else "loss curve"],
        widened=serial["widened"], losses=losses, serial_losses=serial["losses"], notes=notes,
        float32_drift=max((rank["float32_drift"] or 0.0) for rank in ranks) if exact else None, provable=provable,
    )  # fmt: skip


def _about_buffers(wrong: str, declared: Mapping[str, str], suspects: Sequence[str]) -> list[str]:
    """What the job declares about buffers, and what it might declare of those that replicas change, where it fails."""
    notes = [
        f"declared difference: the job declares {mode!r} for the buffer {name} ({_MODES[mode]}), so it was not "
        "compared; what the model reads from it may differ from one process"
        for name, mode in sorted(declared.items())
    ]
    if wrong and suspects:
        name = next((name for name in suspects if wrong == f"buffer {name}"), suspects[0])
        notes.append(
            f"each forward changes the buffer {name} by the samples that it sees; declare what replicas do with it: "
            f"Job(buffers={{{name!r}: 'average'}}), or 'sum' (counts), 'broadcast' (the first replica's), 'local' "
            "(each its own)"
        )
    return notes


_MODES = {"broadcast": "all replicas take the first one's", "local": "each replica keeps its own"}


def _replicated(serial: dict[str, Any], declared: Collection[str]) -> dict[str, int]:
    """Elements of buffers and frozen parameters, which each rank that holds them compares."""
    found: dict[str, int] = {}
    for key, elements in serial["replicated"].items():
        kind, _, name = key.partition(":")
        if kind != "buffer" or name not in declared:
            found[kind] = found.get(kind, 0) + elements
    return found


def _described(micro_batches: int, parts: int, *, exact: bool, islands: Islands | None = None) -> str:
    pieces = micro_batches * parts
    how = "each global batch at once" if pieces == 1 else f"per micro-batch: the same {pieces} parts of each batch"
    if islands is not None:
        how = f"{islands.num} islands simulated one after the other, averaged every {islands.every} steps; {how}"
        how = how.replace("each global batch", "an island's part of a batch")
    return f"one process, plain PyTorch, {'float64' if exact else 'float32'}, {how}"


def _found(ranks: list[dict[str, Any]], serial: dict[str, Any], curve: list[float]) -> list[tuple[float, str]]:
    """(difference, where) of all that was compared; every element must have been, by some rank."""
    found = [(row[0], row[1]) for rank in ranks for row in rank["worst"]]
    found += [(d, f"loss of step {step + 1}") for step, d in enumerate(curve)]
    for kind, elements in serial["elements"].items():
        compared = sum(rank["compared"].get(kind, 0) for rank in ranks)
        if compared != elements:
            found.append((math.inf, f"{kind}: {compared} of {elements} elements are there to compare"))
    missing = set(serial["replicated"]) - {key for rank in ranks for key in rank["replicated"]}
    found += [(math.inf, f"{key.replace(':', ' ', 1)} is not there to compare") for key in sorted(missing)]
    return found


def _averaging(strategy: Strategy) -> local | None:
    """The level whose replicas step by themselves and are averaged now and then."""
    return next((level.sync for level in strategy.dp_levels if isinstance(level.sync, local)), None)


def _synchronous(strategy: Strategy) -> Strategy:
    """The strategy with replicas that are averaged in the place of those that step together."""
    for level in strategy.dp_levels:
        if isinstance(level.sync, local):
            strategy = strategy.replace(level, dp(level.n))
    return strategy


def _islands(strategy: Strategy) -> Islands | None:
    levels = [level for level in strategy.dp_levels if isinstance(level.sync, local)]
    if not levels:
        return None
    sync = levels[0].sync
    assert isinstance(sync, local)
    return Islands(
        num=levels[0].n, every=sync.h, replicas=strategy.replicas, micro_batches=strategy.micro_batches
    )


def _unflushed_ranks(strategy: Strategy) -> int:
    """How many ranks its pipeline has, if that is one without flush; else 0."""
    pipeline = strategy.term(pp)
    return pipeline.n if pipeline is not None and pipeline.schedule == "pipedream" else 0


@running_eagerly()
def examine(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """In a process of its own: whether the strategy may split this job's batches."""
    job, strategy = job_from(arguments), parse(arguments["strategy"])
    found = couples_samples(job, strategy=strategy)
    refused = refusal(found, strategy)
    notes = [found.reason] if found.reason and not refused else []
    if compiled := compiled_parts(build_without_memory(job)):
        notes.append(f"the model is compiled ({compiled}: torch.compile); both runs executed it uncompiled")
    return {
        "refused": refused, "reversible": found.independent and not found.ordered, "state": list(found.state),
        "notes": notes,
    }  # fmt: skip


@running_eagerly()
def serial_run(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """In a process of its own: the serial run, left behind as a file of tensors, and how far it moves under another
    order of sums."""
    job, conditions = for_proof(job_from(arguments)), Conditions()
    strategy, steps = parse(arguments["strategy"]), arguments["steps_to_verify"]
    micro, unflushed = arguments.get("micro_batches", 1), _unflushed_ranks(strategy)
    updates = [micros_told(ranks=unflushed, micro=micro, steps=n) for n in range(steps + 1)] if unflushed else None

    outside = Outside(job)

    def run(disturbed: Disturbed | None = None) -> Reference:
        with outside.kept():
            return train_serially(
                job, steps=steps, micro_batches=micro, parts=arguments.get("parts", 1), updates=updates,
                dtype=torch.float64 if arguments["exact"] else None, conditions=conditions, disturbed=disturbed,
                islands=_islands(strategy),
            )  # fmt: skip

    reference = run()
    widened = dict(conditions.modules)
    tensors = {f"parameter:{name}": value for name, value in reference.parameters.items()}
    tensors |= {f"rounding:{name}": mask for name, mask in reference.rounding.items()}
    tensors |= {f"gradient:{name}": value for name, value in reference.gradients.items()}
    replicated = {("buffer", name): value for name, value in reference.buffers.items()}
    replicated |= {("frozen", name): value for name, value in reference.frozen.items()}
    tensors |= {f"{kind}:{name}": value for (kind, name), value in replicated.items()}
    for name, state in reference.state.items():
        tensors |= {f"{key}:{name}": value for key, value in state.items()}
    elements = dict.fromkeys(("parameter", GRADIENT), sum(value.numel() for value in reference.parameters.values()))
    for state in reference.state.values():
        for key, value in state.items():
            elements[key] = elements.get(key, 0) + value.numel()
    conditioning: dict[str, float] = {}
    for seed in range(arguments.get("disturbances", 0)):
        other = run(Disturbed(seed + 1, reverse=arguments["reverse"]))
        for kind, moved in moves(reference, other):
            conditioning[kind] = max(conditioning.get(kind, 0.0), moved)
        for key, drift in follows(reference, other).items():
            tensors[f"follows:{key}"] = torch.maximum(tensors.get(f"follows:{key}", drift), drift)
    save_file({key: real(value).contiguous().clone() for key, value in tensors.items()}, arguments["reference"])
    return {
        "losses": reference.losses, "widened": widened, "elements": elements, "conditioning": conditioning,
        "replicated": {f"{kind}:{name}": v.numel() for (kind, name), v in replicated.items() if v.numel()},
    }  # fmt: skip


@running_eagerly()
def parallel_run(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """On every rank: the run under the strategy, compared slice by slice."""
    from shoal.launch.join import join, leave

    me = join()
    job, strategy = for_proof(job_from(arguments)), parse(arguments["strategy"])
    report: dict[str, Any] = {"rank": me.rank, "float32_drift": None}
    steps = arguments["steps_to_verify"]
    if arguments["exact"]:
        ready = prepare(job, strategy, rank=me.rank, backend=me.backend, device=me.device, dtype=torch.float64)
        with Outside(job).kept():
            report |= _train(ready, steps)
        with ready.engine.consensus():
            report |= compare(ready, arguments["reference"])
        ready.close()
        narrow = prepare(job, strategy, rank=me.rank, backend=me.backend, device=me.device)
        _train(narrow, steps)
        # What is rounding of a zero in float64 is rounding in float32 too, only larger.
        with narrow.engine.consensus():
            rows = compare(narrow, arguments["reference"], zero_gradient=math.inf)["worst"]
        report["float32_drift"] = max((row[0] for row in rows), default=0.0)
    else:
        ready = prepare(job, strategy, rank=me.rank, backend=me.backend, device=me.device)
        report |= _train(ready, steps) | {"worst": [], "zero_gradient": [], "declared": {}}
    leave()
    return report


def _train(ready: Prepared, steps: int) -> dict[str, Any]:
    """The steps' losses, and how the ledger of each full step after the first differs from its prediction."""
    losses, unlike, counter, conditions = [], [], 0, Conditions()
    steady = ready.executor.first_steady_step
    order = ready.runner.order
    # How often an optimiser with a closure computes the loss, only the numbers say.
    predictable = not ready.engine.optimizer.needs_closure
    ready.watched = GradientSums(ready.engine)
    for step in range(steps):
        BOOK.take()
        with conditions(), naming_what_cut_it(ready.strategy):
            losses.append(ready.runner.step(step, counter).loss)
        # What a pipeline tells about shapes that it has not seen before is no part of a step.
        counted = BOOK.take().without("shapes")
        # The first step also settles who has gradients at all; every other one must be as predicted, once a pipeline
        # without flush is full.
        if predictable and (step >= steady or steps == 1):
            unlike += ready.differences(counted)
        counter = order.next(counter)
    ready.watched.stop()
    return {
        "losses": losses, "ledger_differences": sorted(set(unlike)), "ledger_compared": predictable,
        "predicted": ready.predicted.to_json(),
    }  # fmt: skip

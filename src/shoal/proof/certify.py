"""`verify`: trains serially and in parallel from the same start, and certifies how far the two differ.

The serial run is the model that one process would have trained (`reference.py`). An `exact` strategy is held to it in
float64 over every parameter, the optimiser state, the buffers and the loss curve, and its ledger to the prediction, to
the byte. How far the serial run itself moves under another order of sums is measured: that is the conditioning, and
the tolerance follows from it. A strategy with a weaker contract is held to the band it states. Each rank compares the
slice it holds, so nothing is gathered. Nothing here imports torch: what needs it is done by forks of a server.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.common.log import log_progress
from shoal.common.printed import PrintedTable
from shoal.launch import RankFailed, run_ranks, warm_up
from shoal.launch.start import Target
from shoal.proof.entry import MODULES, examine, parallel_run, serial_run
from shoal.proof.members import verify_members
from shoal.proof.options import ProofOptions
from shoal.proof.tolerance import DISTURBANCES, EXACT, LOSS, MARGIN, WIDEST
from shoal.strategy import Strategy, Term, as_strategy, ensemble, parse, require_legal
from shoal.strategy.contract import Contract

if TYPE_CHECKING:
    from shoal.job import Job

AMPLIFIED = (
    "where the true gradient is zero only gradients are compared, not what the optimiser makes of them: it steps by "
    "the sign of a gradient, or the like, so rounding alone moves those elements"
)
_BEYOND = (
    "steps and samples beyond these, other sizes of the batch, precision other than float64, optimiser state without "
    "a value for each element, validation, speed, and whether the job trains well"
)
NOT_COVERED = {
    "exact": _BEYOND,
    "simulated": "how far this training is from that of one process (it is compared with a simulation of itself), "
    + _BEYOND,
    "loss curve": "parameters, optimiser state and buffers (the contract promises the loss curve only), steps and "
    "samples beyond these, other sizes of the batch, validation, speed, and whether the job trains well",
}
"""By what is compared."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Certificate(PrintedTable):
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

    ledger_compared: bool = True
    """Not where the optimiser's numbers decide how often the loss is computed."""

    @property
    def ledger_verdict(self) -> str:
        if not self.ledger_compared:
            return "not compared"
        what = "calls, messages and bytes of every collective"
        return f"{what} equal their prediction" if self.ledger_matches else f"{what} differ from their prediction"

    @property
    def tolerance_rule(self) -> str:
        """What the conditioning means for the tolerance."""
        return f"under another order of sums; the tolerance is {EXACT:.0e}, or {MARGIN:g} times that if it is more"

    @property
    def compared_text(self) -> str:
        """What was compared, in words."""
        return ", ".join(f"{count:,} {_kind(kind)}" for kind, count in self.compared.items())

    @property
    def conditioning_text(self) -> str:
        """How far the serial run moves, and the rule for the tolerance; empty where that was not measured."""
        if not self.conditioning:
            return ""
        kind, moved = max(self.conditioning.items(), key=lambda row: row[1])
        return f"the serial run moves by {moved:.1e} ({_kind(kind)}) {self.tolerance_rule}"

    @property
    def verdict(self) -> str:
        return "PASSED" if self.passed else "FAILED" if self.provable else "CANNOT BE PROVEN"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        rows = [
            ["contract", self.contract],
            ["largest difference", f"{self.max_rel_diff:.2g} (tolerance {self.tolerance:.2g}), in {self.worst}"],
            ["ledger", self.ledger_verdict],
            ["compared", self.compared_text],
            ["compared with", f"{self.serial}, {self.steps} steps, seed {self.seed}"],
            *([["conditioning", self.conditioning_text]] if self.conditioning else []),
            *([["not covered", self.not_covered]] if self.not_covered else []),
            *([["note", note] for note in self.notes]),
        ]
        return f"{self.verdict}: {self.job} under {self.strategy} on {self.world} ranks", ["", ""], rows


def _kind(kind: str) -> str:
    names = {"parameter": "elements of parameters", "buffer": "elements of buffers", "loss": "losses"}
    return names.get(kind, f"elements of {kind}")


def verify(
    job: str | Path | Job,
    strategy: str | Strategy | Term,
    *,
    steps: int = 10,
    size: str | None = None,
    overrides: dict[str, Any] | None = None,
    target: Target | str = parallel_run,
    progress: Callable[[str], None] = log_progress,
) -> Certificate:
    """Trains serially and under the strategy, compares, and certifies the difference.

    Args:
        job: A Job, a file that defines one, or the name of a built-in one.
        strategy: Text or terms.
        steps: Optimiser steps to compare.
        size: Size of a built-in job.
        overrides: Fields of the job to change: `global_batch`, `seed`.
        target: What the ranks run: tests plant faults there.
        progress: Is given what is being done. The `shoal` logger by default.

    Raises:
        IllegalStrategy: The strategy cannot train this job.
        SamplesCoupled: It splits batches whose samples depend on each other; the text says how.
    """
    strategy = parse(strategy) if isinstance(strategy, str) else as_strategy(strategy)
    job = str(job) if isinstance(job, Path) else job
    if not isinstance(job, str):
        from shoal.job.load import named
        from shoal.launch.fork_of_caller import forking_this_process

        name = named(job)
        with forking_this_process():
            return verify(name, strategy, steps=steps, size=size, overrides=overrides, target=target, progress=progress)
    if strategy.term(ensemble) is not None:
        require_legal(strategy)

        def prove(inner: Strategy, seed: int | None) -> Certificate:
            changed = overrides if seed is None else {**(overrides or {}), "seed": seed}
            return verify(job, inner, steps=steps, size=size, overrides=changed, target=target, progress=progress)

        return verify_members(strategy, prove)
    warm_up(*MODULES)
    asked = {**(overrides or {}), "job": job, "size": size, "strategy": str(strategy), "num_steps": steps}
    options = ProofOptions.from_json(asked)
    progress("one pass over a batch, at once and in parts")
    try:
        examined = run_ranks(examine, options.to_json(), ranks=1)[0]
    except RankFailed as error:
        raise error.original() from error
    promised = Contract(**examined["contract"])
    options = replace(
        options,
        exact=examined["exact"],
        num_steps=examined["steps"],
        reverse=examined["reverse"],
        micro_batches=promised.micro_batches,
        parts=promised.parts,
        disturbances=DISTURBANCES if examined["exact"] else 0,
    )
    with tempfile.TemporaryDirectory(prefix="shoal-verify-") as folder:
        arguments = replace(options, reference=str(Path(folder) / "reference.safetensors")).to_json()
        serial = None
        if not examined["by_timing"]:
            progress(f"{options.num_steps} serial steps in {'float64' if options.exact else 'float32'}")
            serial = run_ranks(serial_run, arguments, ranks=1)[0]
        progress(f"{options.num_steps} steps on {strategy.world} ranks under {strategy}")
        ranks = run_ranks(target, arguments, ranks=strategy.world)
    # Where timing orders the exchanges, the first rank has replayed the log of its run.
    return _certificate(strategy, options, promised, examined, serial or ranks[0]["serial"], ranks)


def _certificate(
    strategy: Strategy,
    options: ProofOptions,
    promised: Contract,
    examined: dict[str, Any],
    serial: dict[str, Any],
    ranks: list[dict[str, Any]],
) -> Certificate:
    notes = [*promised.reasons, *examined["notes"]]
    if any(rank.get("amplified") for rank in ranks):
        notes.append(AMPLIFIED)
    losses, exact = ranks[0]["losses"], options.exact
    # Under servers the first rank has repeated the run; what it compares with is not the synchronous serial run.
    serial = serial | {"losses": ranks[0].get("serial_losses", serial["losses"])}
    serial["described"] = ranks[0].get("described", serial["described"])
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
            f"this job cannot be proven at {options.num_steps} steps: the serial run itself moves by {moves:.1e} under "
            f"another order of sums, and {MARGIN:g} times that is more than the widest tolerance, {WIDEST:.0e}; try "
            "fewer steps"
        )
    wrong = where if not largest <= tolerance else ""
    notes += [*_about_buffers(wrong, declared, examined["undeclared"]), *_about_frozen(wrong, examined["frozen"])]
    if not all(map(math.isfinite, serial["losses"])):
        notes.append("the loss of the serial run itself is not a finite number, so there is nothing to compare with")
    if not ranks[0]["ledger_compared"]:
        notes.append("the ledger was not compared: the optimiser decides in each step how often the loss is computed")
    return Certificate(
        job=examined["job"],
        strategy=str(strategy),
        world=strategy.world,
        contract=str(promised),
        passed=largest <= tolerance and not unlike and provable,
        max_rel_diff=largest,
        tolerance=tolerance,
        worst=where,
        ledger_matches=not unlike,
        steps=options.num_steps,
        seed=examined["seed"],
        ledger_differences=unlike[:20],
        compared=(serial["elements"] | _replicated(serial, declared) if exact else {}) | {LOSS: len(losses)},
        serial=serial["described"],
        conditioning=conditioning,
        zero_gradient=sorted({name for rank in ranks for name in rank["zero_gradient"]}),
        not_covered=NOT_COVERED["loss curve" if not exact else "exact" if promised.kind == "exact" else "simulated"],
        widened=serial["widened"],
        losses=losses,
        serial_losses=serial["losses"],
        notes=notes,
        float32_drift=max((r["float32_drift"] for r in ranks if r["float32_drift"] is not None), default=None),
        provable=provable,
        ledger_compared=all(rank["ledger_compared"] for rank in ranks),
    )


def _about_buffers(wrong: str, declared: Mapping[str, str], suspects: Sequence[str]) -> list[str]:
    """What the job declares about buffers, and what it might declare of those that replicas change, where it fails."""
    notes = [
        f"declared difference: the job declares {mode!r} for the buffer {name} ({_MODES[mode]}), so it was not "
        "compared; what the model reads from it may differ from one process"
        for name, mode in sorted(declared.items())
    ]
    if wrong and suspects and not wrong.startswith(FROZEN):
        name = next((name for name in suspects if wrong == f"buffer {name}"), suspects[0])
        notes.append(
            f"each forward changes the buffer {name} by the samples that it sees; declare what replicas do with it: "
            f"Job(buffers={{{name!r}: 'average'}}), or 'sum' (counts), 'broadcast' (the first replica's), 'local' "
            "(each its own)"
        )
    return notes


def _about_frozen(wrong: str, suspects: Sequence[str]) -> list[str]:
    """Where a proof fails: what a forward writes to that replicas can neither average nor sum."""
    if not wrong or not suspects:
        return []
    name = next((name for name in suspects if wrong == f"{FROZEN}{name}"), suspects[0])
    return [
        f"each forward changes {name}, a parameter that does not learn, by the samples that it sees, so each replica "
        f"keeps its own: make it a buffer (register_buffer) and declare Job(buffers={{{name!r}: 'average'}}), or 'sum' "
        "(counts)"
    ]


FROZEN = "frozen parameter "
_MODES = {"broadcast": "all replicas take the first one's", "local": "each replica keeps its own"}


def _replicated(serial: dict[str, Any], declared: Collection[str]) -> dict[str, int]:
    """Elements of buffers and frozen parameters, which each rank that holds them compares."""
    found: dict[str, int] = {}
    for key, elements in serial["replicated"].items():
        kind, _, name = key.partition(":")
        if kind != "buffer" or name not in declared:
            found[kind] = found.get(kind, 0) + elements
    return found


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

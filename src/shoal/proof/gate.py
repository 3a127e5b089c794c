"""The gate: a strategy is checked on a job before it first trains it, by two steps in float64.

Serial steps and steps of the strategy start alike; gradients, losses, buffers and updates must agree. A pass is
remembered (`proven.py`), a failure stops the run and names what differs. Nothing here imports torch: ranks do the work
(`proof/one_step.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from shoal.launch import run_ranks
from shoal.proof.entry import gate_steps
from shoal.proof.proven import is_proven, remember
from shoal.runtime.options import JobOptions
from shoal.strategy import Strategy, allreduce, amp, bsp, dp, none, pp, ps, shared

TOLERANCES = {"gradient": 1e-8, "loss": 1e-8, "buffer": 1e-8, "update": 1e-6}
"""Largest relative difference, by what is compared. Correct layouts measure 1e-12 and less in float64, wrong ones 1e-4
and more; a false alarm would stop a sound training, so it is wider than that of `verify`. Updates have a wider one:
optimisers divide gradients by their size, also small ones. Where a difference exceeds it, the serial steps are repeated
with another rounding, and what they move sets the tolerance (`verify/gate_conditioning.py`)."""

REMEDIES = {
    "pp": "name other stages (LayoutHints(stages=...))",
    "tp": "declare roles (LayoutHints(roles={'path.of.module': 'whole'}))",
    "cp": "",
    "ep": "keep experts together (LayoutHints(experts=False))",
    "spatial": "",
}

NUMBER = "the number of gradient elements"
"""What is wrong where parameters have a gradient in one run and none in the other."""

Say = Callable[[dict[str, Any]], None]


class LayoutWrong(ValueError):
    """The ranks compute something else than the model does."""


def exact_twin(strategy: Strategy) -> Strategy:
    """The strategy that cuts model and batch in the same way and computes exactly: what can be compared to the last
    digit."""
    half = strategy.term(amp)
    if half is not None:
        strategy = strategy.replace(half, None)
    pipeline = strategy.term(pp)
    if pipeline is not None and pipeline.schedule == "pipedream":
        strategy = strategy.replace(pipeline, pp(pipeline.n, "1f1b", micro=pipeline.micro))
    for level in strategy.dp_levels:
        if not isinstance(level.compress, none) or level.sync != bsp() or isinstance(level.via, ps):
            exact = dp(level.n, zero=level.zero)
            if isinstance(level.via, shared | allreduce) and (isinstance(level.sync, bsp) or level.via == shared()):
                exact = dp(level.n, zero=level.zero, via=level.via)
            strategy = strategy.replace(level, exact)
    return strategy


def gate_locally(
    question: dict[str, Any], job: JobOptions, *, backend: str | None, hang_after_s: float, on_message: Any
) -> None:
    """From the process that starts ranks. `question` is what `gate_question` gave before the run."""

    def say(message: dict[str, Any]) -> None:
        on_message(0, message)

    if is_settled(question, say):
        return
    asked = {"job": job.to_json(), "backend": backend, "question": question}
    report = run_ranks(gate_steps, asked, ranks=question["world"], hang_after_s=hang_after_s, on_message=on_message)[0]
    require_right(report, question, say)


def is_settled(question: dict[str, Any], say: Say) -> bool:
    """Whether there is nothing to do: it was checked before, or cannot be checked, of which the user is warned."""
    if is_proven(question["key"]):
        return True
    if question["skip"]:
        say(not_checked(question["skip"], question))
        return True
    what = "the layout" if question["axes"] else "the strategy"
    say({"event": "note", "text": f"checking {what}, once: two steps in float64 under {question['strategy']}"})
    return False


def require_right(report: dict[str, Any], question: dict[str, Any], say: Say) -> None:
    """Judges what `one_step` found: remembers a pass, raises LayoutWrong otherwise."""
    if report["skip"]:
        if report.get("data") and question["axes"]:
            raise LayoutWrong(f"{question['strategy']}: {report['skip']}")
        say(not_checked(report["skip"], question))
        return
    difference = float(report["difference"])
    if not report["wrong"]:
        remember(
            question["key"],
            job=question["job"],
            strategy=question["strategy"],
            difference=difference,
            messages=question["messages"],
        )
        return
    raise LayoutWrong(_what_is_wrong(report, question, difference))


def _what_is_wrong(report: dict[str, Any], question: dict[str, Any], difference: float) -> str:
    strategy, axes, where = question["strategy"], question["axes"], report["where"]
    tolerance = f"(float64, tolerance {report['tolerance']:.0e})"
    differs = f"differs by {difference:.1e} of its size from that of a serial step {tolerance}"
    if where.startswith(NUMBER):
        differs = "differs"
    elif not math.isfinite(difference):
        differs = "is NaN or infinite, where that of a serial step is finite"
    buffers = [name.removeprefix("the buffer ") for name in report["buffers"]]
    declare = ""
    if buffers:
        declare = (
            f"declare what replicas do with it: Job(buffers={{{buffers[0]!r}: 'average'}}), or 'sum' (counts), "
            "'broadcast' (the first replica's), 'local' (each its own)"
        )
    all_the_same = "--no-gate trains all the same"
    attributes = report.get("attributes", [])
    if names := report.get("outside", []):
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return (
            f"{strategy}: the model reads the parameter {names[0]}{more} outside of the forward of the block that it "
            "belongs to, where zero=3 has not gathered it; read it inside, call the block and not its parts, or train "
            "with zero=2"
        )
    held = ""
    if attributes:
        held = (
            f" A forward changes {attributes[0]}, which is no buffer, so each replica keeps its own; register it as a "
            "buffer of the model (register_buffer) and declare Job(buffers=...), or leave it out of what is computed."
        )
    if held and report["kind"] == "update":
        return (
            f"{strategy} trains another model than one process does: the second step differs by {difference:.1e} "
            f"{tolerance}.{held} {all_the_same}"
        )
    if report["kind"] == "buffer":
        if mode := report.get("declared", {}).get(buffers[0]):
            declare = f"the job declares {mode!r} for it, which gives the value of one process where an update is " + (
                "a sum over samples" if mode == "sum" else "linear in means over the batch"
            )
        return (
            f"under {strategy}, the buffer {buffers[0]} {differs}: its updates depend "
            f"on which samples a forward sees; {declare}.{held} {all_the_same}"
        )
    if report["kind"] == "update":
        return (
            f"under {strategy}, {question['optimizer']} updates {where} differently than in one process: by "
            f"{difference:.1e} of the update {tolerance}, although the gradients are equal. It looks at more than "
            "single elements (shapes, norms of layers or of the model) or draws random numbers; use a strategy that "
            f"leaves parameters unsharded (dp without zero), or an element-wise optimiser. {all_the_same}"
        )
    also = f" The buffer {buffers[0]} differs too; if the model reads it, {declare}." if buffers else ""
    if not axes:
        return (
            f"{strategy} trains another model than one process does: {where} {differs}. "
            f"Some module computes differently on a share of the batch, or is replaced under this "
            f"strategy.{also}{held} {all_the_same}"
        )
    remedies = [REMEDIES[axis] for axis in axes if REMEDIES[axis]]
    hints = f"; in Job.layout, {', or '.join(remedies)}" if remedies else ""
    return (
        f"the layout inferred for this model is wrong: under {strategy}, {where} {differs}"
        f"{hints}; or leave {' or '.join(axes)} out.{also} `shoal explain JOB` prints the layout, "
        f"{all_the_same}"
    )


def not_checked(why: str, question: dict[str, Any]) -> dict[str, Any]:
    """The message that a strategy goes unchecked, with the reason."""
    what = "the layout" if question["axes"] else "the strategy"
    return {"event": "warning", "text": f"{what} was not checked: {why}"}

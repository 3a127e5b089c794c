"""The gate: a layout that was inferred is checked before it is first trained with, by one step in float64.

A serial step and a step of the strategy start alike; their gradients must agree. A pass is remembered (`proven.py`), a
failure stops the run and names the parameter. Nothing here imports torch: ranks do the work (`verify/one_step.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from shoal.strategy import Strategy, amp, cp, ep, pp, tp
from shoal.train.launch import run_ranks
from shoal.train.proven import is_proven, remember

TOLERANCE = 1e-8
"""Largest relative difference of a gradient. Correct layouts measure 1e-12 and less in float64, wrong ones 1e-4 and
more; a false alarm would stop a sound training, so it is wider than that of `verify`."""

AXES: tuple[type[Any], ...] = (pp, tp, cp, ep)
"""The axes that cut the model."""

REMEDIES = {
    "pp": "name other stages (LayoutHints(stages=...))",
    "tp": "declare roles (LayoutHints(roles={'path.of.module': 'whole'}))",
    "cp": "",
    "ep": "keep experts together (LayoutHints(experts=False))",
}

Say = Callable[[dict[str, Any]], None]


class LayoutWrong(ValueError):
    """The ranks compute something else than the model does."""


def cutting_axes(strategy: Strategy) -> tuple[str, ...]:
    """The names of the axes by which a strategy cuts the model; none means that there is nothing to check."""
    return tuple(axis.name for axis in strategy.axes if isinstance(axis.term, AXES) and axis.size > 1)


def exact_twin(strategy: Strategy) -> Strategy:
    """The strategy that cuts the model in the same way and computes exactly: what can be compared to the last digit."""
    half = strategy.modifier(amp)
    if half is not None:
        strategy = strategy.replace(half, None)
    pipeline = strategy.term(pp)
    if pipeline is not None and pipeline.schedule == "pipedream":
        strategy = strategy.replace(pipeline, pp(pipeline.n, "1f1b", micro=pipeline.micro))
    return strategy


def gate_locally(question: dict[str, Any], arguments: dict[str, Any], *, hang_after_s: float, on_message: Any) -> None:
    """From the process that starts ranks. `question` is what `one_step.question` said, in the check before the run."""

    def say(message: dict[str, Any]) -> None:
        on_message(0, message)

    if is_settled(question, say):
        return
    asked = {**arguments, "question": question}
    told = run_ranks(
        "shoal.train.verify.one_step:one_step",
        asked,
        ranks=question["world"],
        hang_after_s=hang_after_s,
        on_message=on_message,
    )[0]
    require_right(told, question, say)


def is_settled(question: dict[str, Any], say: Say) -> bool:
    """Whether there is nothing to do: it was proven before, or cannot be checked, which is said."""
    if question["skip"]:
        say(not_checked(question["skip"]))
        return True
    if is_proven(question["key"]):
        return True
    say({"event": "note", "text": f"checking the layout, once: one step in float64 under {question['strategy']}"})
    return False


def require_right(told: dict[str, Any], question: dict[str, Any], say: Say) -> None:
    """Judges what `one_step` found: remembers a pass, raises LayoutWrong otherwise."""
    if told["skip"]:
        say(not_checked(told["skip"]))
        return
    difference = float(told["difference"])
    if difference <= TOLERANCE:
        remember(question["key"], job=question["job"], strategy=question["strategy"], difference=difference)
        return
    apart = f"by {difference:.1e} of its size" if math.isfinite(difference) else "without bound"
    axes = question["axes"]
    remedies = [REMEDIES[axis] for axis in axes if REMEDIES[axis]]
    declare = f"; in Job.layout, {', or '.join(remedies)}" if remedies else ""
    raise LayoutWrong(
        f"the layout inferred for this model is wrong: under {question['strategy']}, {told['where']} differs {apart} "
        f"from that of a serial step (float64, tolerance {TOLERANCE:.0e}){declare}; or leave {' or '.join(axes)} out. "
        "`shoal explain JOB` prints the layout, --no-gate trains all the same"
    )


def not_checked(why: str) -> dict[str, Any]:
    """The message that a layout goes unchecked, with the reason."""
    return {"event": "warning", "text": f"the layout was not checked: {why}"}

"""`shoal.doctor`: what a machine has, what of Shoal works on it, as one text to read or to paste into a report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.api.call import checked_keywords
from shoal.common.log import log_progress
from shoal.launch import run_ranks, warm_up
from shoal.training.doctor import AXES, EXPERTS, HOST_ONLY, facts

STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One part of the self-test."""

    axis: str
    strategy: str
    result: str
    """passed, FAILED, or why it was not tried."""
    difference: float | None = None
    """The largest relative difference from the serial run, in float64."""
    seconds: float = 0.0
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Facts by section, advice, and the self-test."""

    sections: dict[str, dict[str, str]]
    advice: list[str]
    tried: list[Tried] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether nothing of the self-test failed."""
        return not any(each.result == "FAILED" for each in self.tried)

    def to_json(self) -> dict[str, Any]:
        """What `shoal doctor --json` prints."""
        return {**asdict(self), "healthy": self.healthy}

    def __str__(self) -> str:
        lines = ["```"]
        for title, rows in self.sections.items():
            lines += [title, *(f"  {name:<18} {value}" for name, value in rows.items())]
        lines += ["advice", *(f"  {each}" for each in self.advice)] if self.advice else []
        if self.tried:
            lines.append(f"self-test: {STEPS} steps in float64 against one process, bytes sent against the formula")
            for each in self.tried:
                shown = "" if each.difference is None else f"{each.difference:.0e}, {each.seconds:.0f} s"
                lines.append(f"  {each.axis:<14} {each.strategy:<38} {each.result}  {shown}".rstrip())
        for each in self.tried:
            lines += [f"failure of {each.strategy}", each.failure.rstrip()] if each.failure else []
        return "\n".join([*lines, "```"])


@checked_keywords
def doctor(*, test: bool = True, seconds: float = 60.0, progress: Callable[[str], None] = log_progress) -> Diagnosis:
    """Looks at this machine, and proves every axis that its devices or cores allow.

    Args:
        test: Whether to run the self-test.
        seconds: After this long no further part of it is begun.
        progress: Is given what is being done. The `shoal` logger by default.

    Returns:
        Facts by section, advice, and what was tried. It prints as one text.

    Example:
        print(shoal.doctor())
    """
    from shoal.proof.entry import MODULES

    began = time.monotonic()
    progress("looking at the machine")
    warm_up(*MODULES)
    found = run_ranks(facts, {}, ranks=1)[0]
    tried = []
    ranks = found["devices"] or max(2, os.cpu_count() or 1)
    for axis, needed, job, strategy in AXES if test else ():
        if needed > ranks:
            tried.append(Tried(axis=axis, strategy=strategy, result=f"not tried: needs {needed} devices or cores"))
        elif axis in HOST_ONLY and found["devices"]:
            tried.append(Tried(axis=axis, strategy=strategy, result="not tried: host memory only"))
        elif time.monotonic() - began > seconds:
            over = f"not tried: {seconds:.0f} s were over (--seconds)"
            tried.append(Tried(axis=axis, strategy=strategy, result=over))
        else:
            progress(f"self-test: {strategy}")
            tried.append(_try(axis, job, strategy))
    return Diagnosis(sections=found["sections"], advice=found["advice"], tried=tried)


def _try(axis: str, job: str, strategy: str) -> Tried:
    from shoal.proof.certify import verify

    began = time.monotonic()
    try:
        certificate = verify(job, strategy, steps=STEPS, progress=lambda text: None)
    except Exception as error:  # Whatever it is belongs into the report.
        text = getattr(error, "traceback_text", "") or f"{type(error).__name__}: {error}"
        return Tried(axis=axis, strategy=strategy, result="FAILED", failure=text, seconds=time.monotonic() - began)
    failure = (
        ""
        if certificate.passed
        else "\n".join(
            [
                f"largest difference {certificate.max_rel_diff:.2e} at {certificate.worst}",
                *certificate.ledger_differences[:6],
            ]
        )
    )
    return Tried(
        axis=axis + (", experts" if job == EXPERTS and axis != "ep" else ""),
        strategy=strategy,
        result="passed" if certificate.passed else "FAILED",
        difference=certificate.max_rel_diff,
        failure=failure,
        seconds=time.monotonic() - began,
    )

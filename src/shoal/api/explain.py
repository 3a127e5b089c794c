"""`shoal.explain`: what a strategy is, in words, as a mesh, by its contract and by its place in the field; of a job,
how its model may be partitioned.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.api.call import checked_keywords, job_of, strategy_of
from shoal.common.log import log_progress
from shoal.common.printed import PrintedTable
from shoal.job import names
from shoal.job.errors import did_you_mean
from shoal.strategy import Strategy, StrategyError, Term, explanation, parse
from shoal.training.record.run import RUN

if TYPE_CHECKING:
    from shoal.api.timeline import Timeline
    from shoal.job import Job


class CannotExplain(ValueError):
    """Options that do not go with what is to be explained."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Explanation(PrintedTable):
    """A strategy in words, or the layout of a job."""

    of: str
    report: dict[str, Any]
    """All that the verb prints with `--json`."""
    is_job: bool
    strategy: Strategy | None = None
    """What is described; None of a job."""

    def to_svg(self) -> str:
        """What each rank holds of batch, matrices, sequence and experts, as a picture."""
        from shoal.pictures import picture_svg

        return picture_svg(self._drawn())

    def timeline(self) -> Timeline:
        """What each rank of the strategy's pipeline does when."""
        from shoal.api.timeline import timeline_of

        return timeline_of(self._drawn())

    def _drawn(self) -> Strategy:
        if self.strategy is None:
            raise CannotExplain(f"{self.of} is a job; a strategy is drawn: shoal.explain(strategy)")
        return self.strategy

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return self.report

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        if self.is_job:
            report = self.report
            rows = [
                ["pipeline", f"{len(report['pieces'])} pieces, {report['cuts']} places to cut"],
                *(["tensor", line] for line in report["tensor"]["lines"][:6]),
            ]
            if "strategy" in report:
                rows += [["refused", f"{each['term']}: {each['reason']}"] for each in report["strategy"]["refusals"]]
            return f"{self.of}: {report['model']}, {report['parameters']:,} parameters", ["", ""], rows
        rows = [[term["term"], term["words"]] for term in self.report["terms"]]
        rows += [["contract", self.report["contract"]["name"]], ["ranks", str(self.report["mesh"]["world"])]]
        rows += [["refused", f"{each['term']}: {each['reason']}"] for each in self.report["refusals"]]
        return self.of, ["", ""], rows


@checked_keywords
def explain(
    what: str | Job | Strategy | Term,
    *,
    strategy: str | Strategy | Term | None = None,
    size: str | None = None,
    ranks: int | None = None,
    progress: Callable[[str], None] = log_progress,
) -> Explanation:
    """Describes a strategy, or how the model of a job may be partitioned.

    Args:
        what: A strategy (text or terms), or a job (a Job, a file, a built-in name).
        strategy: With a job: check whether it can be trained with this.
        size: Size of a built-in job.
        ranks: Check the strategy against this number of ranks.
        progress: Is given what is being done. The `shoal` logger by default.

    Returns:
        The description; `.report` has all of it as plain values. Of a strategy, `.to_svg()` draws what each rank
        holds, and `.timeline()` what each rank of its pipeline does when.

    Example:
        shoal.explain("dp(8, zero=1) * tp(2)")
    """
    if isinstance(what, str) and not names_a_job(what):
        what = parse(what)
    if isinstance(what, (Strategy, Term)):
        for option, given in (("--strategy", strategy), ("--size", size)):
            if given is not None:
                raise CannotExplain(f"{option} {given}: it goes with a job, but {str(what)!r} names none")
        chosen = strategy_of(what)
        return Explanation(of=str(what), report=explanation(chosen, world=ranks), is_job=False, strategy=chosen)
    if ranks is not None and strategy is None:
        raise CannotExplain(f"--ranks {ranks} checks a strategy, but {what!r} is a job; add --strategy")
    return _explain_job(what, strategy=strategy, size=size, ranks=ranks, progress=progress)


def _explain_job(
    what: str | Job,
    *,
    strategy: str | Strategy | Term | None,
    size: str | None,
    ranks: int | None,
    progress: Callable[[str], None],
) -> Explanation:
    from shoal.api.known import require_known

    chosen = None if strategy is None else strategy_of(strategy)
    if isinstance(what, str):
        require_known(what, size)
    progress("importing torch")
    from shoal.layout.described import describe, describe_strategy
    from shoal.layout.layout import layout_of
    from shoal.parallel.runnable import cannot_run

    job = job_of(what, size=size)
    progress(f"tracing {job.name}")
    report = describe(job, layout_of(job))
    if chosen is not None:
        progress(f"judging {chosen}")
        report["strategy"] = describe_strategy(job, chosen, world=ranks)
        report["strategy"]["cannot_run"] = cannot_run(chosen) or ""
    return Explanation(of=job.name, report=report, is_job=True)


def names_a_job(text: str) -> bool:
    """Whether a text means a job: it is no strategy, but a Python file or a built-in task's name, or near to one."""
    try:
        parse(text)
    except StrategyError:
        pass
    else:
        return False
    path, _ = names.split_file(text)
    if path.endswith(".py") or os.path.isfile(path):
        return True
    word = text.partition(":")[0].strip().lower()
    return "(" not in text and (word in names.all_words() or bool(did_you_mean(word, names.TASKS)))


def names_a_run(text: str) -> bool:
    """Whether a text is the folder of a run."""
    try:
        return (Path(text) / RUN).is_file()
    except (OSError, ValueError):
        return False

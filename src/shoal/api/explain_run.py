"""`shoal.explain_run`: what held a run back, why it failed, or why two runs differ."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shoal.comm.ledger import Ledger
from shoal.common.printed import PrintedTable
from shoal.comparison.explaining.causes import Cause, causes
from shoal.comparison.explaining.differing import differences, in_words, parting, settings
from shoal.comparison.explaining.failures import measure_fitting, why_failed
from shoal.comparison.explaining.probe import probe
from shoal.training.record.run import Run, read_run


@dataclass(frozen=True, kw_only=True, repr=False)
class RunExplanation(PrintedTable):
    """What held a run back, the most costly first."""

    folder: Path
    job: str
    strategy: str
    status: str
    reason: str | None
    advice: str
    """Of a run that failed: what happened, and what to change."""
    step_s: float | None
    causes: tuple[Cause, ...]
    ranks: tuple[dict[str, Any], ...]
    note: str = ""
    """What could not be looked at."""
    compared_with: str | None = None
    differences: tuple[tuple[str, float], ...] = ()
    """What a step of the second run takes longer for, seconds."""
    settings: tuple[tuple[str, str, str], ...] = ()
    """What was set differently: (what, here, there)."""
    why: str = ""
    """Why the second run's step takes longer or less long, in a sentence."""
    losses: str = ""
    """Where the losses of the two runs part."""

    def to_json(self) -> dict[str, Any]:
        """What `shoal explain RUN --json` prints."""
        listed = [{**asdict(each), "share": each.share} for each in self.causes]
        return {**asdict(self), "folder": str(self.folder), "causes": listed}

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        title = f"{self.job} under {self.strategy}, {self.status}"
        if self.step_s is not None:
            title += f", {1000 * self.step_s:.3g} ms a step"
        if self.compared_with is not None:
            return self._beside(title)
        rows = [
            [f"{each.share:.0%}", f"-{1000 * each.gain_s:.3g} ms", f"{each.name}: {each.text}"] for each in self.causes
        ]
        lines = [self.reason or "", *self.advice.splitlines()]
        rows = [*(["", "", line] for line in lines if line), *rows]
        if not rows:
            rows = [["", "", "nothing that the record shows: its steps are computing"]]
        if self.note:
            rows.append(["", "", self.note])
        return title, ["of the step", "without it", "what held it back"], rows

    def _beside(self, title: str) -> tuple[str, list[str], list[list[str]]]:
        rows = [[f"{name} takes longer", "", f"{1000 * seconds:+.3g} ms"] for name, seconds in self.differences]
        rows += [[name, here, there] for name, here, there in self.settings]
        lines = [f"{title}; the second is {self.compared_with}", self.why, self.losses]
        return "\n".join(line for line in lines if line), ["", "in the first", "in the second"], rows


def explain_run(
    first: str | Path | Run, second: str | Path | Run | None = None, *, measure: bool = True
) -> RunExplanation:
    """What held a run back; with a second one, why the two differ; of a run that failed, what to change.

    Args:
        first: A run, or its folder.
        second: Another one.
        measure: Whether the run's job is loaded and measured alone for a few seconds, which shows whether its batch is
            too small, and after a lack of memory what would fit.

    Returns:
        Causes in order, each with the time of a step that is saved without it.

    Example:
        print(shoal.explain_run("runs/first"))
    """
    run = first if isinstance(first, Run) else read_run(Path(first))
    other = second if second is None or isinstance(second, Run) else read_run(Path(second))
    ranks = list(run.summary.get("ranks") or ())
    probed, note = probe(run) if measure and other is None and run.status != "failed" else (None, "")
    found = causes(
        run.strategy,
        ranks,
        ledger=run.ledger,
        arguments=run.arguments,
        environment=run.environment,
        probed=probed,
        memory_bytes=run.summary.get("memory_bytes"),
    )
    failed = why_failed(run, measure_fitting) if measure else why_failed(run)
    explained = RunExplanation(
        folder=run.folder,
        job=run.job,
        strategy=run.strategy,
        status=run.status,
        reason=run.reason,
        advice="\n".join(failed),
        step_s=run.step_s,
        causes=tuple(found),
        ranks=tuple(ranks),
        note=note,
    )
    if other is None:
        return explained
    parts, changed = differences(ranks, list(other.summary.get("ranks") or ())), settings(run, other)
    return replace(
        explained,
        compared_with=str(other.folder),
        losses=parting(run, other),
        settings=tuple(changed),
        differences=tuple(parts),
        why=in_words(parts, changed, run.step_s or 0.0),
    )


def first_cause(outcome: dict[str, Any]) -> str | None:
    """What held a run back most, in one line, from what `shoal train` reports at its end."""
    ledger = Ledger.from_json(outcome.get("ledger") or ())
    found = causes(outcome["strategy"], outcome.get("ranks") or (), ledger=ledger)
    return found[0].line if found else None

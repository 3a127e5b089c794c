"""`shoal.explain` of runs: what held one back, or why two differ."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.common.printed import PrintedTable
from shoal.compare.findings import Cause, causes, differences, why_failed
from shoal.training.record.run import RUN, Run, read_run


@dataclass(frozen=True, kw_only=True, repr=False)
class RunExplanation(PrintedTable):
    """What held a run back, the most costly first."""

    folder: Path
    job: str
    strategy: str
    status: str
    reason: str | None
    advice: str
    step_s: float | None
    causes: tuple[Cause, ...]
    ranks: tuple[dict[str, Any], ...]
    compared_with: str | None = None
    differences: tuple[tuple[str, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """What `shoal explain RUN --json` prints."""
        listed = [{**asdict(each), "share": each.share} for each in self.causes]
        return {**asdict(self), "folder": str(self.folder), "causes": listed}

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        title = f"{self.job} under {self.strategy}, {self.status}"
        if self.step_s is not None:
            title += f", {1000 * self.step_s:.3g} ms a step"
        if self.compared_with is not None:
            rows = [[name, f"{1000 * seconds:+.3g} ms"] for name, seconds in self.differences]
            return f"{title}; {self.compared_with} takes longer by", ["", ""], rows
        rows = [
            [f"{each.share:.0%}", f"-{1000 * each.gain_s:.3g} ms", f"{each.name}: {each.text}"] for each in self.causes
        ]
        if self.reason:
            rows.insert(0, ["", "", f"{self.reason} {self.advice}".strip()])
        if not rows:
            rows = [["", "", "nothing that the record shows: its steps are computing"]]
        return title, ["of the step", "without it", "what held it back"], rows


def is_run(text: str) -> bool:
    """Whether a text is the folder of a run."""
    try:
        return (Path(text) / RUN).is_file()
    except (OSError, ValueError):
        return False


def explain_run(first: str | Path | Run, second: str | Path | Run | None = None) -> RunExplanation:
    """What held a run back; with a second one, what that takes longer for."""
    run = first if isinstance(first, Run) else read_run(Path(first))
    other = second if second is None or isinstance(second, Run) else read_run(Path(second))
    ranks = list(run.summary.get("ranks") or ())
    return RunExplanation(
        folder=run.folder, job=run.job, strategy=run.strategy, status=run.status, reason=run.reason,
        advice=why_failed(run.reason or ""), step_s=run.step_s,
        causes=tuple(causes(run.strategy, ranks, sent_bytes=run.ledger.bytes)), ranks=tuple(ranks),
        compared_with=None if other is None else str(other.folder),
        differences=() if other is None else tuple(differences(ranks, list(other.summary.get("ranks") or ()))),
    )  # fmt: skip


def first_cause(outcome: dict[str, Any]) -> str | None:
    """What held a run back most, in one line, from what `shoal train` reports at its end."""
    sent = sum(row["bytes"] for row in outcome.get("ledger") or ())
    found = causes(outcome["strategy"], outcome.get("ranks") or (), sent_bytes=sent)
    return found[0].line if found else None

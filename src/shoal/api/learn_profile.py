"""`shoal.learn_profile`: a framework profile, fitted to steps measured on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from shoal.api.call import checked_keywords
from shoal.api.validate import read_measurements
from shoal.common.log import log_progress
from shoal.common.printed import PrintedTable
from shoal.estimate.cost import learn
from shoal.estimate.cost.price import price
from shoal.estimate.cost.profile import Profile
from shoal.estimate.cost.profile_file import profile_toml, read_profile
from shoal.estimate.cost.rows import BadRows, read_rows


@dataclass(frozen=True, kw_only=True, repr=False)
class LearnedProfile(PrintedTable):
    """A fitted profile, and how much better than its start it explains the measured steps."""

    file: Path
    start: str
    rows: int
    refused: list[dict[str, Any]]
    """Rows that the cost model refuses, with the reason."""
    median_error_before: float
    median_error: float
    moved: dict[str, list[float]]
    """What changed by more than a hundredth: from, to."""

    def to_json(self) -> dict[str, Any]:
        """What the verb prints with `--json`."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"file": str(self.file)}

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        rows = [[name, f"{old:.4g}", f"{new:.4g}"] for name, (old, new) in self.moved.items()]
        errors = f"{self.median_error_before:.1%} -> {self.median_error:.1%}"
        title = f"{self.rows} steps: median error {errors}; {self.file}"
        return title, ["", "from", "to"], rows


@checked_keywords
def learn_profile(
    rows: str | Path,
    *,
    start: str | None = None,
    output: str | Path = "profile.toml",
    progress: Callable[[str], None] = log_progress,
) -> LearnedProfile:
    """Fits a framework profile to your own measured steps; plans take it as `profile=`.

    Args:
        rows: CSV with the columns of docs/validation.md and 30 or more rows with a `step_s`.
        start: Profile to start from. None: that of the rows' framework.
        output: Where to write the profile (TOML).
        progress: Is given what is being done. The `shoal` logger by default.

    Returns:
        The file, the errors before and after, and what was changed.

    Raises:
        BadRows: The file cannot be read, or fewer than three rows have a `step_s`.
    """
    timed = [row for row in read_measurements(str(rows)) if row.get("step_s") and row.get("status", "ok") in ("ok", "")]
    if len(timed) < 3:
        raise BadRows(f"{rows}: {len(timed)} rows have a step_s; a profile needs at least 3, better 30")
    read = read_rows(timed)
    begun = read_profile(start) if start is not None else read.profiles[int(np.bincount(read.profile_index).argmax())]
    progress(f"learning from {len(read.priced)} rows of {rows}, starting from {begun.name!r}")
    learned = learn.learn_profile([timed[number] for number in read.priced], begun, name=Path(rows).stem)
    measured = np.array([float(timed[number]["step_s"]) for number in read.priced])
    before, after = (
        float(np.median(np.abs(price(read.inputs, each).step_s / measured - 1))) for each in (begun, learned)
    )
    origin = f"Learned by `shoal calibrate --from` from {len(measured)} measured steps, starting from {begun.name!r}."
    path = Path(output)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(profile_toml(learned, origin=origin), encoding="utf-8")
    except OSError as error:
        raise BadRows(f"--output {str(path)!r}: {error.strerror or error}; name a file that can be written") from None
    return LearnedProfile(
        file=path,
        start=begun.name,
        rows=len(measured),
        median_error_before=before,
        median_error=after,
        refused=[{"row": number + 1, "reason": reason} for number, reason in read.refused],
        moved=_moved(begun, learned),
    )


def _moved(begun: Profile, learned: Profile) -> dict[str, list[float]]:
    pairs = {
        field.name: [float(getattr(begun, field.name)), float(getattr(learned, field.name))]
        for field in fields(Profile)
        if field.name != "name"
    }
    return {name: pair for name, pair in pairs.items() if abs(pair[1] - pair[0]) > 0.01 * abs(pair[0])}

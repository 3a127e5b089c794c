"""`shoal.validate`: predicts measured steps with the cost model, and reports their errors, by source."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.api.call import checked_keywords
from shoal.common.printed import PrintedTable
from shoal.estimate.cost.rows import BadRows
from shoal.estimate.slow_links import is_slow_link, predict_slow_links, with_sources
from shoal.estimate.validate import Prediction, predict, score

SHOWN = {"n": "rows", "median_ape": "median %", "mape": "MAPE %", "bias": "bias %"}


@dataclass(frozen=True, kw_only=True, repr=False)
class Validation(PrintedTable):
    """Predictions of measured steps, and their errors by source."""

    scores: dict[str, dict[str, Any]]
    predictions: list[Prediction]

    @property
    def not_predicted(self) -> list[Prediction]:
        """Rows that the cost model refuses, with the reason."""
        return [guess for guess in self.predictions if guess.reason]

    def to_json(self) -> dict[str, Any]:
        """What the verb prints with `--json`."""
        listed = [{"id": guess.id, "reason": guess.reason} for guess in self.not_predicted]
        return {"scores": self.scores, "not_predicted": listed}

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        rows = [[source, *(str(metrics.get(key, "")) for key in SHOWN)] for source, metrics in self.scores.items()]
        return f"{len(self.predictions)} measured steps", ["source", *SHOWN.values()], rows


@checked_keywords
def validate(file: str | Path, *, predictions: str | Path | None = None) -> Validation:
    """Predicts published measurements with the cost model, and scores the predictions.

    Args:
        file: CSV of measured steps: model, cluster, strategy, seconds (docs/validation.md).
        predictions: Write id,step_s,memory_gib,fits of each row to this CSV.

    Returns:
        Errors by source (`.scores`) and every prediction (`.predictions`).

    Raises:
        BadRows: The file cannot be read, or has no rows.
    """
    rows: Sequence[Mapping[str, str]] = read_measurements(str(file))
    if is_slow_link(rows):
        rows = with_sources(rows)
        found = predict_slow_links(rows)
    else:
        found = predict(rows)
    if predictions is not None:
        _write(str(predictions), found)
    return Validation(scores=score(rows, found), predictions=list(found))


def read_measurements(path: str) -> list[dict[str, str]]:
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = [{key: value or "" for key, value in row.items() if key} for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadRows(f"{path}: {reason}; name a CSV file of measurements") from None
    if not rows:
        raise BadRows(f"{path} has no rows; expected one for each measured step")
    return rows


def _write(path: str, predictions: Sequence[Prediction]) -> None:
    try:
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("id", "step_s", "memory_gib", "fits"))
            for guess in predictions:
                step, memory = (f"{value:.6g}" if value else "" for value in (guess.step_s, guess.memory_gib))
                writer.writerow((guess.id, step, memory, "" if guess.fits is None else int(guess.fits)))
    except OSError as error:
        raise BadRows(f"--predictions {path!r}: {error.strerror or error}; name a file that can be written") from None

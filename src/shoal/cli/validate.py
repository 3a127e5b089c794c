"""`shoal validate FILE.csv`: predicts each measured row, and prints how good the predictions are, by source."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.estimate.cost.rows import BadRows
from shoal.estimate.slow_links import is_slow_link, predict_slow_links, with_sources
from shoal.estimate.validate import Prediction, predict, score

MOST_REFUSED = 10
"""Rows without a prediction that are shown with their reason; all are counted."""
COLUMNS = {
    "n": "rows", "median_ape": "med", "mape": "MAPE", "bias": "bias", "within_20": "<20", "groups": "grp",
    "regret_mean": "regret", "spearman": "rho", "memory_median_ape": "mem", "memory_mape": "mMAPE",
}  # fmt: skip


def validate_file(path: str, *, predictions_file: str | None, as_json: bool) -> None:
    """Reads, predicts, scores and prints."""
    rows: Sequence[Mapping[str, str]] = read_measurements(path)
    if is_slow_link(rows):
        rows = with_sources(rows)
        predictions = predict_slow_links(rows)
    else:
        predictions = predict(rows)
    if predictions_file:
        _write(predictions_file, predictions)
    report = score(rows, predictions)
    refused = [guess for guess in predictions if guess.reason]
    if as_json:
        listed = [{"id": guess.id, "reason": guess.reason} for guess in refused]
        print(json.dumps({"scores": report, "not_predicted": listed}, indent=1))
        return
    print_scores(report)
    if refused:
        print(f"\n{len(refused)} of {len(rows)} rows cannot be predicted:", file=sys.stderr)
        for guess in refused[:MOST_REFUSED]:
            print(f"  {guess.id}: {guess.reason}", file=sys.stderr)
        if len(refused) > MOST_REFUSED:
            print(f"  and {len(refused) - MOST_REFUSED} more (--json lists all)", file=sys.stderr)


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


def print_scores(report: dict[str, dict[str, Any]]) -> None:
    """The metrics of all rows and of each source, as a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    shown = [key for key in COLUMNS if any(key in metrics for metrics in report.values())]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("source", no_wrap=True)
    for key in shown:
        table.add_column(COLUMNS[key], justify="right")
    for source, metrics in report.items():
        table.add_row(source, *(str(metrics.get(key, "")) for key in shown))
    console.print(table)
    console.print("errors in %: med(ian), MAPE, bias; <20: rows within 20 %; grp, regret, rho: ranking; mem: memory")
    for source, metrics in report.items():
        labels, plan = metrics.get("oom_clean") or metrics.get("oom"), metrics.get("plan")
        if labels:
            console.print(
                f"{source}: out of memory: precision {labels['precision']} %, recall {labels['recall']} % of "
                f"{labels['oom']} undoubted labels in {labels['n']} rows", soft_wrap=True,
            )  # fmt: skip
        if plan:
            console.print(
                f"{source}: best plan predicted to fit does not in {plan['oom_or_none']} of {plan['groups']} groups, "
                f"regret {plan['regret_mean']} in the others", soft_wrap=True,
            )  # fmt: skip

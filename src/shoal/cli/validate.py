"""`shoal validate FILE.csv`: predicts each measured row, and prints how good the predictions are, by source."""

from __future__ import annotations

import json
import sys
from typing import Any

from shoal.api.validate import validate

MOST_REFUSED = 10
"""Rows without a prediction that are shown with their reason; all are counted."""
COLUMNS = {
    "n": "rows",
    "median_ape": "med",
    "mape": "MAPE",
    "bias": "bias",
    "within_20": "<20",
    "groups": "grp",
    "regret_mean": "regret",
    "spearman": "rho",
    "memory_median_ape": "mem",
    "memory_mape": "mMAPE",
}


def validate_file(path: str, *, predictions_file: str | None, as_json: bool) -> None:
    """Reads, predicts, scores and prints."""
    found = validate(path, predictions=predictions_file)
    refused = found.not_predicted
    if as_json:
        print(json.dumps(found.to_json(), indent=1))
        return
    print_scores(found.scores)
    if refused:
        print(f"\n{len(refused)} of {len(found.predictions)} rows cannot be predicted:", file=sys.stderr)
        for guess in refused[:MOST_REFUSED]:
            print(f"  {guess.id}: {guess.reason}", file=sys.stderr)
        if len(refused) > MOST_REFUSED:
            print(f"  and {len(refused) - MOST_REFUSED} more (--json lists all)", file=sys.stderr)


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
                f"{labels['oom']} undoubted labels in {labels['n']} rows",
                soft_wrap=True,
            )
        if plan:
            console.print(
                f"{source}: best plan predicted to fit does not in {plan['oom_or_none']} of {plan['groups']} groups, "
                f"regret {plan['regret_mean']} in the others",
                soft_wrap=True,
            )

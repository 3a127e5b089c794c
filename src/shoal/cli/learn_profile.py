"""`shoal calibrate --from ROWS.csv`: a framework profile, fitted to steps measured on a cluster."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from shoal.api.validate import read_measurements
from shoal.cli.output import print_json, write_file
from shoal.estimate.cost.learn import learn_profile
from shoal.estimate.cost.price import price
from shoal.estimate.cost.profile import Profile
from shoal.estimate.cost.profile_file import profile_toml, read_profile
from shoal.estimate.cost.rows import BadRows, read_rows

DEFAULT_OUTPUT = "profile.toml"


def learn_command(rows_file: str, *, start: str | None, output: str | None, as_json: bool) -> int:
    """Fits a profile, prints how much better it explains the rows, and writes it."""
    timed = [row for row in read_measurements(rows_file) if row.get("step_s") and row.get("status", "ok") in ("ok", "")]
    if len(timed) < 3:
        raise BadRows(f"{rows_file}: {len(timed)} rows have a step_s; a profile needs at least 3, better 30")
    read = read_rows(timed)
    begun = read_profile(start) if start is not None else read.profiles[int(np.bincount(read.profile_index).argmax())]
    if not as_json:
        print(
            f"learning from {len(read.priced)} rows of {rows_file}, starting from {begun.name!r} ...", file=sys.stderr
        )
    learned = learn_profile([timed[number] for number in read.priced], begun, name=Path(rows_file).stem)
    measured = np.array([float(timed[number]["step_s"]) for number in read.priced])
    before, after = (
        float(np.median(np.abs(price(read.inputs, each).step_s / measured - 1))) for each in (begun, learned)
    )
    path = Path(output or DEFAULT_OUTPUT)
    origin = f"Learned by `shoal calibrate --from` from {len(measured)} measured steps, starting from {begun.name!r}."
    write_file(profile_toml(learned, origin=origin), path, option="--output")
    report = {
        "rows": len(measured), "refused": [{"row": number + 1, "reason": reason} for number, reason in read.refused],
        "start": begun.name, "median_error_before": before, "median_error": after, "moved": _moved(begun, learned),
        "file": str(path),
    }  # fmt: skip
    _print(report, as_json=as_json)
    return 0


def _moved(begun: Profile, learned: Profile) -> dict[str, list[float]]:
    """What changed by more than a hundredth: from, to."""
    pairs = {
        field.name: [float(getattr(begun, field.name)), float(getattr(learned, field.name))]
        for field in fields(Profile) if field.name != "name"
    }  # fmt: skip
    return {name: pair for name, pair in pairs.items() if abs(pair[1] - pair[0]) > 0.01 * abs(pair[0])}


def _print(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    for name, (old, new) in report["moved"].items():
        print(f"  {name}: {old:.4g} -> {new:.4g}")
    for row in report["refused"]:
        print(f"  row {row['row']} left out: {row['reason']}")
    print(
        f"median error of {report['rows']} steps: {100 * report['median_error_before']:.1f}% -> "
        f"{100 * report['median_error']:.1f}%\nwritten to {report['file']}; use it as --profile {report['file']}"
    )

"""`shoal calibrate --from ROWS.csv`: a framework profile, fitted to steps measured on a cluster."""

from __future__ import annotations

import sys

from shoal.api.learn_profile import LearnedProfile, learn_profile
from shoal.cli.output import print_json

DEFAULT_OUTPUT = "profile.toml"


def learn_command(rows_file: str, *, start: str | None, output: str | None, as_json: bool) -> int:
    """Fits a profile, writes it, and prints how much better it explains the rows."""

    def doing(what: str) -> None:
        if not as_json:
            print(f"{what} ...", file=sys.stderr)

    learned = learn_profile(rows_file, start=start, output=output or DEFAULT_OUTPUT, progress=doing)
    if as_json:
        print_json(learned.to_json())
    else:
        _print(learned)
    return 0


def _print(learned: LearnedProfile) -> None:
    for name, (old, new) in learned.moved.items():
        print(f"  {name}: {old:.4g} -> {new:.4g}")
    for row in learned.refused:
        print(f"  row {row['row']} left out: {row['reason']}")
    print(
        f"median error of {learned.rows} steps: {100 * learned.median_error_before:.1f}% -> "
        f"{100 * learned.median_error:.1f}%\nwritten to {learned.file}; use it as --profile {learned.file}"
    )

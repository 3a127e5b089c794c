"""`python -m fuzz --cases 2000`: cases from `--first` on, each reproduced by its number (`--only 17`).

Prints a line for every failure as it is found and a table at the end; exits with 1 if any case failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

from fuzz.judge import Verdict, judge


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000, help="Number of cases.")
    parser.add_argument("--first", type=int, default=0, help="Number of the first case.")
    parser.add_argument("--only", type=int, help="Run one case and print all of its verdicts.")
    parser.add_argument("--minutes", type=float, help="Stop after this many minutes.")
    parser.add_argument("--ranks", type=int, default=8, help="Most ranks of a strategy.")
    parser.add_argument("--report", type=Path, help="Write every verdict to this file, a JSON object a line.")
    options = parser.parse_args()
    if options.only is not None:
        verdicts = list(judge(options.only, most_ranks=options.ranks))
        for verdict in verdicts:
            print(verdict)
        return int(any(verdict.end == "failed" for verdict in verdicts))
    started = time.monotonic()
    ends: Counter[str] = Counter()
    largest = 0.0
    cases = 0
    for number in range(options.first, options.first + options.cases):
        if options.minutes is not None and time.monotonic() - started > 60 * options.minutes:
            break
        cases += 1
        for verdict in judge(number, most_ranks=options.ranks):
            ends[verdict.end] += 1
            if verdict.end == "equal":
                largest = max(largest, verdict.difference)
            if verdict.end == "failed":
                print(f"\r{verdict}", flush=True)
            if options.report is not None:
                _append(options.report, verdict)
        _progress(cases, options.cases, ends, time.monotonic() - started)
    print(f"\n{cases} cases in {time.monotonic() - started:.0f} s: {dict(ends)}; largest difference {largest:.1e}")
    return int(ends["failed"] > 0)


def _append(file: Path, verdict: Verdict) -> None:
    row = {"case": verdict.number, "strategies": verdict.strategies, "end": verdict.end, "detail": verdict.detail}
    with file.open("a") as out:
        out.write(json.dumps(row) + "\n")


def _progress(cases: int, of: int, ends: Counter[str], seconds: float) -> None:
    if sys.stderr.isatty():
        print(f"\r{cases}/{of} cases, {dict(ends)}, {seconds:.0f} s", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""`shoal.calibrate`: measures links, collectives and operators on ranks of this host, and writes what it found.

On ranks that a launcher has started it measures as one of them, and rank 0 writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.api.call import checked_keywords
from shoal.calibration.findings import CannotCalibrate, Findings, findings_of, write_findings
from shoal.comm.calibration import calibration_path
from shoal.common.log import log_message
from shoal.common.printed import PrintedTable

SIZES = [1 << power for power in range(10, 25, 2)]
THOROUGH = {"sizes": SIZES, "rounds": 9, "seconds": 20.0, "machine": 4}
QUICK = {"sizes": [1 << 12, 1 << 16, 1 << 20, 1 << 22], "rounds": 3, "seconds": 5.0, "machine": 1}
MOST_RANKS = 4

Listener = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True, repr=False)
class CalibrationReport(PrintedTable):
    """What was measured, and where it was written."""

    findings: Findings
    file: Path | None
    """None: other programs had most of the cores, and nothing was written."""

    def to_json(self) -> dict[str, Any]:
        """What the verb prints with `--json`."""
        return {**self.findings.to_json(), "file": None if self.file is None else str(self.file)}

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        rows = [
            [name, f"{1e6 * fit.link.latency_s:.1f} us", f"{1e-9 / fit.link.byte_s:.2f} GB/s"]
            for name, fit in self.findings.links.items()
        ]
        title = f"{self.findings.ranks} ranks, fastest backend {self.findings.fastest}; written to {self.file}"
        return title, ["link", "a message", "bandwidth"], rows


@checked_keywords
def calibrate(
    *,
    ranks: int | None = None,
    output: str | Path | None = None,
    quick: bool = False,
    force: bool = False,
    links: bool = False,
    on_message: Listener = log_message,
) -> CalibrationReport | None:
    """Measures this machine in about a minute: operators, memory, collectives by backend, links, overheads.

    Args:
        ranks: Ranks to measure with. None: one a core, from 2 to 4.
        output: Where to write. None: $SHOAL_CALIBRATION, or ~/.config/shoal/calibration.toml.
        quick: Fewer sizes and rounds: a few seconds, rough figures.
        force: Whether figures are written also if other programs had most of the cores.
        links: Collectives and links only; what was measured of the machine stays.
        on_message: Is given the progress. The `shoal` logger by default.

    Returns:
        What was measured; None on ranks of a launcher other than rank 0.

    Raises:
        CannotCalibrate: There is no place for the file, or no ranks to measure with.
    """
    path = Path(output) if output else calibration_path()
    if path is None:
        raise CannotCalibrate(
            "there is no place for the file (SHOAL_CALIBRATION is empty, or HOME not set); name one by --output"
        )
    if not (hasattr(os, "memfd_create") and hasattr(os, "eventfd")):
        raise CannotCalibrate("the shoal backend needs Linux; without it there are no links to measure here")
    arguments: dict[str, Any] = QUICK if quick else THOROUGH
    if links:
        arguments = {**arguments, "machine": 0}
    if is_launched():
        if ranks is not None:
            raise CannotCalibrate(f"--ranks {ranks}: the launcher has started the ranks already; leave --ranks out")
        measured = _as_one_rank(arguments, on_message)
    else:
        chosen = ranks or min(MOST_RANKS, max(2, len(os.sched_getaffinity(0))))
        measured = _on_ranks(arguments, chosen, on_message)
    if measured is None:
        return None
    findings = findings_of(measured)
    written = findings.usable or force
    if written:
        write_findings(findings, path)
    return CalibrationReport(findings=findings, file=path if written else None)


def is_launched() -> bool:
    """Whether a launcher has started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _on_ranks(arguments: dict[str, Any], ranks: int, moved: Listener) -> dict[str, Any]:
    from shoal.calibration.entry import measure_here
    from shoal.launch import run_ranks

    def on_message(rank: int, message: dict[str, Any]) -> None:
        if message["event"] == "stopping":
            raise KeyboardInterrupt  # There is nothing to bring to an end.
        if rank == 0:
            moved(message)

    measured: dict[str, Any] = run_ranks(measure_here, arguments, ranks=ranks, on_message=on_message)[0]
    return measured


def _as_one_rank(arguments: dict[str, Any], moved: Listener) -> dict[str, Any] | None:
    """What was measured on rank 0, None on the others."""
    from shoal.calibration.measure import measure
    from shoal.launch.channel import Channel

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world < 2:
        raise CannotCalibrate("the launcher has started one rank; expected at least 2")
    receiver: Listener = moved if rank == 0 else lambda message: None
    measured = measure(arguments, Channel(rank=rank, world=world, receiver=receiver))
    return measured if rank == 0 else None

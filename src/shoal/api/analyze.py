"""`shoal.analyze`: work, depth and bytes of a network, layer by layer; how many devices each axis could use; how fast p
processors could be at best and at worst. A preset's shape is enough and needs no torch; a job is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.api.call import checked_keywords, job_of
from shoal.common.log import log_progress
from shoal.common.printed import PrintedTable
from shoal.job import names
from shoal.job.errors import JobError, did_you_mean

if TYPE_CHECKING:
    from shoal.job import Job


class CannotAnalyze(ValueError):
    """A name that is neither a preset nor a job."""


@dataclass(frozen=True, kw_only=True, repr=False)
class NetworkReport(PrintedTable):
    """Work, depth and concurrency of a network."""

    network: str
    parameters: int
    batch: int
    report: dict[str, Any]
    """All that the verb prints with `--json`."""

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return self.report

    def to_svg(self) -> str:
        """The time bounds and the work by layer."""
        from shoal.pictures.analysis import analysis_svg

        return analysis_svg(self.report)

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        rows = [
            [name, f"{cost['work']:.3g}", f"{cost['depth']:,}", f"{cost['bytes']:.3g}"]
            for name, cost in self.report["totals"].items()
        ]
        title = f"{self.network}: {self.parameters:,} parameters, batch {self.batch:,}"
        return title, ["", "work", "depth", "bytes"], rows


@checked_keywords
def analyze(
    job: str | Job, *, batch: int | None = None, measure: bool = False, progress: Callable[[str], None] = log_progress
) -> NetworkReport:
    """Counts work, depth and bytes of a network, and how many devices each axis could use.

    Args:
        job: A Job, a file, a built-in name, or a known network such as `"vgg16"` or `"gpt:175b"`.
        batch: Samples in a step. None: the job's; of a preset 32 images or 1 text.
        measure: Also time each 2-D convolution here by every method (docs/operators.md).
        progress: Is given what is being done. The `shoal` logger by default.

    Returns:
        The report: totals, layers, concurrency, time bounds; `.to_svg()` draws it.

    Raises:
        CannotAnalyze: The name is neither a network nor a job.

    Example:
        shoal.analyze("resnet50", batch=256).report["totals"]
    """
    from shoal.analysis import preset_network, report
    from shoal.analysis.presets import is_preset

    if isinstance(job, str) and is_preset(job):
        network = preset_network(job, batch=batch)
    else:
        if isinstance(job, str):
            _require_job(job)
        progress("importing torch")
        from shoal.analysis.traced import traced_network

        loaded = job_of(job)
        progress(f"tracing {loaded.name}")
        network = traced_network(loaded, batch=batch)
    found = report(network)
    if measure:
        progress("importing torch")
        from shoal.operators.layers import measured_convolutions

        found["measured"] = measured_convolutions(network, progress=progress)
    return NetworkReport(network=found["network"], parameters=found["parameters"], batch=found["batch"], report=found)


def _require_job(text: str) -> None:
    """Before torch is imported. What begins with a task is refused by the job's own rules, later."""
    if names.is_file(text) or text.partition(":")[0].strip().lower() in names.TASKS:
        return
    try:
        names.parse_name(text)
    except JobError:
        from shoal.analysis import preset_names

        known = preset_names()
        raise CannotAnalyze(
            f"nothing is called {text!r}: expected a Python file that defines `job`, a task ({', '.join(names.TASKS)}) "
            f"or a known network ({', '.join(known)}).{did_you_mean(text.strip().lower(), known)}"
        ) from None

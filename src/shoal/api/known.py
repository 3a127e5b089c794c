"""Names of jobs that are refused before anything is loaded."""

from __future__ import annotations

from shoal.training.resumed import CannotTrain


def require_known(job: str, size: str | None) -> None:
    """Refuses a name that is none of a built-in job, without loading anything."""
    from shoal.job import names

    if not names.is_file(job):
        chosen = names.parse_name(job, size=size)
        if size is not None and names.parse_name(chosen.task, size=size).size != chosen.size:
            raise CannotTrain(f"--size {size}: the job {job!r} is of size {chosen.size}; keep one of the two")

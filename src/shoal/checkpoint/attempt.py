"""What ranks that save together try, and how it fails: every rank learns of every rank's error."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


class CheckpointFailed(ValueError):
    """A checkpoint could not be written; earlier ones are unchanged."""

    def __init__(self, message: str, *, errno: int | None, last_good: Path | None) -> None:
        super().__init__(message)
        self.errno = errno
        """The error number, if the operating system reported the error."""
        self.last_good = last_good


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of the work, or its error: the other ranks wait for either."""
    try:
        return work()
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return {"error": {"text": f"{error.strerror or error}{where}", "errno": error.errno}}
    except Exception as error:
        return {"error": {"text": str(error) or repr(error), "errno": None}}


def failures_in(reports: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    return [(rank, report["error"]) for rank, report in enumerate(reports) if "error" in report]


def free_bytes_at(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def size_text(number: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return f"{number} bytes"

"""What a run that failed is called by: the rank that failed first, and its own reason.

When one rank goes, its peers fail too, because their connections close. Those are echoes; the one error a
person sees must be the cause.
"""

from __future__ import annotations

import importlib
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

ECHO = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|socket (closed|is closed|not connected)|"
    r"application timeout|timed out waiting|read error|writev error|recvvalue failed|rank \d+ disconnected: ",
    re.IGNORECASE,
)


class RankFailed(RuntimeError):
    """A rank failed and the others were ended. `message` is one line, or a user error's own text."""

    def __init__(
        self,
        rank: int,
        message: str,
        traceback_text: str = "",
        *,
        error_type: str = "",
        for_user: bool = False,
        killed: bool = False,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.message = message
        self.traceback_text = traceback_text
        self.error_type = error_type
        """The exception's class on the rank, as "package.module.Name"; empty when it was none."""
        self.for_user = for_user
        """Whether the message is written for the person who started the run and needs no traceback."""
        self.killed = killed
        """Whether a signal ended its process: the same ranks may do better if they are started again."""

    def original(self) -> Exception:
        """The refusal that the rank raised, of its own class and with its own text; this failure where it was none."""
        module, _, name = self.error_type.rpartition(".")
        if not self.for_user or not module.startswith("shoal."):
            return self
        cls = getattr(importlib.import_module(module), name)
        # Of its attributes only the text came over the line.
        again: Exception = Exception.__new__(type(name, (cls,), {"__str__": lambda error: self.message}))
        return again


class RankHung(RankFailed):
    """No progress for too long; `rank` is the one that is late."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How one rank failed, as the parent came to know it."""

    rank: int
    at_s: float
    error: RankFailed
    is_echo: bool = False


def first_cause(failures: Iterable[Failure]) -> Failure | None:
    """The earliest failure that is not the echo of another; the earliest echo if there is nothing else."""
    return min(failures, key=lambda failure: (failure.is_echo, failure.at_s), default=None)


def from_exception(rank: int, report: dict[str, Any]) -> Failure:
    """A failure from the report of an exception that `shoal.launch.rank.describe` makes."""
    text = report["message"]
    if report["for_user"]:
        message = text
    else:
        lines = text.strip().splitlines()
        name = report["type"].rpartition(".")[2]
        message = f"rank {rank} failed: {name}: {lines[0]}" if lines else f"rank {rank} failed: {name}"
    error = RankFailed(rank, message, report["traceback"], error_type=report["type"], for_user=report["for_user"])
    echo = report["network"] and ECHO.search(text) is not None
    return Failure(rank=rank, at_s=report["at_s"], error=error, is_echo=echo)


def from_exit(rank: int, code: int | None, at_s: float) -> Failure:
    """The failure of a process that exited without a report; `code` is negative for a signal."""
    if code is None:
        message = f"rank {rank} was lost: the process that starts ranks ended, and its ranks with it"
    elif code < 0:
        hint = " (often the kernel, out of memory)" if -code == signal.SIGKILL else ""
        message = f"rank {rank} was killed by {signal_name(-code)}{hint}"
    else:
        message = f"rank {rank} ended with exit status {code} before its work was done"
    error = RankFailed(rank, message, killed=code is not None and code < 0)
    # A lost server takes all ranks with it: any other reason that is known comes first.
    return Failure(rank=rank, at_s=at_s, error=error, is_echo=code is None)


def from_hang(rank: int, report: dict[str, Any], at_s: float) -> Failure:
    """A failure from the report of a rank's Watch."""
    late = report["late"][0] if report["late"] else rank
    return Failure(rank=late, at_s=at_s, error=RankHung(late, report["message"], report.get("stack", "")))


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

"""The one error of this room: something about the job itself is wrong. It is a ValueError, so that a program
which knows nothing of Shoal can still catch it; its text is written for the person who wrote the job.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.common.suggest import nearest_name


class JobError(ValueError):
    """A job that cannot be found, loaded or trained as it is written."""


def did_you_mean(given: str, valid: Iterable[str]) -> str:
    """' Did you mean ...?' with the nearest valid name, or nothing when none is near."""
    near = nearest_name(given, valid)
    return f" Did you mean {near!r}?" if near is not None else ""

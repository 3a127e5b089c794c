"""The sessions of a run whose ranks change: ranks that were lost are started again, or new ones come.

A *session* is the life of the process groups of a run, from `join` to `leave`. Ranks that may come later are started by
the same process as all others. Each makes ready and writes its number into a folder; the first rank decides when it is
taken up, and describes the session that follows in a file before it leaves the one that ends. Every rank, old or new,
finds its place in the next session there, and joins it at a rendezvous of its own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SESSIONS_FOLDER = "SHOAL_SESSIONS"
"""The environment variable by which ranks find the folder; not set where ranks do not change."""
COMING = "SHOAL_COMING"
"""Set for a rank that comes to a run under way: since when its process exists, in seconds of the system's clock."""
LOOK_S = 0.01


def _folder() -> Path | None:
    found = os.environ.get(SESSIONS_FOLDER)
    return Path(found) if found else None


def _write(path: Path, value: Any) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(value))
    part.rename(path)


def coming_since() -> float | None:
    """When this process was started, if its rank comes to a run under way."""
    found = os.environ.get(COMING)
    return float(found) if found else None


def report_ready(rank: int, facts: dict[str, Any]) -> None:
    """This rank can be taken up."""
    folder = _folder()
    assert folder is not None
    _write(folder / f"ready-{rank}", facts)


def ready_ranks() -> dict[int, dict[str, Any]]:
    """The ranks that can be taken up, with what each has reported."""
    folder = _folder()
    paths = [] if folder is None else folder.glob("ready-*")
    return {int(path.name.removeprefix("ready-")): json.loads(path.read_text()) for path in paths}


def withdraw(folder: Path, rank: int) -> None:
    """A rank that was ready is not any more, or is taken up."""
    (folder / f"ready-{rank}").unlink(missing_ok=True)


def taken_up(folder: Path, rank: int, *, since_s: float) -> bool:
    """Whether a session that was described after a time has this rank as one that comes."""
    newer = [path for path in folder.glob("session-*") if path.stat().st_mtime >= since_s]
    return any(rank in json.loads(path.read_text())["coming"] for path in newer)


def announce(number: int, session: dict[str, Any], *, lost: Path | None) -> None:
    """On the first rank: describes the next session; all who are in it count as there from now on. `lost`: the folder
    that names lost ranks."""
    folder = _folder()
    assert folder is not None
    for rank in session["coming"]:
        withdraw(folder, rank)
        if lost is not None:
            (lost / str(rank)).unlink(missing_ok=True)
    _write(folder / f"session-{number}", session)


def session(number: int) -> dict[str, Any] | None:
    """The description of a session, if there is one."""
    folder = _folder()
    path = None if folder is None else folder / f"session-{number}"
    return json.loads(path.read_text()) if path is not None and path.exists() else None


def coming_to(number: int) -> list[int]:
    """The ranks that a session has and the one before it had not."""
    found = session(number)
    return [] if found is None else list(found["coming"])


def newest() -> int:
    """The number of the newest session; the first has 0, and no description."""
    folder = _folder()
    found = [] if folder is None else folder.glob("session-*")
    return max((int(path.name.removeprefix("session-")) for path in found), default=0)


def await_session(rank: int, watch: Callable[[], None], *, after: int) -> int:
    """On a rank that comes: the number of the first session that it is in, of those after one: it may have been in
    others, as a process that was lost since."""
    while True:
        number = newest()
        found = session(number)
        if number > after and found is not None and rank in found["coming"]:
            return number
        watch()
        time.sleep(LOOK_S)


def enter(number: int, world: int) -> None:
    """Makes this process one that joins a session: `join` then meets the ranks of that one."""
    rendezvous = os.environ["SHOAL_RENDEZVOUS"].partition("@")[0]
    os.environ["SHOAL_RENDEZVOUS"] = f"{rendezvous}@{number}"
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(world)

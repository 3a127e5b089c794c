"""Room for open files: a rank holds two descriptors for each peer of each group, and a process has few by default.

The soft limit (often 1024) guards old programs that cannot handle more; any process may raise its own to the hard
limit. That is done when a group would not fit, and what still does not fit is refused before anything is opened.
"""

from __future__ import annotations

import os
import resource

SPARE = 32
"""For what else a process opens while a group is made: files, libraries, the links under way."""


class NoDescriptorsLeft(OSError):
    """A group needs more open files than this process may have."""

    for_user = True


def make_room(needed: int, *, what: str) -> None:
    """Raises the soft limit where `needed` more descriptors would not fit under it; `what` needs them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    total = _open() + needed + SPARE
    if soft == resource.RLIM_INFINITY or total <= soft:
        return
    if hard != resource.RLIM_INFINITY and total > hard:
        raise NoDescriptorsLeft(
            f"{what} takes {needed} file descriptors; this process has {_open()} open and may have {hard} "
            f"(RLIMIT_NOFILE, of which {SPARE} are kept spare). Raise the hard limit (`ulimit -Hn`, LimitNOFILE= of a "
            "systemd unit, or /etc/security/limits.conf), use fewer ranks or fewer axes, or close engines that are "
            "done with (`Engine.close`)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else total, hard))


def _open() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0

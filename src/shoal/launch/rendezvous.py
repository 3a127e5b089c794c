"""The private directory through which the ranks of one local run find each other.

It is removed when the run ends. Its owner holds a lock in it, which the kernel releases however the owner
dies, so that the next run can distinguish an abandoned directory from a live one and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "shoal-ranks-"


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """A directory of mode 0700 that exists as long as the block runs."""
    _remove_abandoned()
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = os.open(directory / "owner", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _remove_abandoned() -> None:
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if directory.stat().st_uid != os.getuid():
                continue
            # A directory without the file was made a moment ago: its owner is about to lock it.
            lock = os.open(directory / "owner", os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)

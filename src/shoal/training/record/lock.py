"""A run's folder belongs to one run at a time: a lock that every process of the run holds, and the kernel releases.

Ranks of a killed parent may still be writing when the next run starts in the same folder. So each process that may
write holds a shared lock (flock) on one file in it; a new run needs it exclusively for a moment, which it gets only
when the last of them has ended, however it ended. The file names its run: a process joins only its own run. It
stays behind, and blocks nothing.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

LOCK = ".lock"
WAIT_S = 10.0
"""How long a run waits for the folder; ranks whose parent was killed end within a second or two."""
SILENT_S = 0.5
"""How long it waits without a message."""
EVERY_S = 0.02
BUSY = (errno.EAGAIN, errno.EACCES, errno.EINTR)


class FolderBusy(ValueError):
    """Another run writes to the folder."""


class FolderLock:
    """A process's hold on a run's folder, until `release` or its end."""

    def __init__(self, file: int | None, token: str) -> None:
        self._file = file
        self.token = token
        """By which other processes of the same run join."""

    def release(self) -> None:
        """Gives it up. Again is no error."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


def take(folder: Path, *, say: Callable[[str], None], wait_s: float | None = None) -> FolderLock:
    """Makes the folder that of a new run. It must exist; `say` gets a message when it takes a while.

    Raises:
        FolderBusy: Another run still holds it after `wait_s` (or WAIT_S) seconds.
    """
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        started, reported = time.monotonic(), False
        while not _flock(file, fcntl.LOCK_EX):
            waited = time.monotonic() - started
            if waited > (WAIT_S if wait_s is None else wait_s):
                raise FolderBusy(
                    f"the folder {folder} is in use by another run ({_holders(file)}); wait for its end, or give "
                    "another --folder"
                )
            if not reported and waited > SILENT_S:
                say(f"waiting for {folder}, which another run is using ({_holders(file)})")
                reported = True
            time.sleep(EVERY_S)
        token = secrets.token_hex(8)
        content = json.dumps({"token": token, "pid": os.getpid(), "host": socket.gethostname()}).encode()
        os.ftruncate(file, 0)
        os.pwrite(file, content, 0)
        return _shared(file, folder, token)
    except BaseException:
        os.close(file)
        raise


def join(folder: Path, token: str) -> FolderLock:
    """The same hold, for another process of the run that `take` made the folder's.

    Raises:
        FolderBusy: It is another run's by now.
    """
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        return _shared(file, folder, token)
    except BaseException:
        os.close(file)
        raise


def _shared(file: int, folder: Path, token: str) -> FolderLock:
    # Between an exclusive and a shared lock there is a moment without any, in which another run may have come.
    if not _flock(file, fcntl.LOCK_SH) or _content(file).get("token") != token:
        raise FolderBusy(
            f"the folder {folder} was taken by another run at the same moment ({_holders(file)}); give another --folder"
        )
    return FolderLock(file, token)


def _flock(file: int, how: int) -> bool:
    """Whether it was given. Where the file system has no locks there is nothing to wait for."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in BUSY
    return True


def _content(file: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(file, 4096, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _holders(file: int) -> str:
    """The processes that hold the lock: by the kernel's table, or by the file's content."""
    about = os.fstat(file)
    inode = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
    try:
        rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        rows = []
    pids = sorted({int(row[4]) for row in rows if row[1] == "FLOCK" and row[5] == inode and int(row[4]) > 0})
    content = _content(file)
    host = f" on {content['host']}" if content.get("host") not in (None, socket.gethostname()) else ""
    if isinstance(content.get("pid"), int) and (not pids or content["pid"] in pids):
        return f"process {content['pid']}{host}"
    return f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))}" if pids else "unknown"

"""A cache of remote files on the local disk, which ranks and runs of a host share.

A file is fetched when it is first asked for, once per host whatever the number of ranks, and renamed into place when it
is complete. Where the folder would exceed its bound, the files that were not used for longest are deleted. What was
read lately is in memory anyway: the kernel keeps its pages.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from shoal.job.errors import JobError

Fetch = Callable[[str, Path], None]
"""Copies a remote file to a path."""
KNOWN = ".known"
"""The end of files `beside` the fetched ones."""


def _name(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()[:32] + "-" + Path(url).name[-80:]


def fetch_with_fsspec(url: str, to: Path) -> None:
    """By fsspec: local paths, http, and with its plug-ins s3, gs and others."""
    import fsspec

    with fsspec.open(url, "rb") as remote, open(to, "wb") as local:
        shutil.copyfileobj(remote, local, 1 << 20)


class ShardCache:
    """Files of a remote store, fetched to `folder`, which holds at most `most_bytes` (None: no bound)."""

    def __init__(self, folder: str | Path, *, most_bytes: int | None = None, fetch: Fetch = fetch_with_fsspec) -> None:
        self.folder, self.most_bytes, self.fetch = Path(folder).expanduser(), most_bytes, fetch

    def beside(self, url: str, suffix: str) -> Path:
        """A place for what is known of a file, which stays when the file is deleted."""
        return self.folder / f"{_name(url)}{suffix}"

    def path(self, url: str) -> Path:
        """The local file, fetched if it is not there."""
        found = self.folder / _name(url)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._used(found):
            with open(self.folder / ".lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # Ranks that start together ask for the same file.
                if not self._used(found):
                    self._fetch(url, found)
        return found

    @staticmethod
    def _used(path: Path) -> bool:
        """Whether it is there; if so it counts as used now."""
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def _fetch(self, url: str, to: Path) -> None:
        for left in self.folder.glob("fetch-*.part"):  # Of a process that was killed: whoever fetches has the lock.
            left.unlink(missing_ok=True)
        handle, name = tempfile.mkstemp(dir=self.folder, prefix="fetch-", suffix=".part")
        os.close(handle)
        part = Path(name)
        try:
            self.fetch(url, part)
            self._make_room(part.stat().st_size)
            part.replace(to)
        except Exception as error:
            raise JobError(f"{url} cannot be fetched to {self.folder}: {error}") from error
        finally:
            part.unlink(missing_ok=True)

    def _make_room(self, nbytes: int) -> None:
        """Deletes what was not used for longest. A reader that has such a file open keeps reading it."""
        if self.most_bytes is None:
            return
        files = [file for file in self.folder.iterdir() if file.suffix not in (".part", KNOWN) and file.name != ".lock"]
        known = sorted((file.stat().st_mtime, file.stat().st_size, file) for file in files)
        held = sum(size for _, size, _ in known)
        for _, size, file in known:
            if held + nbytes <= self.most_bytes:
                return
            file.unlink(missing_ok=True)
            held -= size

"""Opens the files of a run only if they are regular files: a link, pipe or device is refused without blocking.
`discard` removes any kind of entry without following links. This module does not import torch.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path) -> BufferedReader:
    """Opens a regular file for reading. Raises OSError for a link, pipe or device."""
    return open(_regular(path, os.O_RDONLY), "rb")


def append_to_regular(path: Path) -> int:
    """A descriptor that appends to a regular file, which is created if it does not exist."""
    return _regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def read_regular(path: Path, *, most: int) -> bytes:
    """The bytes of a regular file of at most `most` bytes."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
        return file.read()


def discard(path: Path) -> None:
    """Removes a file or a folder with its contents; a link itself, not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _regular(path: Path, flags: int) -> int:
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise OSError(error.errno, "it is not a regular file", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return handle

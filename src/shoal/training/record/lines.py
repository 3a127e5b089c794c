"""A file of JSON lines written a line at a time; it survives a full disk, and can be cut back to a step."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.checkpoint.regular import append_to_regular, discard, open_regular
from shoal.training.record.run import RunBroken, parse_line


class Lines:
    """A file of JSON lines. What cannot be written now is written with the next line; no line is torn."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(append_to_regular(path), "ab", buffering=0)  # noqa: SIM115
        self._good_bytes = self._file.seek(0, os.SEEK_END)
        self._waiting: list[bytes] = []
        self._warned = False

    def add(self, row: Mapping[str, Any]) -> None:
        self._waiting.append(json.dumps(row, allow_nan=False).encode() + b"\n")
        try:
            self._write()
        except OSError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{self.path} cannot be written now ({error.strerror or error}); its lines wait",
                    stacklevel=4,
                )

    def _write(self) -> None:
        data = b"".join(self._waiting)
        try:
            done = 0
            while done < len(data):
                done += self._file.write(data[done:])
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(self._good_bytes)
            raise
        self._good_bytes += len(data)
        self._waiting.clear()

    def close(self) -> None:
        with self._file:
            self._write()


def cut(path: Path, last_step: int) -> None:
    """Keeps the lines up to a step, and of those the ones that can be read."""
    fresh = path.with_name(path.name + ".new")
    try:
        with open_regular(path) as old:
            discard(fresh)
            with open(fresh, "xb") as new:
                for line in old:
                    row = parse_line(line)
                    step = row.get("step") if row is not None else None
                    if type(step) is int and step <= last_step and line.endswith(b"\n"):
                        new.write(line)
                new.flush()
                os.fsync(new.fileno())
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunBroken(f"{path} cannot be read: {error.strerror or error}") from error
    os.replace(fresh, path)

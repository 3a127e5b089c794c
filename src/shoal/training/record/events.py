"""The curves of a run for TensorBoard, written in the caller's thread.

tensorboardX's own writer hands events to a thread through a short queue; when that thread dies of a full
disk, the queue fills and training stops. Its file format without its thread is what is used here.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.training.record.run import plain

FLUSH_S = 20.0


class Events:
    """An event file. A full disk ends it, with a warning, and nothing else."""

    def __init__(self, folder: Path, *, resumed_at: int | None) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2
        from tensorboardX.summary import scalar

        self._event, self._scalar = event_pb2.Event, scalar
        self._writer: Any = None
        self._flushed = time.monotonic()
        with self._giving_up():
            folder.mkdir(exist_ok=True)
            self._writer = EventsWriter(str(folder / "events"), f".{os.getpid()}")
            if resumed_at is not None:
                # TensorBoard drops what earlier files of this folder hold of these steps.
                start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                self._writer.write_event(self._event(wall_time=time.time(), step=resumed_at + 1, session_log=start))
            self._writer.flush()

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._writer = None
            warnings.warn(f"the TensorBoard events are not complete: {error.strerror or error}", stacklevel=4)

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in values.items() if plain(value) is not None}
        if self._writer is None or not numbers:
            return
        with self._giving_up():
            for name, value in numbers.items():
                summary = self._scalar(name, float(value))
                self._writer.write_event(self._event(wall_time=time.time(), step=step, summary=summary))
            if time.monotonic() - self._flushed > FLUSH_S:
                self._writer.flush()
                self._flushed = time.monotonic()

    def close(self) -> None:
        if self._writer is not None:
            with self._giving_up():
                self._writer.close()

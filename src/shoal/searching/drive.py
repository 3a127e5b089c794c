"""Starts the workers of a search on this machine, passes on what they report, and replaces those that are killed."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from shoal.searching.options import CannotSearch, SearchOptions
from shoal.searching.study import WORKER, release, release_dead

if TYPE_CHECKING:
    from optuna.study import Study

Listener = Callable[[dict[str, Any]], None]
MOST_DEATHS = 3
"""Workers that die, one after the other, without a trial that ended."""
LOG = "workers.log"
STOP_S = 60.0
"""For workers to write their checkpoints."""


class WorkerProcess:
    """One worker, and the thread that reads it."""

    def __init__(self, order: dict[str, Any], log: IO[bytes], messages: queue.Queue[Any]) -> None:
        # A session of its own: Ctrl-C reaches this process alone, which then has its workers stop.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shoal.searching.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            text=True,
        )
        self.token: str | None = None
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        threading.Thread(target=self._read, args=(messages,), name="shoal-worker", daemon=True).start()

    def _read(self, messages: queue.Queue[Any]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # The last line of a killed worker.
                messages.put((self, json.loads(line)))
        self.process.wait()
        messages.put((self, None))

    def stop(self) -> None:
        """Asks it to write a checkpoint and end."""
        with contextlib.suppress(BrokenPipeError):
            assert self.process.stdin is not None
            self.process.stdin.close()


def drive(options: SearchOptions, study: Study, *, url: str, folder: Path, workers: int, listen: Listener) -> None:
    """Searches until there are enough trials.

    Raises:
        CannotSearch: A worker met what no other trial would mend.
        KeyboardInterrupt: The user stopped; what was begun is queued again.
    """
    order = {
        "options": options.to_json(),
        "url": url,
        "study": study.study_name,
        "folder": str(folder.absolute()),
        "sys_path": [each for each in sys.path if each],
    }
    release_dead(study)
    messages: queue.Queue[Any] = queue.Queue()
    with (folder / LOG).open("ab") as log, _stopping() as alive:
        alive += [WorkerProcess(order, log, messages) for _ in range(workers)]
        deaths = 0
        while alive:
            worker, message = messages.get()
            if message is not None:
                if message["event"] == "worker":
                    worker.token = message["worker"]
                elif message["event"] == "error":
                    raise CannotSearch(message["text"])
                elif message["event"] == "end":
                    deaths = 0
                listen(message)
                continue
            alive.remove(worker)
            status, token = worker.process.returncode, worker.token
            if status == 0:
                continue
            release(study, lambda trial, token=token: trial.user_attrs.get(WORKER) == token)  # type: ignore[misc]
            deaths += 1
            if deaths >= MOST_DEATHS:
                raise CannotSearch(
                    f"{deaths} workers ended with status {status} without finishing a trial; see {folder / LOG}"
                )
            listen({"event": "lost", "text": f"a worker ended with status {status}; its trial is queued again"})
            alive.append(WorkerProcess(order, log, messages))


@contextlib.contextmanager
def _stopping() -> Iterator[list[WorkerProcess]]:
    """Workers that are stopped however this ends; killed where they do not stop, or the user insists."""
    alive: list[WorkerProcess] = []
    try:
        yield alive
    finally:
        for each in alive:
            each.stop()
        try:
            for each in alive:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    each.process.wait(STOP_S)
        finally:
            for each in alive:
                if each.process.poll() is None:
                    each.process.kill()
                    each.process.wait()

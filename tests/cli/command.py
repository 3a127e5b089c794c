"""The `shoal` command as tests call it: in a process of its own, with a check of what that leaves behind.

Everything such a process starts inherits a mark in its environment and a private folder for temporary files,
so that what is left of it can be told from what other programs do on the machine.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

COMMAND = (sys.executable, "-m", "shoal")
MARK = "SHOAL_TEST_MARK"
OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SHOAL_TOKEN", "SHOAL_RENDEZVOUS")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where commands of one test run, and by what their processes are known."""

    folder: Path
    mark: str = field(default_factory=lambda: secrets.token_hex(8))

    def environment(self) -> dict[str, str]:
        temporary = self.folder / "temporary"
        temporary.mkdir(exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCHER}
        paths = os.pathsep.join(path for path in sys.path if path)
        own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "TMPDIR": str(temporary)}
        return {**kept, **own, MARK: self.mark}

    def shoal(self, *words: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Runs the command to its end, which must leave nothing behind."""
        return self.run(*COMMAND[1:], *words, timeout_s=timeout_s)

    def run(self, *words: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """The same for any call of the interpreter."""
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        self.require_clean()
        return done

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Starts the command in a session of its own, as a terminal would."""
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            [*COMMAND, *words],
            cwd=self.folder,
            env=self.environment(),
            text=True,
            start_new_session=True,
            **{**streams, **options},
        )

    def processes(self) -> list[psutil.Process]:
        """Everything that a command of this test has started and that still runs."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def require_clean(self) -> None:
        """Fails if a process, a temporary file or a block of shared memory is left."""
        end_s = time.monotonic() + 5
        while (left := self.left_behind()) and time.monotonic() < end_s:
            time.sleep(0.05)
        assert not left

    def left_behind(self) -> list[str]:
        left = [f"process {process.pid}" for process in self.processes()]
        left += [str(path) for path in Path("/dev/shm").glob("*shoal*")]
        # torch makes a folder for compiled code as soon as there is an optimiser, torchrun one for its logs.
        files = (self.folder / "temporary").glob("*")
        return left + [str(path) for path in files if not path.name.startswith(("torchinductor_", "torchelastic_"))]

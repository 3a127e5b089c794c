"""Checkpoints that are written while training goes on.

A rank copies what it will write, which training waits for; a thread then computes checksums and writes the file.
Threads of different ranks never communicate by collectives, which training uses: each leaves a report in the
checkpoint's folder, and rank 0's thread completes the checkpoint when it has read those of all ranks.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shoal.comm.json_exchange import exchange
from shoal.comm.ledger import BOOK

if TYPE_CHECKING:
    from shoal.checkpoint.save import _Save

REPORT = "report"
POLL_S = 0.02
FULL = json.dumps({"error": {"text": os.strerror(errno.ENOSPC), "errno": errno.ENOSPC}})
"""What an empty report says."""


class Copies:
    """Copies of a rank's tensors in host memory. The memory is used again by the next checkpoint."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def of(self, tensors: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        before, self._held = self._held, {}
        for name, tensor in tensors:
            values = tensor.detach()
            copy = before.get(name)
            if copy is None or copy.shape != values.shape or copy.dtype != values.dtype:
                copy = torch.empty(values.shape, dtype=values.dtype)
            self._held[name] = copy.copy_(values)
        return list(self._held.items())


class Background:
    """At most one checkpoint under way. All ranks start and wait alike."""

    def __init__(self) -> None:
        self.copies = Copies()
        self._saving: _Save | None = None
        self._thread: threading.Thread | None = None
        self._outcome: dict[str, Any] = {}
        self._given_up = threading.Event()

    @property
    def under_way(self) -> bool:
        """Whether a checkpoint was begun and not waited for."""
        return self._saving is not None

    @property
    def succeeded(self) -> bool:
        """On rank 0: whether the checkpoint is complete."""
        return self._thread is not None and not self._thread.is_alive() and not self._outcome

    def start(self, saving: _Save, tables: list[dict[str, Any]]) -> None:
        """Begins to write; `tables`: what all ranks will write."""
        assert self._saving is None, "wait for the checkpoint that is under way"
        self._saving, self._outcome = saving, {}

        def work() -> None:
            saving.write_alone(tables)
            if saving.rank == 0:
                self._outcome = saving.complete_alone(self._reports(saving))

        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> int | None:
        """Waits until the checkpoint is complete; its step, None if none was under way. Collective.

        Raises:
            CheckpointFailed: It could not be written; earlier ones are unchanged.
        """
        saving, thread = self._saving, self._thread
        if saving is None or thread is None:
            return None
        thread.join()
        self._saving = self._thread = None
        with BOOK.during("checkpoint"):
            outcome = exchange(self._outcome, saving.left)[0]
        if outcome:
            raise saving.failed_alone(outcome)
        return saving.step

    def give_up(self) -> None:
        """Where the run fails: rank 0 waits for no report any more."""
        self._given_up.set()

    def _reports(self, saving: _Save) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        while len(found) < len(saving.ranks):
            for rank in saving.ranks:
                path = report_of(saving.partial, rank)
                if rank not in found and path.exists():
                    found[rank] = json.loads(path.read_bytes() or FULL)
            if self._given_up.is_set():
                return [{"error": {"text": "the run has failed", "errno": None}}]
            if len(found) < len(saving.ranks):
                time.sleep(POLL_S)
        return [found[rank] for rank in saving.ranks]


def report_of(partial: Path, rank: int) -> Path:
    return partial / f"{REPORT}-{rank:05d}.json"


def write_report(partial: Path, rank: int, report: dict[str, Any]) -> None:
    """Appears under its name when it is complete."""
    path = report_of(partial, rank)
    fresh = path.with_suffix(".new")
    try:
        fresh.write_text(json.dumps(report, allow_nan=False))
    except OSError:
        # A full disk takes no bytes any more, but still an empty file: it stands for that.
        fresh.write_bytes(b"")
    os.replace(fresh, path)


def remove_reports(partial: Path) -> None:
    """Before the checkpoint is complete: a checkpoint holds nothing but what its checksums cover."""
    for path in partial.glob(f"{REPORT}-*"):
        path.unlink()

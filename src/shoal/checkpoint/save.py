"""Writes checkpoints: all ranks together, atomically, without touching the previous one.

Every element of every parameter and of its optimiser state is written by one rank, whatever the strategy, as
a range of a named tensor; so any strategy can read it back (restore.py). A checkpoint is written under a temporary
name, and renamed once every rank has flushed its part to disk. It consists of safetensors and JSON, without pickle.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.attempt import CheckpointFailed, attempt, failures_in, free_bytes_at, size_text
from shoal.checkpoint.background import Background, Copies, remove_reports, write_report
from shoal.checkpoint.buffers import average_buffers, averaged_buffers, persistent_buffers
from shoal.checkpoint.checksum import combined, of_contents
from shoal.checkpoint.contents import Contents, contents_of
from shoal.checkpoint.files import (
    CHECKSUMS,
    COMPLEX,
    DTYPES,
    FORMAT,
    FULL_FORMAT,
    MANIFEST,
    PARTIAL,
    about_file,
    checkpoints,
    checksums_text,
    digest_of_values,
    dtype_name,
    file_of,
    folder_of,
    put_in_place,
    remove,
    step_of,
    sync_folder,
    tidy,
    to_json,
    write_bytes,
    write_tensors,
)
from shoal.checkpoint.opening import is_readable, latest, open_checkpoint
from shoal.checkpoint.restore import CheckpointMismatch, find_intact, restore
from shoal.checkpoint.rows import CheckpointBroken
from shoal.checkpoint.saved import Checkpoint
from shoal.checkpoint.values import cannot_hold
from shoal.comm.json_exchange import exchange, world_and_rank
from shoal.comm.ledger import BOOK
from shoal.comm.points import reach
from shoal.job.elementwise import Probe
from shoal.parallel.engine import Engine

__all__ = [
    "Checkpoint",
    "CheckpointBroken",
    "CheckpointFailed",
    "CheckpointMismatch",
    "average_buffers",
    "find_intact",
    "latest",
    "open_checkpoint",
    "require_savable",
    "restore",
    "save",
]


def save(
    folder: Path,
    engine: Engine,
    *,
    step: int,
    progress: dict[str, Any],
    keep: int = 2,
    protect: frozenset[int] = frozenset(),
    weights_only: bool = False,
    background: Background | None = None,
) -> Path:
    """Writes the engine's state after `step` steps and returns the checkpoint's path. Collective; nothing may be in
    flight (`Executor.settle`).

    The newest `keep` checkpoints are kept, and those of the steps in `protect`. Those of later steps are removed: the
    run was resumed from an earlier step. If any rank fails, every rank raises CheckpointFailed and nothing of the
    attempt remains. With `background` the state is copied and a thread writes it; `background.wait()` reports failures.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}, but at least 1 checkpoint must be kept")
    if step < 0:
        raise ValueError(f"step is {step}, but steps are counted from 0")
    try:
        json.dumps(progress)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the progress to save must be made of text, numbers, lists and dicts: {error}") from error
    with BOOK.during("checkpoint"), engine.consensus() as own:
        if not weights_only:
            engine.owner.gather_state()
        saving = _Save(Path(folder), engine, step, progress, keep, own, protect=protect, weights_only=weights_only)
        return saving.run() if background is None else saving.begin(background)


def require_savable(engine: Engine, optimizer: Probe) -> None:
    """Tries the first checkpoint in memory: the parameters, the buffers and the optimiser state that the probe found.
    Raises CheckpointFailed before the first step of a job that cannot be saved."""
    buffers = persistent_buffers(engine.model)
    for name, tensor in (*engine.model.named_parameters(), *buffers.items()):
        if tensor.dtype not in DTYPES and tensor.dtype not in COMPLEX:
            raise CheckpointFailed(
                f"no checkpoint of this job can be written: {name} has dtype "
                f"{dtype_name(tensor.dtype)}, which a checkpoint cannot hold; use one of "
                f"{', '.join(sorted(map(dtype_name, DTYPES)))}, or train without checkpoints (--checkpoint-every 0)",
                errno=None,
                last_good=None,
            )
    kept = {where: why for where, value in optimizer.kept.items() if (why := cannot_hold(value))}
    kept |= {where: f"a {type_name}" for where, type_name in optimizer.opaque.items()}
    for where, why in kept.items():
        raise CheckpointFailed(
            f"no checkpoint of this job can be written: {optimizer.name} keeps {why} ({where}), and a checkpoint holds "
            "numbers, text, lists, dicts and tensors; keep it as one of these, or train without checkpoints "
            "(--checkpoint-every 0)",
            errno=None,
            last_good=None,
        )
    if optimizer.forgets:
        raise CheckpointFailed(
            f"no checkpoint of this job can be written: {optimizer.name} was rebuilt in the middle of a trial from all "
            "that a checkpoint holds of it, and its next steps differed. It keeps something outside its state, "
            "its groups and its attributes (in a hook, a closure or a global), or one tensor in two places; keep it "
            "there, once, or train without checkpoints (--checkpoint-every 0)",
            errno=None,
            last_good=None,
        )
    contents_of(engine, buffers=buffers, rank=world_and_rank()[1])


class _Save:
    """One save on one rank. Ranks synchronise three times: before writing, after it, and at the end."""

    def __init__(
        self,
        folder: Path,
        engine: Engine,
        step: int,
        progress: dict[str, Any],
        keep: int,
        own: list[torch.Tensor],
        *,
        protect: frozenset[int],
        weights_only: bool,
    ) -> None:
        self.protect, self.weights_only = protect, weights_only
        self.own = own
        """This island's values, if they differ from the consensus."""
        self.folder, self.engine, self.step, self.progress, self.keep = folder, engine, step, progress, keep
        self.rank = world_and_rank()[1]
        self.left = engine.placement.survivors
        """The ranks that save, where some were lost."""
        self.ranks = list(range(world_and_rank()[0])) if self.left is None else list(self.left.ranks)
        self.target = folder_of(folder, step)
        self.partial = self.target.with_name(self.target.name + PARTIAL)
        self.contents = Contents(file=file_of(self.rank))

    def run(self) -> Path:
        tables = reports = self._listed()
        self._leave_out_repeated(tables)
        reach("save: contents listed")
        if not failures_in(reports):
            reports = exchange(attempt(self._write), self.left)
        reach("save: written")
        outcome: dict[str, Any] = {}
        if self.rank == 0:
            if not failures_in(reports):
                outcome = attempt(lambda: self._complete(tables, reports))
            if failures_in([*reports, outcome]):
                attempt(self._abandon)
                outcome["free_bytes"] = free_bytes_at(self.folder)
        outcome = exchange(outcome, self.left)[0]
        failures = failures_in(reports) or failures_in([outcome])
        if failures:
            needed_bytes = sum(table.get("bytes", 0) for table in tables)
            raise self._failed(*failures[0], needed_bytes=needed_bytes, free_bytes=outcome.get("free_bytes"))
        reach("save: done")
        return self.target

    def begin(self, background: Background) -> Path:
        """The part that training waits for: what is written is listed and copied. A thread does the rest."""
        tables = self._listed(sums=False)
        if not failures_in(tables):
            reports = exchange(attempt(lambda: self._copy(background.copies)), self.left)
        failures = failures_in(tables) or failures_in(reports)
        if failures:
            raise self._failed(*failures[0], needed_bytes=0, free_bytes=None)
        background.start(self, tables)
        return self.target

    def _copy(self, copies: Copies) -> dict[str, Any]:
        self.contents.tensors = copies.of(self.contents.tensors)
        return {}

    def write_alone(self, tables: list[dict[str, Any]]) -> None:
        """In a thread: writes this rank's file, and a report that rank 0 waits for. Nothing here is collective."""
        report = attempt(lambda: self._write_summed(tables))
        write_report(self.partial, self.rank, report)

    def _write_summed(self, tables: list[dict[str, Any]]) -> dict[str, Any]:
        sums = of_contents(self.contents, self.engine)
        self._leave_out_repeated(tables)
        return {"table": {"sums": sums, **self.contents.table()}, **self._write()}

    def complete_alone(self, reports: list[dict[str, Any]]) -> dict[str, Any]:
        """On rank 0, in a thread: the end of the save, once all ranks have reported."""
        failures = failures_in(reports)
        remove_reports(self.partial)
        outcome = {}
        if not failures:
            outcome = attempt(lambda: self._complete([report["table"] for report in reports], reports))
        if failures or "error" in outcome:
            attempt(self._abandon)
            rank, error = (failures or failures_in([outcome]))[0]
            return {"rank": rank, "error": error, "free_bytes": free_bytes_at(self.folder)}
        return {}

    def failed_alone(self, outcome: dict[str, Any]) -> CheckpointFailed:
        """What `complete_alone` found, as the error that every rank raises."""
        needed = self.contents.bytes * len(self.ranks)
        return self._failed(
            outcome["rank"], outcome["error"], needed_bytes=needed, free_bytes=outcome.get("free_bytes")
        )

    def _listed(self, *, sums: bool = True) -> list[dict[str, Any]]:
        """What every rank will write, or why it cannot."""
        engine = self.engine
        buffers = averaged_buffers(engine.model, engine.replicas.everyone)

        def listed() -> dict[str, Any]:
            contents = contents_of(
                engine, buffers=buffers, rank=self.rank, own=self.own, weights_only=self.weights_only
            )
            return self._prepare(contents, sums=sums)

        return exchange(attempt(listed), self.left)

    def _prepare(self, contents: Contents, *, sums: bool) -> dict[str, Any]:
        self.contents = contents
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            tidy(self.folder)
            self.partial.mkdir()
        found = of_contents(contents, self.engine) if sums else {}
        return {"bytes": contents.bytes, "sums": found, **contents.table()}

    def _leave_out_repeated(self, tables: list[dict[str, Any]]) -> None:
        """Pipeline stages may hold the same buffer; the first rank that holds it writes it."""
        offered = {key for table in tables[: self.ranks.index(self.rank)] for key in table.get("buffers", {})}
        repeated = {entry["tensor"] for key, entry in self.contents.buffers.items() if key in offered}
        self.contents.tensors = [row for row in self.contents.tensors if row[0] not in repeated]

    def _write(self) -> dict[str, Any]:
        path = self.partial / file_of(self.rank)
        try:
            size, digest = write_tensors(path, self.contents.tensors, about_file(self.step, path.name))
        except OSError:
            # Free the space at once: a full disk affects other processes too.
            path.unlink(missing_ok=True)
            raise
        return {"bytes": size, "sha256": digest}

    def _complete(self, tables: list[dict[str, Any]], written: list[dict[str, Any]]) -> dict[str, Any]:
        """On rank 0: writes the manifest, renames the folder, then removes checkpoints that are no longer kept."""
        files = {file_of(rank): report for rank, report in zip(self.ranks, written, strict=True)}
        for name, report in files.items():
            path = self.partial / name
            if not path.exists() or path.stat().st_size != report["bytes"]:
                raise ValueError(
                    f"{name} was written by its rank, but rank 0 cannot see it; "
                    "the folder must be on a file system that all hosts share"
                )
        manifest: dict[str, Any] = {
            "format": FORMAT if self.weights_only else FULL_FORMAT,
            "step": self.step,
            "progress": to_json(self.progress),
            "world": len(self.ranks),
            "files": files,
        }
        if self.weights_only:
            manifest["weights_only"] = True
        for what in ("parameters", "buffers", "numbers", "extras"):
            manifest[what] = {name: entry for table in reversed(tables) for name, entry in table[what].items()}
        manifest["optimizer"] = {}
        for table in tables:  # Pipeline stages report their own groups; the rest is the same on all.
            for where, entries in table["optimizer"].items():
                manifest["optimizer"].setdefault(where, entries)
        known = manifest["parameters"]
        manifest["parameters"] = {name: known[name] for name in self.engine.shapes}
        manifest["sums"] = combined([table["sums"] for table in tables], manifest["buffers"])
        manifest["pieces"] = [piece for table in tables for piece in table["pieces"]]
        manifest["values"] = digest_of_values(manifest)
        text = json.dumps(manifest, allow_nan=False, indent=1)
        digest = write_bytes(self.partial / MANIFEST, text.encode())
        sums = checksums_text(digest, {name: report["sha256"] for name, report in files.items()})
        write_bytes(self.partial / CHECKSUMS, sums.encode())
        sync_folder(self.partial)
        reach("save: manifest written")
        put_in_place(self.partial, self.target)
        reach("save: in place")
        self._remove_old()
        return {}

    def _remove_old(self) -> None:
        found = checkpoints(self.folder)
        old, kept = [path for step, path in found if step > self.step], 1
        for path in [path for step, path in reversed(found) if step < self.step]:
            if kept >= self.keep and step_of(path) not in self.protect:
                old.append(path)
            # A broken or forged checkpoint does not count among the `keep` newest.
            kept += is_readable(path)
        for path in old:
            try:
                remove(path)
            except OSError as error:
                # The new checkpoint is complete: an old one that remains is no reason to fail.
                warnings.warn(f"the old checkpoint {path} could not be removed: {error}", stacklevel=2)

    def _abandon(self) -> dict[str, Any]:
        tidy(self.folder)
        return {}

    def _failed(
        self, rank: int, error: dict[str, Any], *, needed_bytes: int, free_bytes: int | None
    ) -> CheckpointFailed:
        last_good = latest(self.folder)
        who = f" (rank {rank})" if len(self.ranks) > 1 else ""
        space = ""
        if error["errno"] is not None and needed_bytes:
            free = f"; {size_text(free_bytes)} are free there" if free_bytes is not None else ""
            space = f"It needs {size_text(needed_bytes)}{free}. "
        kept = f"The last good checkpoint is {last_good}" if last_good else "There is no earlier checkpoint"
        return CheckpointFailed(
            f"the checkpoint of step {self.step} could not be written to {self.folder}{who}: "
            f"{error['text']}. {space}{kept}.",
            errno=error["errno"],
            last_good=last_good,
        )

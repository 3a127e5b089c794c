"""Writes checkpoints: all ranks together, atomically, without touching the previous one.

Every element of every parameter and of its optimiser state is written by one rank, whatever the strategy, as
a range of a named tensor; so any strategy can read it back (restore.py). A checkpoint is written under a temporary
name, and renamed once every rank has flushed its part to disk. It consists of safetensors and JSON, without pickle.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.buffers import average_buffers, averaged_buffers, persistent_buffers
from shoal.checkpoint.checksum import combined, of_contents
from shoal.checkpoint.contents import Contents, contents_of
from shoal.checkpoint.files import (
    CHECKSUMS,
    COMPLEX,
    DTYPES,
    FORMAT,
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
    "Checkpoint", "CheckpointBroken", "CheckpointFailed", "CheckpointMismatch",
    "average_buffers", "find_intact", "latest", "open_checkpoint", "require_savable", "restore", "save",
]  # fmt: skip


class CheckpointFailed(ValueError):
    """A checkpoint could not be written; earlier ones are unchanged."""

    def __init__(self, message: str, *, errno: int | None, last_good: Path | None) -> None:
        super().__init__(message)
        self.errno = errno
        """The error number, if the operating system reported the error."""
        self.last_good = last_good


def save(folder: Path, engine: Engine, *, step: int, progress: dict[str, Any], keep: int = 2) -> Path:
    """Writes the engine's state after `step` steps and returns the checkpoint's path. Collective; nothing may be in
    flight (`Executor.settle`).

    The newest `keep` checkpoints are kept. Those of later steps are removed: the run was resumed from an earlier
    step. If any rank fails, every rank raises CheckpointFailed and nothing of the attempt remains.
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
        engine.owner.gather_state()
        return _Save(Path(folder), engine, step, progress, keep, own).run()


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
        self, folder: Path, engine: Engine, step: int, progress: dict[str, Any], keep: int, own: list[torch.Tensor]
    ) -> None:
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
        engine = self.engine
        buffers = averaged_buffers(engine.model, engine.replicas.everyone)
        tables = reports = exchange(
            _attempt(lambda: self._prepare(contents_of(engine, buffers=buffers, rank=self.rank, own=self.own))),
            self.left,
        )
        self._leave_out_repeated(tables)
        reach("save: contents listed")
        if not _failures(reports):
            reports = exchange(_attempt(self._write), self.left)
        reach("save: written")
        outcome: dict[str, Any] = {}
        if self.rank == 0:
            if not _failures(reports):
                outcome = _attempt(lambda: self._complete(tables, reports))
            if _failures([*reports, outcome]):
                _attempt(self._abandon)
                outcome["free_bytes"] = _free_bytes(self.folder)
        outcome = exchange(outcome, self.left)[0]
        failures = _failures(reports) or _failures([outcome])
        if failures:
            needed_bytes = sum(table.get("bytes", 0) for table in tables)
            raise self._failed(*failures[0], needed_bytes=needed_bytes, free_bytes=outcome.get("free_bytes"))
        reach("save: done")
        return self.target

    def _prepare(self, contents: Contents) -> dict[str, Any]:
        self.contents = contents
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            tidy(self.folder)
            self.partial.mkdir()
        return {"bytes": contents.bytes, "sums": of_contents(contents, self.engine), **contents.table()}

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
            "format": FORMAT,
            "step": self.step,
            "progress": to_json(self.progress),
            "world": len(self.ranks),
            "files": files,
        }
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
            if kept >= self.keep:
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
            free = f"; {_size(free_bytes)} are free there" if free_bytes is not None else ""
            space = f"It needs {_size(needed_bytes)}{free}. "
        kept = f"The last good checkpoint is {last_good}" if last_good else "There is no earlier checkpoint"
        return CheckpointFailed(
            f"the checkpoint of step {self.step} could not be written to {self.folder}{who}: "
            f"{error['text']}. {space}{kept}.",
            errno=error["errno"],
            last_good=last_good,
        )


def _attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of the work, or its error: the other ranks wait for either."""
    try:
        return work()
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return {"error": {"text": f"{error.strerror or error}{where}", "errno": error.errno}}
    except Exception as error:
        return {"error": {"text": str(error) or repr(error), "errno": None}}


def _failures(reports: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    return [(rank, report["error"]) for rank, report in enumerate(reports) if "error" in report]


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _size(number: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return f"{number} bytes"

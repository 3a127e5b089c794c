"""Writing checkpoints: all ranks together, all or nothing, and never in the way of the one before.

Every element of every parameter and of its optimiser state is written by exactly one rank, whatever the strategy, as a
range of a named tensor; so any strategy can read it back (restore.py). A checkpoint is written under a name that does
not count and renamed once every rank has flushed its part to the disk. There is no pickle in it: safetensors and JSON.
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal.comm.group import BOOK
from shoal.comm.mesh import Members
from shoal.parallel.engine import Engine
from shoal.parallel.optimizer import Numbers, Piece
from shoal.train.checkpoint_files import (
    CHECKSUMS,
    FORMAT,
    MANIFEST,
    PARTIAL,
    checkpoints,
    dtype_name,
    file_of,
    folder_of,
    put_in_place,
    remove,
    sync_folder,
    tidy,
    write_bytes,
    write_tensors,
)
from shoal.train.exchange import exchange, world_and_rank
from shoal.train.restore import (
    Checkpoint,
    CheckpointBroken,
    CheckpointMismatch,
    find_intact,
    latest,
    open_checkpoint,
    persistent_buffers,
    restore,
)

__all__ = [
    "Checkpoint", "CheckpointBroken", "CheckpointFailed", "CheckpointMismatch",
    "average_buffers", "find_intact", "latest", "open_checkpoint", "restore", "save",
]  # fmt: skip


class CheckpointFailed(ValueError):
    """A checkpoint could not be written; those before it are as they were."""

    def __init__(self, message: str, *, errno: int | None, last_good: Path | None) -> None:
        super().__init__(message)
        self.errno = errno
        """The operating system's error number, where it was its error."""
        self.last_good = last_good


def save(folder: Path, engine: Engine, *, step: int, progress: dict[str, Any], keep: int = 2) -> Path:
    """Writes the engine's state after `step` steps and gives the checkpoint's path. All ranks call it alike.

    The newest `keep` checkpoints stay. Those of later steps go: a run that went back to an earlier step left them behind.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}, but at least 1 checkpoint must be kept")
    if step < 0:
        raise ValueError(f"step is {step}, but steps are counted from 0")
    try:
        progress = json.loads(json.dumps(progress, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the progress to save must be plain JSON (text, finite numbers, lists, dicts): {error}"
        ) from error
    folder = Path(folder)
    with BOOK.during("checkpoint"):
        return _Save(folder, engine, step, progress, keep).run()


class _Save:
    """One save, as one rank sees it. Ranks meet three times: before writing, after it, and when all is in place."""

    def __init__(self, folder: Path, engine: Engine, step: int, progress: dict[str, Any], keep: int) -> None:
        self.folder, self.engine, self.step, self.progress, self.keep = folder, engine, step, progress, keep
        self.world, self.rank = world_and_rank()
        self.target = folder_of(folder, step)
        self.partial = self.target.with_name(self.target.name + PARTIAL)
        self.tensors: list[tuple[str, torch.Tensor]] = []

    def run(self) -> Path:
        buffers = _averages(self.engine.model, self.engine.replicas.everyone)
        reports = exchange(_attempt(lambda: self._prepare(buffers)))
        needed_bytes = sum(report.get("needed_bytes", 0) for report in reports)
        if not _failures(reports):
            contents = reports
            reports = exchange(_attempt(self._write))
        outcome: dict[str, Any] = {}
        if self.rank == 0:
            if not _failures(reports):
                outcome = _attempt(lambda: self._complete(contents, reports))
            if _failures([*reports, outcome]):
                _attempt(lambda: tidy(self.folder) or {})
                outcome["free_bytes"] = _free_bytes(self.folder)
        self.tensors = []
        outcome = exchange(outcome)[0]
        failures = _failures([*reports, outcome])
        if failures:
            raise self._failed(*failures[0], needed_bytes=needed_bytes, free_bytes=outcome.get("free_bytes"))
        return self.target

    def _prepare(self, buffers: dict[str, torch.Tensor]) -> dict[str, Any]:
        """What this rank will write. Rank 0 also makes the folder, and writes what is whole on every rank."""
        engine = self.engine
        pieces, parameters = [], {}
        for piece in engine.owned_parameters():
            pieces.append(self._add(piece, None))
            parameters[piece.name] = {"shape": list(piece.shape), "dtype": dtype_name(piece.values.dtype)}
        numbers, states = _optimizer_state(engine)
        pieces += [self._add(piece, key) for key, piece in states]
        # Whoever writes a parameter's first element also reports its numbers, so that they are reported once.
        first = {piece["parameter"] for piece in pieces if piece["state"] is None and piece["start"] == 0}
        report: dict[str, Any] = {
            "pieces": pieces,
            "parameters": parameters,
            "numbers": {name: _as_json(entry) for name, entry in numbers.items() if name in first},
            "buffers": {},
        }
        if self.rank == 0:
            trained = {slot.name for bucket in engine.buckets for slot in bucket.buffer.slots}
            for bucket in engine.buckets:
                for slot in bucket.buffer.slots:
                    entry = {"shape": list(slot.shape), "dtype": dtype_name(bucket.buffer.dtype)}
                    parameters.setdefault(slot.name, entry)
            for name, param in engine.model.named_parameters():
                if name not in trained:
                    pieces.append(
                        self._add(Piece(name, tuple(param.shape), 0, param.detach().reshape(-1)), None)
                    )
                    parameters[name] = {"shape": list(param.shape), "dtype": dtype_name(param.dtype)}
            for name, values in buffers.items():
                key = f"buffer {name}"
                self.tensors.append((key, values))
                entry = {"shape": list(values.shape), "dtype": dtype_name(values.dtype)}
                report["buffers"][name] = {"file": file_of(0), "tensor": key, **entry}
            self.folder.mkdir(parents=True, exist_ok=True)
            tidy(self.folder)
            self.partial.mkdir()
        report["needed_bytes"] = sum(tensor.numel() * tensor.element_size() for _, tensor in self.tensors)
        return report

    def _add(self, piece: Piece, state: str | None) -> dict[str, Any]:
        """Takes a piece up for writing; gives its row in the manifest's table."""
        stop = piece.start + piece.values.numel()
        key = f"{piece.name} {state or 'value'} [{piece.start}:{stop}]"
        if stop > piece.start:
            self.tensors.append((key, piece.values))
        return {
            "file": file_of(self.rank), "tensor": key, "parameter": piece.name, "state": state,
            "start": piece.start, "stop": stop,
        }  # fmt: skip

    def _write(self) -> dict[str, Any]:
        path = self.partial / file_of(self.rank)
        try:
            size, digest = write_tensors(path, self.tensors)
        except OSError:
            # Gives back the space at once; a full disk is often full for others too.
            path.unlink(missing_ok=True)
            raise
        return {"bytes": size, "sha256": digest}

    def _complete(self, contents: list[dict[str, Any]], written: list[dict[str, Any]]) -> dict[str, Any]:
        """Rank 0: the manifest, the name, and then the end of checkpoints that are no longer kept."""
        files = {file_of(rank): report for rank, report in enumerate(written)}
        for name, report in files.items():
            path = self.partial / name
            if not path.exists() or path.stat().st_size != report["bytes"]:
                raise OSError(f"{name} was written on another host and rank 0 does not see it: the folder must be on a "
                              "file system that all hosts share")  # fmt: skip
        manifest = {
            "format": FORMAT,
            "step": self.step,
            "progress": self.progress,
            "world": self.world,
            "parameters": _merged(contents, "parameters"),
            "buffers": _merged(contents, "buffers"),
            "numbers": _merged(contents, "numbers"),
            "files": files,
            "pieces": [
                piece for report in contents for piece in report["pieces"] if piece["start"] < piece["stop"]
            ],
        }
        digest = write_bytes(
            self.partial / MANIFEST, json.dumps(manifest, allow_nan=False, indent=1).encode()
        )
        sums = [(digest, MANIFEST), *((report["sha256"], name) for name, report in files.items())]
        write_bytes(
            self.partial / CHECKSUMS, "".join(f"{sha256}  {name}\n" for sha256, name in sums).encode()
        )
        sync_folder(self.partial)
        put_in_place(self.partial, self.target)
        others = [(step, path) for step, path in checkpoints(self.folder) if step != self.step]
        earlier = [path for step, path in others if step < self.step]
        for path in [path for step, path in others if step > self.step] + earlier[
            : max(0, len(earlier) - self.keep + 1)
        ]:
            try:
                remove(path)
            except OSError as error:
                warnings.warn(f"the old checkpoint {path} could not be removed: {error}", stacklevel=2)
        return {}

    def _failed(
        self, rank: int, error: dict[str, Any], *, needed_bytes: int, free_bytes: int | None
    ) -> CheckpointFailed:
        last_good = latest(self.folder)
        who = f" (rank {rank})" if self.world > 1 else ""
        needs = f"It needs {_size(needed_bytes)}" if needed_bytes else "It was not begun"
        has = f"; {_size(free_bytes)} are free there" if free_bytes is not None else ""
        kept = f"The last good checkpoint is {last_good}" if last_good else "There is no earlier checkpoint"
        return CheckpointFailed(
            f"the checkpoint of step {self.step} could not be written to {self.folder}: {error['text']}{who}. "
            f"{needs}{has}. {kept}.",
            errno=error["errno"],
            last_good=last_good,
        )


def _attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the work reports, or what went wrong: the other ranks wait for one or the other."""
    try:
        return work()
    except Exception as error:
        code = error.errno if isinstance(error, OSError) else None
        text = (error.strerror or str(error)) if isinstance(error, OSError) else str(error) or repr(error)
        if isinstance(error, OSError) and error.filename:
            text = f"{text}: {error.filename}"
        return {"error": {"text": text, "errno": code}}


def _failures(reports: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    return [(rank, report["error"]) for rank, report in enumerate(reports) if "error" in report]


def _merged(reports: list[dict[str, Any]], what: str) -> dict[str, Any]:
    return {name: entry for report in reports for name, entry in report[what].items()}


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


def _as_json(numbers: Numbers) -> dict[str, list[Any]]:
    return {
        key: [value if math.isfinite(value) else str(value), kind] for key, (value, kind) in numbers.items()
    }


def _optimizer_state(engine: Engine) -> tuple[dict[str, Numbers], list[tuple[str, Piece]]]:
    """The optimiser's numbers and this rank's pieces of its element-wise state."""
    if engine.optimizer is not None:
        _refuse_unknown_state(engine.optimizer.optimizer)
        return engine.optimizer.numbers(), list(engine.owned_state())
    # Between a restore and the first step the optimiser is not made yet; what was restored must not get lost.
    saved = engine._saved
    if saved is None:
        return {}, []
    numbers: dict[str, Numbers] = {}
    states = []
    for piece in engine.owned_parameters():
        stop = piece.start + piece.values.numel()
        if isinstance(saved, Checkpoint) and not saved.trained(piece.name):
            continue
        numbers[piece.name] = saved.numbers(piece.name)
        for key in saved.keys(piece.name):
            states.append(
                (
                    key,
                    Piece(
                        piece.name, piece.shape, piece.start, saved.read(piece.name, key, piece.start, stop)
                    ),
                )
            )
    return numbers, states


def _refuse_unknown_state(optimizer: torch.optim.Optimizer) -> None:
    """State that is neither a number nor of its parameter's shape has no place in a checkpoint yet: better said than lost."""
    for param, state in optimizer.state.items():
        for key, value in state.items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            tensor = isinstance(value, torch.Tensor) and (value.dim() == 0 or value.numel() == param.numel())
            if not number and not tensor and value is not None:
                what = (
                    f"a tensor of shape {list(value.shape)}"
                    if isinstance(value, torch.Tensor)
                    else f"a {type(value).__name__}"
                )
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {key!r} of a parameter of shape {list(param.shape)} as {what}; "
                    "a checkpoint holds numbers and tensors of the parameter's own shape"
                )


def average_buffers(model: nn.Module, members: Members) -> None:
    """The floating-point buffers of all members become their mean, in place: batch norm's running statistics, say."""
    buffers = persistent_buffers(model)
    with torch.no_grad():
        for name, mean in _averages(model, members).items():
            buffers[name].copy_(mean)


def _averages(model: nn.Module, members: Members) -> dict[str, torch.Tensor]:
    """The model's buffers, floating-point ones as the mean over all members. The model's own stay as they are."""
    buffers = {name: buffer.detach() for name, buffer in persistent_buffers(model).items()}
    floating = {
        name: buffer for name, buffer in buffers.items() if buffer.is_floating_point() and buffer.numel()
    }
    if members.group is None or not floating:
        return buffers
    mine = torch.cat([buffer.reshape(-1).double() for buffer in floating.values()])
    # The mean as the first member's value and the mean difference from it: where all are equal, as under synchronised
    # batch norm, it is then that value to the bit, for any number of members.
    first = mine.clone()
    dist.broadcast(first, src=members.ranks[0], group=members.group)
    difference = torch.where(mine == first, 0.0, mine - first)
    dist.all_reduce(difference, group=members.group)
    means = first + difference / members.size
    for (name, buffer), mean in zip(
        floating.items(), means.split([b.numel() for b in floating.values()]), strict=True
    ):
        buffers[name] = mean.to(buffer.dtype).view(buffer.shape)
    return buffers

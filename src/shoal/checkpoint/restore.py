"""Restores a checkpoint: all ranks together find the newest intact one and load it into the engine.

A rank reads only the ranges that its strategy assigns to it, whichever strategy wrote them; the result is the same to
the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.buffers import persistent_buffers
from shoal.checkpoint.checksum import compare
from shoal.checkpoint.contents import extra_name
from shoal.checkpoint.files import checkpoints, dtype_name, tidy
from shoal.checkpoint.islands import load_island
from shoal.checkpoint.opening import from_manifest
from shoal.checkpoint.rows import CheckpointBroken
from shoal.checkpoint.saved import Checkpoint
from shoal.comm.json_exchange import exchange, world_and_rank
from shoal.comm.ledger import BOOK
from shoal.comm.points import reach
from shoal.layout.cuts import TensorPart
from shoal.parallel.average import AVERAGE
from shoal.parallel.engine import Engine
from shoal.parallel.kept_errors import load as load_errors


class CheckpointMismatch(ValueError):
    """An intact checkpoint of another model."""


def find_intact(folder: Path, warn: Callable[[str], None], *, clean: bool = True) -> Checkpoint | None:
    """The newest intact checkpoint, the same on every rank; broken ones that are skipped are reported to `warn`.

    Collective; the ranks share the work of verifying. `clean` also removes what crashed saves left behind; pass
    `clean=False` to read the folder of another run, which may be saving.
    """
    folder = Path(folder)
    world, rank = world_and_rank()
    if rank == 0 and clean:
        tidy(folder)
    with BOOK.during("checkpoint"):
        # Rank 0's view counts: a shared file system may show it to others a moment later.
        names = exchange({"names": [path.name for _, path in checkpoints(folder)] if rank == 0 else []})[0]["names"]
        for name in reversed(names):
            checkpoint, trouble = None, None
            try:
                checkpoint = from_manifest(folder / name)
                for file in sorted(checkpoint.files)[rank::world]:
                    checkpoint.verify_file(file)
            except CheckpointBroken as error:
                trouble = str(error)
            troubles = [report["trouble"] for report in exchange({"trouble": trouble}) if report["trouble"]]
            if checkpoint is not None and not troubles:
                return checkpoint
            warn(f"checkpoint {folder / name} is passed over: {troubles[0]}")
    return None


def restore(engine: Engine, checkpoint: Checkpoint, *, weights_only: bool = False) -> None:
    """Parameters, buffers and, unless `weights_only`, optimiser state become the checkpoint's. All ranks call it alike.

    Refuses before it changes anything when the checkpoint is of another model.
    """
    reach("restore: begun")
    if not weights_only:
        require_full(checkpoint)
    slots = {slot.name for bucket in engine.buckets for slot in bucket.buffer.slots}
    saved_shapes = {name: (whole.shape, whole.dtype) for name, whole in checkpoint.parameters.items()}
    _require_same("parameters", checkpoint, saved_shapes, engine.shapes)
    buffers = persistent_buffers(engine.model)
    _require_same("buffers", checkpoint, checkpoint.buffer_shapes(), _buffer_shapes(engine, buffers))
    saved = OwnView(checkpoint, engine)
    with BOOK.during("checkpoint"), torch.no_grad():
        for name, param in engine.model.named_parameters():
            if name not in slots and name not in engine.absent:
                param.copy_(saved.read_parameter(name, 0, param.numel()).view(param.shape))
        for name, values in checkpoint.buffers().items():
            if name in buffers and name not in engine.absent:
                part = engine.part_of(name)
                buffers[name].copy_(values if part is None else part.of(values))
        reach("restore: buffers read")
        engine.owner.load_parameters(saved.read_parameter)
        if weights_only:
            weights = ("buffer ",) if checkpoint.averaged else ("parameter ", "buffer ")
            held = {name: value for name, value in checkpoint.sums.items() if name.startswith(weights)}
            compare(engine, held, checkpoint.shapes_by_sum(), str(checkpoint.path))
            return
        if engine.average is not None:  # Of a run without one, it begins with the weights.
            key = AVERAGE if checkpoint.has_average else None
            engine.average.load(lambda name, start, stop: saved.read_range(name, key, start, stop))
        engine.owner.load(saved)
        for compression in engine.compressions:
            load_errors(compression, saved, step=checkpoint.step)
        reach("restore: optimizer read")
        compare(engine, checkpoint.sums, checkpoint.shapes_by_sum(), str(checkpoint.path))
        load_island(engine, saved)
        engine.owner.resume(checkpoint.step, saved)
        engine.clock = checkpoint.step


def require_full(checkpoint: Checkpoint) -> None:
    """Refuses to train on what holds no optimiser state."""
    if checkpoint.weights_only:
        raise CheckpointMismatch(
            f"{checkpoint.path} holds weights only (--weights-only): training cannot go on from it, since the "
            "optimiser would begin anew. Export or evaluate it, or resume a run whose checkpoints are complete"
        )


class OwnView:
    """A checkpoint as one rank reads it: for split tensors, ranges of the rank's own part."""

    def __init__(self, checkpoint: Checkpoint, engine: Engine) -> None:
        self.checkpoint, self.engine = checkpoint, engine
        self._part: tuple[tuple[str, str | None], torch.Tensor] | None = None

    def keys(self, name: str) -> list[str]:
        return self.checkpoint.keys(name)

    def values(self, name: str) -> dict[str, Any]:
        return self.checkpoint.values(name)

    def common(self) -> dict[str, dict[str, Any]]:
        return self.checkpoint.common()

    def errors(self, name: str, what: str) -> list[str]:
        return self.checkpoint.errors(name, what)

    def keys_of(self, name: str, prefix: str) -> list[str]:
        return self.checkpoint.keys_of(name, prefix)

    def extra(self, name: str, key: str, part: TensorPart | None = None) -> torch.Tensor | None:
        return self.checkpoint.extra(extra_name(name, key, part or self.engine.part_of(name)))

    def read(self, name: str, key: str, start: int, stop: int) -> torch.Tensor:
        return self._read(name, key, start, stop)

    def read_full(self, name: str, key: str, start: int, stop: int) -> torch.Tensor:
        return self._range(name, key, start, stop)

    def read_parameter(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._read(name, None, start, stop)

    def read_range(self, name: str, key: str | None, start: int, stop: int) -> torch.Tensor:
        return self._read(name, key, start, stop)

    def _read(self, name: str, key: str | None, start: int, stop: int) -> torch.Tensor:
        part = self.engine.part_of(name)
        if part is None:
            return self._range(name, key, start, stop)
        if self._part is None or self._part[0] != (name, key):
            shape = self.checkpoint.parameters[name].shape
            whole = self._range(name, key, 0, prod(shape)).view(shape)
            self._part = ((name, key), part.of(whole).reshape(-1))
        return self._part[1][start:stop]

    def _range(self, name: str, key: str | None, start: int, stop: int) -> torch.Tensor:
        if key is None:
            return self.checkpoint.read_parameter(name, start, stop)
        return self.checkpoint.read(name, key, start, stop)


def _buffer_shapes(engine: Engine, buffers: dict[str, torch.Tensor]) -> Shapes:
    shapes = {}
    for name, buffer in buffers.items():
        part = engine.part_of(name)
        shape = tuple(buffer.shape)
        shapes[name] = (shape if part is None else part.whole_shape(shape), buffer.dtype)
    return shapes


Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def _require_same(what: str, checkpoint: Checkpoint, saved: Shapes, model: Mapping[str, Any]) -> None:
    start = f"{checkpoint.path} is of another model: "
    if saved.keys() != model.keys():
        only_model = [name for name in model if name not in saved]
        only_saved = [name for name in saved if name not in model]
        parts = [f"the checkpoint has {len(saved)} {what}, the model {len(model)}"]
        parts += [f"missing in the checkpoint: {_some(only_model)}"] if only_model else []
        parts += [f"unknown to the model: {_some(only_saved)}"] if only_saved else []
        raise CheckpointMismatch(start + "; ".join(parts))
    different = [
        f"{name} is {dtype_name(saved[name][1])}{list(saved[name][0])} there, "
        f"{dtype_name(model[name][1])}{list(model[name][0])} in the model"
        for name in model
        if saved[name] != model[name]
    ]
    if different:
        raise CheckpointMismatch(start + _some(different, "; "))


def _some(names: Iterable[str], between: str = ", ") -> str:
    names = list(names)
    return between.join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

"""What one rank writes into a checkpoint: its ranges of parameters and optimiser state, and a table of them.

Every element is written by exactly one rank; replicated tensors (buffers, frozen parameters) by the first rank that
holds them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from shoal.checkpoint.files import dtype_name, file_of
from shoal.checkpoint.islands import add_island
from shoal.checkpoint.values import encode
from shoal.layout.cuts import TensorPart
from shoal.parallel.average import AVERAGE
from shoal.parallel.engine import Engine
from shoal.parallel.flat_slice import Piece
from shoal.parallel.kept_errors import errors, extras


@dataclass(kw_only=True)
class Contents:
    """One rank's part: the tensors for its file, and the rows of the manifest that describe them."""

    file: str
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    pieces: list[dict[str, Any]] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)
    """Tensors that belong to a parameter and are not of its size."""
    optimizer: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Optimiser state that belongs to several parameters together."""

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.tensors)

    def table(self) -> dict[str, Any]:
        return {
            "parameters": self.parameters,
            "buffers": self.buffers,
            "numbers": self.numbers,
            "pieces": self.pieces,
            "extras": self.extras,
            "optimizer": self.optimizer,
        }

    def add_parameter(self, piece: Piece, dtype: torch.dtype, part: TensorPart | None = None) -> None:
        shape = piece.shape if part is None else part.whole_shape(piece.shape)
        self.parameters[piece.name] = {"shape": list(shape), "dtype": dtype_name(dtype)}
        self._add(piece, None, part)

    def add_state(self, key: str, piece: Piece, part: TensorPart | None = None) -> None:
        self._add(piece, key, part)

    def add_extra(self, name: str, key: str, values: torch.Tensor, part: TensorPart | None = None) -> None:
        full = extra_name(name, key, part)
        self.extras[full] = {"file": self.file, "tensor": full} | ({"complex": True} if values.is_complex() else {})
        self.tensors.append((full, values))

    def encoded(self, owner: str, key: str, value: Any) -> list[Any]:
        """A value other than a range of a parameter, encoded for the manifest; its tensors go into the file."""
        number = count()

        def put(tensor: torch.Tensor) -> str:
            label = f"state {key} {next(number)} in {self.file}"  # Several ranks may write the same.
            self.add_extra(owner, label, tensor)
            return extra_name(owner, label, None)

        try:
            return encode(value, put)
        except ValueError as error:
            raise ValueError(f"{key!r} of {owner} cannot be saved: {error}") from error

    def add_buffer(self, name: str, values: torch.Tensor, part: TensorPart | None = None) -> None:
        key = f"buffer {name}"
        if part is not None:
            shape = part.whole_shape(tuple(values.shape))
            self.buffers[f"{name} part {part.index}"] = {
                "buffer": name,
                "shape": list(shape),
                "dtype": dtype_name(values.dtype),
                "file": self.file,
                "tensor": key,
                "part": part.to_json(),
            }
            self.tensors.append((key, values))
            return
        entry = {
            "shape": list(values.shape),
            "dtype": dtype_name(values.dtype),
            "file": self.file,
            "tensor": key,
        }
        self.buffers[name] = entry
        self.tensors.append((key, values))

    def _add(self, piece: Piece, state: str | None, part: TensorPart | None = None) -> None:
        start, stop = piece.start, piece.start + piece.values.numel()
        if start == stop:
            return
        key = f"{piece.name} {state} [{start}:{stop}]" if state is not None else f"{piece.name} [{start}:{stop}]"
        self.tensors.append((key, piece.values))
        row = {
            "file": self.file,
            "tensor": key,
            "parameter": piece.name,
            "state": state,
            "start": start,
            "stop": stop,
        }
        if state is not None and piece.values.is_complex():
            row["complex"] = True
        if part is not None:
            row["part"] = part.to_json()
        self.pieces.append(row)


def extra_name(name: str, key: str, part: TensorPart | None) -> str:
    return f"{name} {key}" if part is None else f"{name} {key} part {part.index}"


def contents_of(
    engine: Engine,
    *,
    buffers: dict[str, torch.Tensor],
    rank: int,
    own: list[torch.Tensor] | None = None,
    weights_only: bool = False,
) -> Contents:
    """What this rank writes of the engine's state. `buffers`: the model's buffers as they are saved; `own`: this
    island's values, if they differ from the consensus; `weights_only`: nothing of the optimiser's."""
    contents = Contents(file=file_of(rank))
    for piece in engine.owner.parameters():
        contents.add_parameter(piece, piece.values.dtype, engine.part_of(piece.name))
    if engine.average is not None:
        for piece in engine.average.pieces(engine.owner.owned):
            contents.add_state(AVERAGE, piece, engine.part_of(piece.name))
    if not weights_only:
        _add_state(contents, engine)
    _add_unsharded(contents, engine, buffers)
    if not weights_only:
        add_island(contents, engine, own or [])
    return contents


def _add_state(contents: Contents, engine: Engine) -> None:
    """The optimiser's state, and what compression has kept."""
    for key, piece in engine.owner.state():
        contents.add_state(key, piece, engine.part_of_piece(piece))
    for compression in engine.compressions:
        families = {slot.name: bucket.family for bucket in engine.buckets for slot in bucket.buffer.slots}
        for key, piece in errors(compression):
            if engine.placement.writes(families[piece.name]):
                contents.add_state(key, piece, engine.part_of(piece.name))
        for name, key, values in extras(compression):
            if engine.placement.writes(families[name]):
                contents.add_extra(name, key, values, engine.part_of(name))
    contents.numbers = {
        name: {key: contents.encoded(name, key, value) for key, value in values.items()}
        for name, values in engine.optimizer.values(engine.owner.owned).items()
    }
    place = engine.placement
    # What ranks keep for several parameters is the same on all of them; not all have all groups of full parameters.
    first = place.split.index == 0 and place.first_of_sample and place.tensor.index == 0
    if first or (engine.owner.full is not None and place.islands.index == 0):
        optimizer = type(engine.optimizer.optimizer).__name__
        contents.optimizer = {
            where: {key: contents.encoded(f"{optimizer} ({where})", key, value) for key, value in entries.items()}
            for where, entries in engine.optimizer.common().items()
        }


def _add_unsharded(contents: Contents, engine: Engine, buffers: dict[str, torch.Tensor]) -> None:
    """Empty and frozen parameters, and buffers."""
    nothing = torch.empty(0)
    slots = {slot.name: slot for bucket in engine.buckets for slot in bucket.buffer.slots}
    for name, slot in slots.items():
        if not slot.shape.numel() and engine.speaks_for(name):
            contents.add_parameter(Piece(name, tuple(slot.shape), 0, nothing), slot.param.dtype)
    for name, param in engine.model.named_parameters():
        if name not in slots and name not in engine.absent and engine.speaks_for(name):
            values = param.detach().reshape(-1)
            contents.add_parameter(Piece(name, tuple(param.shape), 0, values), param.dtype, engine.part_of(name))
            contents.parameters[name]["frozen"] = True
    for name, values in buffers.items():
        if name not in engine.absent and engine.speaks_for(name):
            contents.add_buffer(name, values, engine.part_of(name))

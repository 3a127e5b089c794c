"""Buffers that replicas update from their own samples, brought together after each step as the job declares.

    average    old + sum(w_r * change_r) / sum(w_r), w_r the samples of replica r: exact for what is linear in means
    sum        old + sum(change_r): exact for counts and sums over samples
    broadcast  the first replica's

All of it travels in one all-reduce and one broadcast, in float64. A model without such buffers has none of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Members
from shoal.job.buffers import BufferMode
from shoal.parallel.placement import Placement

NUMBER_BYTES = 8


@dataclass
class BufferExchange:
    """This rank's part: `begin` before the first forward of a step, `finish` after its update."""

    model: nn.Module
    members: Members
    """Ranks that hold the same part of the model and see different samples or positions."""
    averaged: dict[str, bool]
    """Buffer that is summed -> whether its changes are averaged."""
    copies: tuple[str, ...]
    """Buffers that are broadcast."""
    weight: float = 1.0
    _before: list[torch.Tensor] = field(default_factory=list)

    @property
    def summed(self) -> list[tuple[torch.Tensor, bool]]:
        """The buffers as they are now: a forward may have put another tensor in a buffer's place."""
        return [(self.model.get_buffer(name), averaged) for name, averaged in self.averaged.items()]

    @property
    def copied(self) -> list[torch.Tensor]:
        return [self.model.get_buffer(name) for name in self.copies]

    def begin(self, samples: float) -> None:
        """Notes what the buffers hold, and how many samples this rank will see in the step."""
        self.weight = samples
        self._before = [buffer.detach().clone() for buffer, _ in self.summed]

    def finish(self) -> None:
        """Brings the buffers together. Collective."""
        if self.members.group is None or (not self._before and self.averaged):
            return
        with BOOK.during("optimizer"), torch.no_grad():
            if self.averaged:
                self._sum()
            if self.copies:
                self._copy()

    def _sum(self) -> None:
        rows, summed = [], self.summed
        for (buffer, averaged), before in zip(summed, self._before, strict=True):
            new, old = _numbers(buffer), _numbers(before)
            change = torch.where(new == old, 0.0, new - old)  # Infinities of a mask have no difference.
            rows.append(change * (self.weight if averaged else float(self.weight > 0)))
        flat = torch.cat([*rows, rows[0].new_tensor([self.weight])])
        dist.all_reduce(flat, group=self.members.group)
        total = flat[-1].clamp(min=1e-300)
        at = 0
        for (buffer, averaged), before, row in zip(summed, self._before, rows, strict=True):
            change = flat[at : at + len(row)]
            at += len(row)
            _set(buffer, _numbers(before) + (change / total if averaged else change))
        self._before = []

    def _copy(self) -> None:
        copied = self.copied
        flat = torch.cat([_numbers(buffer) for buffer in copied])
        dist.broadcast(flat, src=self.members.ranks[0], group=self.members.group)
        at = 0
        for buffer in copied:
            size = len(_numbers(buffer))
            _set(buffer, flat[at : at + size])
            at += size

    def calls(self) -> Iterator[tuple[str, str, str, int, int]]:
        """What a step sends: (axis, phase, kind, payload bytes, ranks)."""
        axis, ranks = self.members.axis, self.members.size
        if self.averaged:
            numbers = 1 + sum(_num(buffer) for buffer, _ in self.summed)
            yield axis, "optimizer", "all_reduce", numbers * NUMBER_BYTES, ranks
        if self.copies:
            numbers = sum(_num(buffer) for buffer in self.copied)
            yield axis, "optimizer", "broadcast", numbers * NUMBER_BYTES, ranks


def buffer_exchange(
    model: nn.Module, placement: Placement, modes: Mapping[str, BufferMode], absent: set[str]
) -> BufferExchange | None:
    """What there is to bring together on this rank; None if the job declares nothing. All ranks call it alike."""
    if not modes:
        return None
    names = {axis for axis, _ in placement.mesh.axes if axis in placement.samples.axis.split("+")}
    names |= {*placement.levels, placement.context.axis, placement.planes.axis} - {"none"}
    parted = placement.context.size * placement.planes.size > 1
    members = placement.mesh.along(*names) if parted else placement.samples
    held = [name for name, b in model.named_buffers() if name in modes and name not in absent and b.numel()]
    averaged = {name: modes[name] == "average" for name in held if modes[name] in ("average", "sum")}
    copies = tuple(name for name in held if modes[name] == "broadcast")
    return BufferExchange(model, members, averaged, copies) if averaged or copies else None


def _numbers(values: torch.Tensor) -> torch.Tensor:
    """Laid out flat, in float64; a complex number is two."""
    return (torch.view_as_real(values) if values.is_complex() else values).reshape(-1).double()


def _num(values: torch.Tensor) -> int:
    return values.numel() * (2 if values.is_complex() else 1)


def _set(buffer: torch.Tensor, numbers: torch.Tensor) -> None:
    target = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    target.copy_(numbers.view(target.shape).to(buffer.device))

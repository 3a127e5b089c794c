"""What a strategy offloads, and where to. Where there is nothing to gain it is refused, with the figure."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shoal.job.kept import state_of
from shoal.parallel.flat import StoredShard
from shoal.parallel.offload.level import DiskLevel, HostLevel, MemoryLevel
from shoal.parallel.offload.state import BUFFERS, LEAST, OffloadedState
from shoal.parallel.runnable import NotRunnable
from shoal.strategy import Strategy, offload

PARTS = 64
"""A step moves the state in at least so many parts: the buffers that they share are then small beside it."""
FEWEST, MOST = 1 << 12, 1 << 18
"""Elements of a part: fewer are not worth a turn, and more do not stay in the cache."""

M_MMAP_THRESHOLD, MAPPED_FROM = -3, 1 << 18
"""glibc's option, and bytes from which a tensor has pages of its own."""


@dataclass
class Offloading:
    """The kinds of state that one rank offloads, each with its level below."""

    levels: dict[str, MemoryLevel] = field(default_factory=dict)
    in_use: dict[str, Callable[[], int]] = field(default_factory=dict)
    """Of each kind, the bytes that stay in memory to move the rest."""
    trial: _OffloadTrial | None = None
    """What the optimiser keeps, where its state is offloaded."""

    def __bool__(self) -> bool:
        return bool(self.levels)

    def state(self, elements: int, places: Mapping[int, Any]) -> OffloadedState | None:
        """For an optimiser of so many elements, whose masters lie at these places."""
        kept = self.levels.get("optimizer")
        level = kept or (self.levels.get("parameters") if places else None)
        if level is None:
            return None
        part = min(MOST, max(FEWEST, -(-elements // PARTS // 16) * 16))
        if kept is not None:
            assert self.trial is not None
            self._require_gain(elements, part)
        found = OffloadedState(level, state=kept is not None, elements=part, places=dict(places))
        blocks = self.in_use.get("blocks", int)
        self.in_use["parameters"] = blocks if kept is not None else lambda: blocks() + found.working_bytes
        self.in_use["optimizer"] = lambda: found.working_bytes
        return found

    def _require_gain(self, elements: int, part: int) -> None:
        trial = self.trial
        assert trial is not None
        held, working = trial.bytes_of(elements), BUFFERS * trial.bytes_of(min(part, elements))
        if elements and held <= working:
            text = f"{trial.name} keeps {held:,} bytes of state on this rank"
            if held:
                text += f", and {working:,} would stay in memory to move it"
            raise NotRunnable(f'offload("optimizer"): nothing to gain: {text}; leave it out')

    def close(self) -> None:
        for level in set(self.levels.values()):
            level.close()

    def leave_pages(self) -> None:
        for level in set(self.levels.values()):
            level.leave_pages()

    def report(self) -> dict[str, Any]:
        """What is offloaded by now, what has moved, and how long steps have waited for it."""
        return {
            what: {
                "to": level.name,
                "held_bytes": level.held_bytes,
                "read_bytes": level.read_bytes,
                "written_bytes": level.written_bytes,
                "waited_s": level.waited_s,
                "in_use_bytes": self.in_use.get(what, int)(),
            }
            for what, level in self.levels.items()
        }


@dataclass(frozen=True)
class _OffloadTrial:
    """What a few steps of the optimiser on small parameters have shown."""

    name: str
    bytes_per_element: float
    in_parts: bool
    """Whether steps on one parameter after the other are the step on all."""

    def bytes_of(self, elements: int) -> int:
        return round(self.bytes_per_element * elements)


def offloading_of(strategy: Strategy, device: torch.device, recipe: Any) -> Offloading:
    """What a strategy offloads on this device. `recipe`: of the optimiser."""
    found = Offloading()
    if strategy.term(offload) is not None and device.type == "cpu":
        give_back_freed_memory()
    for term in strategy.all_of(offload):
        found.levels[term.what] = _level(term, device)
    if "optimizer" in found.levels or "parameters" in found.levels:
        found.trial = tried(recipe)
        if not found.trial.in_parts:
            what = next(what for what in ("optimizer", "parameters") if what in found.levels)
            raise NotRunnable(
                f'offload("{what}"): a step moves what it needs part by part, and {found.trial.name} steps otherwise '
                "on one parameter after the other than on all together; use one that updates each parameter by itself, "
                "such as AdamW"
            )
    return found


def give_back_freed_memory() -> None:
    """Tensors that are freed leave this process at once. glibc would keep them in its heap, in holes that the next ones
    do not fit: of 86 MB of offloaded state 26 stayed resident (tests/distributed/test_offload.py)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_FROM)


def _level(term: offload, device: torch.device) -> MemoryLevel:
    to = term.to
    if to == "auto":
        to = "disk" if device.type == "cpu" else "host"
    if to == "disk" and device.type != "cpu":
        raise NotRunnable(
            f"{term}: from {device.type} the level below is host memory; what a device computes with is not moved to "
            f'disk; use offload("{term.what}")'
        )
    if to == "host" and device.type == "cpu":
        raise NotRunnable(
            f"{term}: nothing to gain: ranks compute in host memory, so 0 bytes would move; use "
            f'offload("{term.what}"), whose level below is the disk here'
        )
    return HostLevel(device) if to == "host" else DiskLevel()


def tried(recipe: Any) -> _OffloadTrial:
    """Steps an optimiser on small parameters of a model, all at once and one after the other."""
    kinds: dict[tuple[int, int], tuple[int, ...]] = {}
    for name, which in recipe.labels.items():
        shape = tuple(min(size, 8) for size in recipe.shapes.get(name, (8,)))
        kinds.setdefault((which, 1 if recipe.elementwise else len(shape)), (64,) if recipe.elementwise else shape)
    shapes = [(which, shape) for (which, _), shape in kinds.items() for _ in range(2)]

    def run(turns: Sequence[Sequence[int]]) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
        drawn = torch.Generator().manual_seed(5)
        params = [nn.Parameter(torch.randn(shape, generator=drawn)) for _, shape in shapes]
        groups: dict[int, list[nn.Parameter]] = {}
        for (which, _), param in zip(shapes, params, strict=True):
            groups.setdefault(which, []).append(param)
        optimizer = recipe.factory([{"params": of, **recipe.options[which]} for which, of in sorted(groups.items())])
        for _ in range(3):
            gradients = [torch.randn(param.shape, generator=drawn) for param in params]
            for turn in turns:
                for number, param in enumerate(params):
                    param.grad = gradients[number] if number in turn else None
                optimizer.step()
        return optimizer, params

    everyone = range(len(shapes))
    with torch.random.fork_rng(devices=[]):
        optimizer, together = run([list(everyone)])
        _, apart = run([[number] for number in everyone])
    nbytes = sum(
        value.numel() * value.element_size()
        for param in together
        for value in state_of(optimizer, param).values()
        if isinstance(value, torch.Tensor) and value.dim() and value.numel() * value.element_size() >= min(LEAST, 64)
    )
    return _OffloadTrial(
        name=type(optimizer).__name__,
        bytes_per_element=nbytes / sum(param.numel() for param in together),
        in_parts=all(map(torch.equal, together, apart)),
    )


def parameters_in_use(shards: Sequence[tuple[StoredShard, bool]]) -> int:
    """Bytes of offloaded parameters that are in memory at a time; refuses to offload where that is as much as there is.
    `shards`: of all blocks, and whether each is of the root, which stays through forward and backward."""
    root_bytes = sum(shard.nbytes for shard, root in shards if root)
    total = sum(shard.nbytes for shard, _ in shards)
    blocks = sorted((shard.nbytes for shard, root in shards if not root), reverse=True)
    used = root_bytes + sum(blocks[:2])
    if total <= used:
        raise NotRunnable(
            f'offload("parameters"): nothing to gain: of {total:,} bytes of parameters {used:,} are in use at once '
            f"(the two largest blocks, and {root_bytes:,} outside of blocks); leave it out"
        )
    return used

"""Ranks of a grid as threads of one process, which exchange through memory: for tests of many shapes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.layout.spatial.grid import Grid
from shoal.parallel.spatial.view import RankView

Function = Callable[..., torch.Tensor]


class Hub:
    """Where the messages of all ranks lie."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=60)
        self.boxes: dict[Any, torch.Tensor] = {}
        self.sent = 0


class MemoryWire:
    def __init__(self, grid: Grid, index: int, hub: Hub) -> None:
        self.grid, self.index, self.hub = grid, index, hub

    def swap(self, leaving: Any, arriving: Any, phase: str, meanwhile: Callable[[], object]) -> None:
        meanwhile()
        for peer, x in leaving:
            self.hub.boxes[self.index, peer] = x
            self.hub.sent += x.numel()
        self.hub.barrier.wait()
        for peer, place in arriving:
            place.copy_(self.hub.boxes[peer, self.index])
        self.hub.barrier.wait()

    def add_up(self, x: torch.Tensor, phase: str) -> None:
        self.hub.boxes["sum", self.index] = x.clone()
        self.hub.barrier.wait()
        x.copy_(sum(self.hub.boxes["sum", rank] for rank in range(self.grid.ranks)))
        self.hub.barrier.wait()


def on_ranks(grid: Grid, work: Callable[[RankView], Any], norm: Any = None) -> list[Any]:
    """What each rank's thread returns."""
    hub = Hub(grid.ranks)
    found: list[Any] = [None] * grid.ranks
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            found[index] = work(RankView(MemoryWire(grid, index, hub), norm))
        except BaseException as error:
            errors.append(error)
            hub.barrier.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(grid.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return found


def error_of(function: Function, inputs: Sequence[torch.Tensor], grid: Grid, norm: Any = None) -> float:
    """The largest difference, relative to the largest element, between a function's result and gradients on ranks that
    hold parts and in one process. The function gets `inputs` in full and cuts them where it convolves."""
    plain = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    expected = function(*plain)
    weights = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(1))
    (expected * weights).sum().backward()

    def work(view: RankView) -> Any:
        mine = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        with view:
            y = function(*mine)
            (y * weights).sum().div(grid.ranks).backward()
        return view.in_full(y).detach(), [x.grad for x in mine]

    rows = on_ranks(grid, work, norm)
    worst = max(_apart(y, expected) for y, _ in rows)
    for number, x in enumerate(plain):
        if x.grad is not None:
            grads = [grads[number] for _, grads in rows]
            worst = max(worst, _apart(sum(g for g in grads if g is not None), x.grad))
    return worst


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    a, b = a.detach(), b.detach()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) if b.numel() else 0.0

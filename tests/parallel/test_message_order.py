"""Messages of a pipeline under NCCL's rules: tags are ignored, and the messages of two ranks in one group are matched
in the order of their calls and carried one after the other. Every schedule must then neither swap nor deadlock.

The pipeline and its messages are the engine's own; each rank is a thread, and the group is a queue in memory. Stages
multiply by different primes, so a message that arrives in the place of another shows in the numbers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.comm.mesh import Members
from shoal.parallel.pipeline import borders
from shoal.parallel.pipeline.arrival import Arrival
from shoal.parallel.pipeline.executor import Pipeline
from shoal.strategy import pp
from shoal.strategy.legality.check import IllegalStrategy, require_legal
from shoal.strategy.schedule import rank_stages

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
WAIT_S = 30.0
ME = threading.local()


class Work:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.done = tensor, threading.Event()

    def wait(self) -> None:
        if not self.done.wait(WAIT_S):
            raise RuntimeError("deadlock")


class Carrier:
    """All groups of a pipeline. `eager`: a send is done before its receive is called."""

    def __init__(self, *, eager: bool) -> None:
        self.eager = eager
        self.calls: dict[tuple[str, int, int], deque[tuple[str, Work]]] = {}
        """(group, rank, the other) -> what the rank has called and is not done, in order."""
        self.lock = threading.Lock()

    def isend(self, tensor: torch.Tensor, dst: int, group: str, tag: int) -> Work:
        work = Work(tensor.clone() if self.eager else tensor)
        if self.eager:
            work.done.set()
        return self._call("send", work, dst, group)

    def irecv(self, tensor: torch.Tensor, src: int, group: str, tag: int) -> Work:
        return self._call("recv", Work(tensor), src, group)

    def recv(self, tensor: torch.Tensor, src: int, group: str, tag: int) -> None:
        self.irecv(tensor, src, group, tag).wait()

    def _call(self, kind: str, work: Work, other: int, group: str) -> Work:
        # A buffered send does not hold up what the same rank receives after it.
        way = f"{group} {kind}" if self.eager else group
        back = f"{group} {'recv' if kind == 'send' else 'send'}" if self.eager else group
        with self.lock:
            mine = self.calls.setdefault((way, ME.rank, other), deque())
            theirs = self.calls.setdefault((back, other, ME.rank), deque())
            mine.append((kind, work))
            while mine and theirs and mine[0][0] != theirs[0][0]:
                pair = dict([mine.popleft(), theirs.popleft()])
                assert pair["send"].tensor.shape == pair["recv"].tensor.shape, "another message than was expected"
                assert pair["send"].tensor.dtype == pair["recv"].tensor.dtype, "another message than was expected"
                pair["recv"].tensor.copy_(pair["send"].tensor)
                for each in pair.values():
                    each.done.set()
        return work


class Stages:
    """A model of one multiplication a stage; what arrives is checked."""

    def __init__(self, term: pp, rank: int, shapes: int) -> None:
        self.mine = rank_stages(rank, term.n, term.chunks, term.schedule)
        self.shapes = shapes
        self.leaves: dict[int, torch.Tensor] = {}

    def at(self, stage: int, received: list[Arrival]) -> Any:
        return nullcontext()

    def run(self, stage: int, forward: Any, received: list[Arrival]) -> tuple[Any, list[torch.Tensor]]:
        micro = forward()
        value = float(micro + 1)
        if stage == 0:
            size = 2 + micro % self.shapes
            self.leaves[micro] = torch.full((size,), value, dtype=torch.float64, requires_grad=True)
            x = self.leaves[micro] * 1.0
            numbers = torch.full((3,), micro)
        else:
            x, numbers = (each.enter() for each in received)
            assert numbers.tolist() == [micro] * 3, f"stage {stage}: {numbers[0]} in the place of micro-batch {micro}"
            assert x[0].item() == value * prod(PRIMES[:stage]), f"stage {stage}, micro-batch {micro}"
        y = x * PRIMES[stage]
        return (y, [y, numbers])


OWNER = SimpleNamespace(begin_forward=lambda part: None, release=lambda **_: None)


def engine_of(term: pp, rank: int, made: list[str]) -> Any:
    """What a pipeline asks of an engine."""

    def another(axis: str) -> Members:
        made.append(f"lane {len(made)}")
        return Members(axis, tuple(range(term.n)), rank, made[-1])  # type: ignore[arg-type]

    return SimpleNamespace(
        placement=SimpleNamespace(mesh=SimpleNamespace(another_along=another)),
        device=torch.device("meta"),
        reduction=SimpleNamespace(buckets=[]),
        owner=OWNER,
        count=lambda *_: None,
        learns_from=lambda loss: loss,
        run_backward=lambda run, **_: run(),
        close_backward=lambda: None,
        step=lambda factor: None,
    )


class NoDeferral:
    """In the place of weight gradients that come later."""

    def watching(self, place: Any) -> Any:
        return nullcontext()

    def collect(self, run: Any, part: int) -> None:
        run()

    def run(self, place: Any, **_: Any) -> None:
        pass


def pipeline_of(term: pp, rank: int, shapes: int) -> Pipeline:
    staged = Stages(term, rank, shapes)
    members = Members("pp", tuple(range(term.n)), rank, "lane 0")  # type: ignore[arg-type]
    made = Pipeline(engine_of(term, rank, ["lane 0"]), staged, members, term)  # type: ignore[arg-type]
    assert made.borders._lanes, "on a device there are groups for each kind and direction"
    made.borders.device = torch.device("cpu")
    if made.deferred is not None:
        made.deferred = NoDeferral()  # type: ignore[assignment]
    return made


def train(term: pp, *, eager: bool, shapes: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two steps, the second with known shapes; what went wrong."""
    monkeypatch.setattr(borders, "dist", Carrier(eager=eager))
    last = term.n * term.chunks - 1
    errors: list[str] = []

    def run(rank: int) -> None:
        ME.rank = rank
        try:
            pipeline = pipeline_of(term, rank, shapes)

            def loss(micro: int, output: torch.Tensor) -> tuple[torch.Tensor, int]:
                return output.sum() * (micro + 1), 1

            work: Any = SimpleNamespace(key=lambda micro: micro % shapes, forward=lambda micro: micro, loss=loss)
            for _ in range(2):
                pipeline.step(work, lr_factor=1.0)
                for micro, leaf in pipeline.staged.leaves.items():  # type: ignore[attr-defined]
                    expected = (micro + 1) * prod(PRIMES[: last + 1])
                    assert leaf.grad is not None
                    assert leaf.grad[0].item() == expected, f"the gradient of micro-batch {micro}"
        except BaseException as error:
            errors.append(f"{term}, rank {rank}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(term.n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def terms() -> Iterator[pp]:
    for schedule, stages, micro, chunks in product(
        ("gpipe", "1f1b", "interleaved", "zero-bubble"), (2, 3, 4), range(1, 10), (1, 2, 3)
    ):
        term = pp(stages, schedule, micro=micro, chunks=chunks)
        try:
            require_legal(term)
        except IllegalStrategy:
            continue
        yield term


@pytest.mark.long
@pytest.mark.parametrize(
    ("eager", "shapes"),
    [
        (False, 2),
        pytest.param(False, 1, marks=pytest.mark.slow),
        pytest.param(True, 1, marks=pytest.mark.slow),
        pytest.param(True, 2, marks=pytest.mark.slow),
    ],
)
def test_no_schedule_swaps_messages_or_deadlocks(eager: bool, shapes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list(terms())
    assert {(term.schedule, term.n) for term in tried} == set(
        product(("gpipe", "1f1b", "interleaved", "zero-bubble"), (2, 3, 4))
    )
    assert len(tried) > 100
    for term in tried:
        assert train(term, eager=eager, shapes=shapes, monkeypatch=monkeypatch) == []


def test_receives_in_another_order_than_sends_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borders.Borders, "_ahead_of", lambda self, message: iter(()))
    monkeypatch.setattr("parallel.test_message_order.WAIT_S", 0.5)
    found = train(pp(2, "zero-bubble", micro=5, chunks=3), eager=True, shapes=1, monkeypatch=monkeypatch)
    assert any("the gradient of micro-batch" in error for error in found), found


def test_one_group_for_both_directions_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borders.Borders, "_lane", lambda self, kind, source, to: self.members.group)
    monkeypatch.setattr("parallel.test_message_order.WAIT_S", 0.5)
    found = train(pp(2, "1f1b", micro=4), eager=False, shapes=1, monkeypatch=monkeypatch)
    assert any("deadlock" in error for error in found), found

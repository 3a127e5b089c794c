"""Exchanges of two ranks at a time: no schedule makes ranks wait for each other, and none loses anything."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch

from shoal.comm.pairs import PackedMessage, answers, ask
from shoal.comm.point_to_point import PointToPoint
from shoal.comm.transport.memory import memory_links
from shoal.strategy.graphs import neighbours, two_colours

WORKERS, ROUNDS, SIZE = 8, 3, 40
TURNS = 200_000


class Worker:
    """One rank: a model, and the generators that change it."""

    def __init__(self, rank: int, links: Any, joined: list[int], random: Random, *, passive: bool) -> None:
        self.rank, self.joined, self.random, self.passive = rank, joined, random, passive
        self.messages = PointToPoint(links, f"rank {rank}")
        self.model = torch.arange(SIZE, dtype=torch.float64) * (rank + 1)
        self.added = torch.zeros(SIZE, dtype=torch.float64)
        self.answered = 0

    def steps(self) -> Iterator[Any]:
        for _ in range(ROUNDS):
            for _ in range(self.random.randrange(4)):
                yield None  # It computes.
            change = torch.full((SIZE,), self.random.random(), dtype=torch.float64)
            self.model += change
            self.added += change
            if not self.passive:
                question = PackedMessage([self.model], numbers=2).fill([self.rank, 0], [self.model])
                reply = PackedMessage([self.model], numbers=2)
                yield from ask(self.messages, self.random.choice(self.joined), question, reply)
                self.model.copy_((self.model + reply.tensors[0]) / 2)

    def answer(self, rank: int, question: PackedMessage) -> PackedMessage:
        assert question.numbers[0] == rank
        reply = PackedMessage([self.model], numbers=2).fill([self.rank, 0], [self.model])
        self.model.copy_((self.model + question.tensors[0]) / 2)
        self.answered += 1
        return reply

    def serves(self) -> Iterator[Any]:
        return answers(self.messages, PackedMessage([self.model], numbers=2), self.answer, background=False)


def run(graph: str, seed: int) -> list[Worker]:
    """All workers in one thread, in an order drawn from the seed; links hold less than a message."""
    random, links = Random(seed), memory_links(WORKERS, capacity=256)
    colours = two_colours(graph, WORKERS)
    assert colours is not None
    joined = neighbours(graph, WORKERS)
    workers = [Worker(n, links[n], joined[n], random, passive=bool(colours[n])) for n in range(WORKERS)]
    own = {worker.rank: worker.steps() for worker in workers}
    serving = {worker.rank: worker.serves() for worker in workers if worker.passive}
    waits: dict[tuple[str, int], Any] = {}
    for _ in range(TURNS):
        if not own:
            break
        kind, jobs = random.choice([("own", own), ("serving", serving)])
        rank = random.choice(list(jobs))
        workers[rank].messages._advance()
        task = waits.get((kind, rank))
        if task is None or task.done:
            try:
                waits[kind, rank] = next(jobs[rank])
            except StopIteration:
                del jobs[rank]
    for worker in workers:
        worker.messages.close()
    assert not own, f"{graph}, seed {seed}: ranks {sorted(own)} never end"
    return workers


@pytest.mark.parametrize("graph", ["ring", "torus"])
@pytest.mark.parametrize("schedules", [range(60), pytest.param(range(60, 1000), marks=pytest.mark.slow)])
def test_no_schedule_of_eight_workers_deadlocks_or_changes_the_sum(graph: str, schedules: range) -> None:
    """AD-PSGD on 2,000 random schedules in all."""
    for seed in schedules:
        workers = run(graph, seed)
        total = sum(worker.model for worker in workers)
        wanted = sum(torch.arange(SIZE, dtype=torch.float64) * (worker.rank + 1) + worker.added for worker in workers)
        torch.testing.assert_close(total, wanted, rtol=1e-12, atol=1e-12)
        assert sum(worker.answered for worker in workers) == ROUNDS * sum(not worker.passive for worker in workers)


def test_a_question_that_breaks_off_is_forgotten() -> None:
    """A rank dies in the middle of its message: the next one that asks is answered."""
    links = memory_links(3, capacity=256)
    served = Worker(0, links[0], [1, 2], Random(0), passive=True)
    serving = served.serves()
    next(serving)
    dying, asking = (PointToPoint(links[rank], f"rank {rank}") for rank in (1, 2))
    question = PackedMessage([served.model], numbers=2).fill([1, 0], [served.model])
    waiting = ask(dying, 0, question, PackedMessage([served.model], numbers=2))
    next(waiting)
    dying._advance()
    served.messages._advance()  # It has begun to receive.
    links[0][1].close()
    served.messages._advance()
    question = PackedMessage([served.model], numbers=2).fill([2, 0], [served.model])
    reply = PackedMessage([served.model], numbers=2)
    asked = next(iter(served.messages._tasks))
    for task in ask(asking, 0, question, reply):
        for _ in range(100):
            asking._advance()
            served.messages._advance()
            if asked.done and not served.answered:
                next(serving)
        assert task.done
        assert task.error is None
    assert served.answered == 1
    for messages in (served.messages, dying, asking):
        messages.close()

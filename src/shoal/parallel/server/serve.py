"""A server: it waits for messages and does what they say, on a rank of its own or in a thread of a worker.

The first server is the coordinator. It takes what workers push and ask, and has every server make the same updates and
answer the same reads in the same order. An update has two phases, so that a gradient is clipped by its norm over all
shards, and none is applied that a killed worker has sent to some servers only:

    coordinator -> servers   PREPARE  take the mean of these gradients
    servers -> coordinator   READY    the square of its norm here, or whose gradient is missing
    coordinator -> servers   COMMIT   scale it and step the optimiser
    coordinator -> servers   READ     send the present parameters to a worker
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import inf, isfinite, nan, sqrt
from typing import Any

import torch

from shoal.comm.compress.compressor import Compressor
from shoal.parallel.optimizer import Recipe
from shoal.parallel.server.coordinator import Answer, Coordinator, Dropped, Update
from shoal.parallel.server.messages import FIELDS, INBOX, LIFE, REPLY, Kind, Message, Post
from shoal.parallel.server.shard import ServedShard
from shoal.strategy.seats import Seats
from shoal.strategy.terms.serving import Push
from shoal.strategy.terms.sync import Served

LOOK_S = 0.5
"""How often the coordinator looks for late workers."""


def message_size(seats: Seats, names: Sequence[str]) -> int:
    return len(FIELDS) + 4 * seats.replicas + len(names)


class Server:
    """What one rank serves."""

    def __init__(
        self,
        seats: Seats,
        rank: int,
        recipe: Recipe,
        rule: Served,
        clip: float | None,
        up: Post,
        down: Post,
        *,
        losses: bool = False,
        watch: Callable[[], None] = lambda: None,
        at_step: Callable[[int], None] = lambda step: None,
        compress: tuple[Compressor, int] | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """`losses`: whether a lost worker leaves the others going on. `watch` is called now and then, `at_step` when a
        worker is sent the parameters for a step. `compress`: how workers compress what they push, and the seed of what
        they draw. `around`: entered around updates."""
        self.seats, self.rank, self.rule, self.clip, self.up, self.down = seats, rank, rule, clip, up, down
        self.names = list(recipe.labels)
        self.size = message_size(seats, self.names)
        self.losses, self.watch, self.at_step, self.around = losses, watch, at_step, around
        self.shards = {
            position: ServedShard(
                recipe,
                shard,
                [seats.worker(replica, position) for replica in range(seats.replicas)],
                up,
                down,
                compress=compress,
            )
            for shard, position in seats.served_by(rank)
        }
        first, *self.others = seats.servers
        self.coordinator = Coordinator(rule, seats.replicas) if rank == first else None
        self.first = first
        self.lost: list[dict[str, Any]] = []
        self.norm = nan
        self.failed = False
        """Whether the last gradient was not finite: nothing was updated, and workers are to stop."""
        self.error: BaseException | None = None
        self._backlog: deque[Message] = deque()
        self._used: dict[tuple[int, int], list[float]] = {}
        self._pushes: list[Push] = []
        self._pending: tuple[float, frozenset[str]] = (1.0, frozenset())
        self._left: set[int] = set()
        self._post_inbox()
        self._lives: dict[int, Any] = {}
        if self.coordinator is not None and losses:
            nothing = torch.zeros(1)
            self._lives = {
                replica: self.up.receive(seats.worker(replica, 0), LIFE, nothing)
                for replica in range(seats.replicas)
                if seats.worker(replica, 0) != rank
            }

    def _post_inbox(self) -> None:
        self._into = torch.zeros(self.size, dtype=torch.float64)
        self._inbox = self.up.any_source(INBOX, self._into)

    def run(self) -> None:
        """Serves until all workers have left."""
        try:
            while not self._done:
                self._turn()
        except BaseException as error:
            self.error = error
            raise

    @property
    def _done(self) -> bool:
        if self.coordinator is None:
            return self.first in self._left
        if not self._left >= self.coordinator.clocks.members:
            return False
        self._tell(Message(Kind.BYE))
        return True

    def _turn(self) -> None:
        message = self._backlog.popleft() if self._backlog else self._wait()
        self._release_late()  # First: a report names all that were lost before it.
        if message is not None:
            self._handle(message)
        if self.coordinator is not None:
            for action in self.coordinator.decide(time.monotonic()):
                self._act(action)

    def _wait(self) -> Message | None:
        """The next message; None if none came for a while, or a worker was lost."""
        self.up.messages.wait_any([self._inbox, *self._lives.values()], LOOK_S)
        self.watch()
        if not self._inbox.done:
            return None
        if self._inbox.error is not None:
            raise self._inbox.error
        message, source = Message.of(self._into), self._inbox.source
        message["source"] = source
        self._post_inbox()
        return message

    def _release_late(self) -> None:
        """Goes on without workers that were killed, or take too long."""
        if self.coordinator is None or not self.losses:
            return
        for replica in [replica for replica, life in self._lives.items() if life.done]:
            del self._lives[replica]
            self._lose(replica, "its process ended")
        for replica in self.coordinator.late(time.monotonic()):
            self._lose(replica, "it took too long for a step")

    def _lose(self, replica: int, reason: str) -> None:
        assert self.coordinator is not None
        if replica in self._left or replica not in self.coordinator.clocks.members:
            return  # It took its leave, or is known to be lost.
        since_s = self.coordinator._since.get(replica)
        waited_s = None if since_s is None else time.monotonic() - since_s
        ticket = self.coordinator.outstanding.get(replica)
        self.lost.append(
            {
                "worker": replica,
                "reason": reason,
                "version": self.coordinator.clocks.version,
                "waited_s": waited_s,
                "ticket": ticket,
                "handed_out_again": ticket is not None and self.rule.by_tickets,
            }
        )
        self.coordinator.lose(replica)

    def _handle(self, message: Message) -> None:
        kind, worker = Kind(message.whole("kind")), message.whole("worker")
        if kind == Kind.LOAD:
            self._load(message)
        elif kind == Kind.FETCH:
            self._fetch(message)
        elif kind == Kind.BYE:
            self._left.add(self.first if self.coordinator is None else worker)
        elif kind == Kind.ASK:
            assert self.coordinator is not None
            self.coordinator.ask(worker, message.whole("limit"))
        elif kind == Kind.PUSH:
            self._pushed(message)
        elif kind == Kind.PREPARE:
            pushes, unused = self._order(message)
            squares, missing = self._prepare(pushes, message["lr_factor"], unused)
            self._send(self.first, Message(Kind.READY, squares=squares, missing=missing))
        elif kind == Kind.DROP:
            self._forget(self._order(message)[0])
        elif kind == Kind.COMMIT:
            self._commit(message["scale"])
        elif kind == Kind.READ:
            self._answer(message)

    def _load(self, message: Message) -> None:
        table, tensors = self.up.receive_table(message.whole("source"))
        self.shards[message.whole("position")].load(table, tensors, message.whole("step"))
        self.down.send(message.whole("source"), REPLY, Message(Kind.LOAD).tensor(self.size))
        if self.coordinator is not None and message.whole("position") == 0:
            self.coordinator.begin(message.whole("step"))

    def _fetch(self, message: Message) -> None:
        source = message.whole("source")
        if message.whole("stop"):  # The report of the coordinator.
            assert self.coordinator is not None
            report = self.coordinator.report()
            report |= {"log": self.coordinator.log, "dropped_log": self.coordinator.dropped_log}
            self.down.send_table(source, report | ({"lost_workers": self.lost} if self.lost else {}), [])
        else:
            self.down.send_table(source, *self.shards[message.whole("position")].state())

    def _pushed(self, message: Message) -> None:
        assert self.coordinator is not None
        worker, number = message.whole("worker"), message.whole("number")
        for shard in self.shards.values():
            shard.take(worker, number)
        self._used[worker, number] = message.rest[4 * self.seats.replicas :]
        push = Push(
            worker,
            message.whole("step"),
            message.whole("share"),
            message.whole("version"),
            number,
            message["count"],
            message["lr_factor"],
        )
        for dropped in self.coordinator.push(push, stop=bool(message["stop"]), now_s=time.monotonic()):
            self._drop(dropped)

    def _drop(self, dropped: Dropped) -> None:
        push = dropped.push
        self._used.pop((push.worker, push.number), None)
        self._tell(Message(Kind.DROP, [push.worker, push.number, 0, 0], number=1))
        self._forget([push])

    def _forget(self, pushes: Sequence[Push]) -> None:
        for shard in self.shards.values():
            for push in pushes:
                shard.take(push.worker, push.number)
            shard.forget(pushes)

    # What the coordinator has done:

    def _act(self, action: Update | Dropped | Answer) -> None:
        if isinstance(action, Dropped):
            self._drop(action)
        elif isinstance(action, Update):
            self._update(action)
        else:
            step, share = action.ticket or (action.step, 0)
            assert self.coordinator is not None
            read = Message(
                Kind.READ,
                worker=action.worker,
                step=step,
                share=share,
                version=self.coordinator.clocks.version,
                has_ticket=action.ticket is not None,
                stop=action.stop,
                norm=self.norm,
                missing=self.failed,
            )
            self._tell(read)
            self._answer(read)

    def _update(self, update: Update) -> None:
        assert self.coordinator is not None
        pushes = list(update.pushes)
        while True:
            used = [max(row) for row in zip(*(self._used[p.worker, p.number] for p in pushes), strict=True)]
            order = [number for p in pushes for number in (p.worker, p.number, p.version, p.count)]
            order += [0.0] * (4 * self.seats.replicas - len(order)) + used
            self._tell(Message(Kind.PREPARE, order, number=len(pushes), lr_factor=update.lr_factor))
            unused = frozenset(name for name, times in zip(self.names, used, strict=True) if not times)
            squares, missing = self._prepare(pushes, update.lr_factor, unused)
            absent = {missing - 1} - {-1}
            for _ in self.others:
                ready = self._next_ready()
                squares += ready["squares"]
                absent |= {ready.whole("missing") - 1} - {-1}
            if not absent:
                break
            for worker in absent:
                self._lose(worker, "its process ended")
            pushes = [push for push in pushes if push.worker not in absent]
            self.coordinator.log[-1] = [push.row for push in pushes]
            if not pushes:
                return
        for push in update.pushes:
            self._used.pop((push.worker, push.number), None)
        self.norm = sqrt(squares) if isfinite(squares) else nan
        scale = 1.0 if self.clip is None else min(1.0, self.clip / (self.norm + 1e-6))
        self.failed = not isfinite(self.norm)
        scale = inf if self.failed else scale
        self._tell(Message(Kind.COMMIT, scale=scale))
        self._commit(scale)

    def _next_ready(self) -> Message:
        while True:
            message = self._wait()
            if message is not None and message.whole("kind") == Kind.READY:
                return message
            if message is not None:
                self._backlog.append(message)

    def _order(self, message: Message) -> tuple[list[Push], frozenset[str]]:
        numbers, used = message.rest[: 4 * self.seats.replicas], message.rest[4 * self.seats.replicas :]
        rows = [numbers[4 * at : 4 * at + 4] for at in range(message.whole("number"))]
        pushes = [Push(int(w), 0, 0, int(version), int(number), count) for w, number, version, count in rows]
        return pushes, frozenset(name for name, times in zip(self.names, used, strict=True) if not times)

    def _prepare(self, pushes: list[Push], lr_factor: float, unused: frozenset[str]) -> tuple[float, int]:
        """The square of the norm of the mean here, and a worker whose gradient is missing, from 1; 0 if none is."""
        for push in pushes:
            if not all(shard.take(push.worker, push.number) for shard in self.shards.values()):
                return 0.0, push.worker + 1
        self._pushes, self._pending = pushes, (lr_factor, unused)
        return sum(shard.average(pushes, self.rule.compensation) for shard in self.shards.values()), 0

    def _commit(self, scale: float) -> None:
        lr_factor, unused = self._pending
        for shard in self.shards.values():
            if isfinite(scale) and any(push.count for push in self._pushes):  # None learns from nothing.
                with self.around():
                    shard.update(scale, lr_factor, unused)
            shard.forget(self._pushes)

    def _answer(self, read: Message) -> None:
        worker = read.whole("worker")
        if read.whole("has_ticket"):
            self.at_step(read.whole("step"))
        for shard in self.shards.values():
            if shard.index == 0:
                self.down.send(shard.ranks[worker], REPLY, read.tensor(self.size))
            shard.send(worker)

    def _tell(self, message: Message) -> None:
        for other in self.others:
            self._send(other, message)

    def _send(self, to: int, message: Message) -> None:
        self.up.send(to, INBOX, message.tensor(self.size))

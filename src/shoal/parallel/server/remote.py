"""The optimiser of a worker, where servers run it: pushes this rank's gradients, pulls the updated parameters.

Each gradient is pushed as soon as its bucket is reduced inside the replica, while backward goes on with others. The
answer to a push says what to compute next; the parameters that follow it are waited for when the next step begins.
Pushes are entered in the ledger (axis "ps").
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shoal.comm.compress.compressor import Compressor
from shoal.comm.ledger import BOOK
from shoal.comm.transport.link import PeerLost
from shoal.parallel.bucket import Bucket
from shoal.parallel.flat_slice import HeldState, Piece, SavedState, pieces_within
from shoal.parallel.result import NonFinite
from shoal.parallel.server.codec import PartOfBucket, PushCodec
from shoal.parallel.server.messages import DATA, INBOX, REPLY, Kind, Message, Post
from shoal.parallel.server.serve import Server, message_size
from shoal.parallel.server.state import ReceivedState, saved_table
from shoal.strategy.seats import Seats, parts_of

NO_LIMIT = 1 << 60
LOOK_S = 1.0


class RemoteOptimizer:
    """One worker's end. Only the first rank of a replica talks to the coordinator; all get its answers."""

    def __init__(
        self,
        seats: Seats,
        rank: int,
        buckets: Sequence[Bucket],
        names: Sequence[str],
        up: Post,
        down: Post,
        *,
        together: bool,
        by_tickets: bool,
        times: Callable[[Bucket], int],
        server: Server | None,
        compress: tuple[Compressor, int, float | None] | None = None,
        elementwise: bool = True,
    ) -> None:
        """`together`: replicas step together and know the count of all; `by_tickets`: they take shares of the data as
        they are free; `times`: how many ranks of a replica hold the same bucket; `server`: what this process serves in
        a thread; `compress`: the method of the level, its seed, and the job's bound on the gradient's norm;
        `elementwise`: whether the optimiser takes ranges of parameters."""
        self.seats, self.buckets, self.names, self.up, self.down = seats, list(buckets), list(names), up, down
        self.replica, self.position = divmod(rank, seats.positions)
        self.together, self.by_tickets, self._times = together, by_tickets, times
        sizes = [(bucket.master.numel(), bucket.master.element_size()) for bucket in self.buckets]
        starts = None if elementwise else [[slot.start for slot in bucket.buffer.slots] for bucket in self.buckets]
        self.parts = parts_of(sizes, seats.shards, starts=starts)
        self.servers = [seats.server(shard, self.position) for shard in range(seats.shards)]
        self.size = message_size(seats, names)
        self.codec = None if compress is None else self._codec(*compress)
        self._base = 0
        """The step at which the servers took up the run; with the number of a push it seeds what the codec draws."""
        self.step, self.share, self.version, self.number = 0, self.replica, 0, 0
        """The ticket that is computed now, the version it was read with, and the pushes before it."""
        self.norm = float("nan")
        """Of the last update."""
        self.limit = NO_LIMIT
        self.stop = False
        """Whether this worker was asked to stop."""
        self.paused = self.stopping = False
        """Whether all work before the limit is done; whether the run ends there."""
        self._pushed: set[int] = set()
        self._sending: list[Any] = []
        self._arriving: list[Any] = []
        self.server = server
        self._thread: threading.Thread | None = None
        if server is not None:
            self._thread = threading.Thread(target=server.run, name="shoal server", daemon=True)
            self._thread.start()

    def _codec(self, term: Compressor, seed: int, clip: float | None) -> PushCodec:
        rows = []
        for part in (part for parts in self.parts for part in parts):
            bucket = self.buckets[part.bucket]
            low = bucket.offset
            rows.append(
                PartOfBucket(
                    bucket.buffer.slots,
                    bucket.buffer.dtype,
                    low + part.start,
                    low + part.stop,
                    worker=self.replica,
                    workers=self.seats.replicas,
                    writes_errors=bucket.replicas.copies.index == 0,
                )
            )
        return PushCodec(rows, term, seed=seed, clip=clip)

    @property
    def leads(self) -> bool:
        return self.position == 0

    def _tell(self, to: int, message: Message) -> Any:
        return self.up.send(to, INBOX, message.tensor(self.size))

    def _wait(self, post: Post, task: Any) -> None:
        """Waits for a message, as long as the server in this process is well."""
        while not task.done:
            post.messages.wait_any([task], LOOK_S)
            if self.server is not None and self.server.error is not None:
                if isinstance(self.server.error, PeerLost):  # Another rank was lost: that is no failure of this one.
                    raise self.server.error
                raise RuntimeError("the server in this process has failed") from self.server.error
        if task.error is not None:
            raise task.error

    # A step:

    def push(self, bucket: Bucket) -> None:
        """Sends a gradient that is reduced inside the replica; once a step. One that is compressed waits for the end of
        backward: only then are the count and the parameters without a gradient known."""
        if self.codec is not None:
            return
        at = next(at for at, mine in enumerate(self.buckets) if mine is bucket)
        if at in self._pushed:
            return
        self._pushed.add(at)
        gradient = bucket.reduced()
        with BOOK.during("gradient"):
            for server, parts in zip(self.servers, self.parts, strict=True):
                for tag, part in enumerate(parts):
                    if part.bucket == at:
                        self._sending.append(self.up.send(server, DATA + tag, gradient[part.start : part.stop]))

    def update(self, count: float, unused: frozenset[str], lr_factor: float) -> None:
        """Pushes what is left of the gradient, and takes the answer."""
        for bucket in self.buckets:
            self.push(bucket)
        self._pushed.clear()
        count /= self.seats.replicas if self.together else 1
        if self.codec is not None:
            self._push_compressed(self.codec, count, unused)
        if self.leads:
            used = [float(name not in unused) for name in self.names]
            push = Message(
                Kind.PUSH,
                [0.0] * (4 * self.seats.replicas) + used,
                worker=self.replica,
                step=self.step,
                share=self.share,
                version=self.version,
                number=self.number,
                limit=self.limit,
                lr_factor=lr_factor,
                count=count,
                stop=self.stop and not self.together,
            )
            self._tell(self.seats.servers[0], push)
        self.number += 1
        self._receive()

    def _push_compressed(self, codec: PushCodec, count: float, unused: frozenset[str]) -> None:
        at, step = 0, self._base + self.number
        with BOOK.during("gradient"):
            for server, parts in zip(self.servers, self.parts, strict=True):
                for tag, part in enumerate(parts):
                    gradient = self.buckets[part.bucket].reduced()[part.start : part.stop]
                    message = codec.encode(at, gradient, count or 1.0, unused, worker=self.replica, step=step)
                    self._sending.append(self.up.send(server, DATA + tag, message))
                    at += 1
        codec.unused, codec.step = unused, step + 1

    def ask(self, limit: int) -> None:
        """Asks for the next ticket before a limit, at the start and after a pause."""
        self.limit = limit
        if self.leads:
            self._tell(self.seats.servers[0], Message(Kind.ASK, worker=self.replica, limit=limit))
        self._receive()

    def _receive(self) -> None:
        reply = torch.zeros(self.size, dtype=torch.float64)
        task = self.down.receive(self.servers[0], REPLY, reply)
        for server, parts in zip(self.servers, self.parts, strict=True):
            for tag, part in enumerate(parts):
                into = self.buckets[part.bucket].master[part.start : part.stop]
                self._arriving.append(self.down.receive(server, DATA + tag, into))
        self._wait(self.down, task)
        answer = Message.of(reply)
        if answer.whole("missing"):
            raise NonFinite("the norm of the gradient is not finite")
        self.step, self.share, self.version = (answer.whole(field) for field in ("step", "share", "version"))
        self.norm, self.paused, self.stopping = answer["norm"], not answer["has_ticket"], bool(answer["stop"])

    def settle(self) -> bool:
        """Waits until the parameters are here; whether there was something to wait for."""
        arriving, self._arriving = self._arriving, []
        for task in arriving:
            self._wait(self.down, task)
        sending, self._sending = self._sending, []
        for task in sending:  # The next backward writes to the gradients.
            self._wait(self.up, task)
        return bool(arriving)

    # The state of the servers:

    def load(self, saved: SavedState | None, step: int) -> None:
        """The servers begin with this worker's parameters and this state. All ranks call it alike."""
        self.step, self.share, self.version = step, self.replica, step
        self._base = step - self.number
        if self.replica:
            return
        for server, parts in zip(self.servers, self.parts, strict=True):
            rows = [[*part, self.buckets[part.bucket].offset, self._times(self.buckets[part.bucket])] for part in parts]
            layouts = [
                [b.buffer.padded, [[s.name, list(s.shape), s.start, s.options] for s in b.buffer.slots]]
                for b in self.buckets
            ]
            masters = [self.buckets[part.bucket].master[part.start : part.stop] for part in parts]
            pieces = list(self._pieces(parts))
            state = saved_table(HeldState({}, []) if saved is None else saved, pieces)
            table = {"buckets": layouts, "parts": rows, "state": state[0]}
            self._tell(server, Message(Kind.LOAD, position=self.position, step=step))
            self.up.send_table(server, table, [*masters, *state[1]])
            done = torch.zeros(self.size, dtype=torch.float64)
            self._wait(self.down, self.down.receive(server, REPLY, done))

    def _pieces(self, parts: Sequence[Any]) -> Iterator[Piece]:
        for part in parts:
            bucket = self.buckets[part.bucket]
            low = bucket.offset + part.start
            yield from pieces_within(bucket, bucket.master, bucket.offset, low, bucket.offset + part.stop)

    def fetch(self) -> ReceivedState | None:
        """The optimiser's state, on ranks of the first replica."""
        if self.replica:
            return None
        tables = []
        for server in self.servers:
            self._tell(server, Message(Kind.FETCH, position=self.position))
            tables.append(self.down.receive_table(server))
        return ReceivedState(tables)

    def report(self) -> dict[str, Any]:
        """What the coordinator has counted."""
        first = self.seats.servers[0]
        self._tell(first, Message(Kind.FETCH, stop=1))
        return dict(self.down.receive_table(first)[0])

    def close(self) -> None:
        """Leaves; the servers end when all have left."""
        self.settle()
        if self.leads:
            self._wait(self.up, self._tell(self.seats.servers[0], Message(Kind.BYE, worker=self.replica)))
        if self._thread is not None:
            self._thread.join()

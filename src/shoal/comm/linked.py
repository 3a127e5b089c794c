"""A process group over Shoal's own links: shared memory inside a host and TCP between hosts.

Every collective is a generator of messages in the group's queue (`progress.py`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import FakeProcessGroup

from shoal.comm.choice import choose_all_reduce
from shoal.comm.collectives.algorithms import ALL_REDUCE
from shoal.comm.counted import CountedGroup
from shoal.comm.network import NetworkTimes
from shoal.comm.peers import Peers, Steps
from shoal.comm.point_to_point import PointToPoint
from shoal.comm.progress import Task, TaskQueue, note_ranks_here
from shoal.comm.transport import emulated
from shoal.comm.transport.connect import connect
from shoal.comm.transport.token import job_token
from shoal.comm.wire import Algorithm, OnHosts
from shoal.comm.work import NO_TIMEOUT, Collective


class LinkedGroup(CountedGroup):
    """The links of a group to its members, and the queue of its collectives."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        name: str,
        timeout: timedelta,
        network: NetworkTimes,
        ranks: Sequence[int],
    ) -> None:
        """`ranks`: the members' ranks in the job."""
        super().__init__(rank, size, name)
        # The backend below only names the group; a test checks that every method that communicates is overridden here.
        self.register(FakeProcessGroup._create_internal(rank, size, FakeProcessGroup.Options()), torch.device("cpu"))
        self.network = network
        self.algorithm = "auto"
        """The all-reduce algorithm of this group; `via=allreduce(...)` names one."""
        carrier = os.environ.get("SHOAL_CARRIER", "auto")
        joined = connect(
            store,
            rank,
            size,
            channels=2,
            token=job_token() if size > 1 else b"",
            name=name,
            timeout=timeout,
            carrier=carrier,
        )
        note_ranks_here(max(len(host) for host in joined.hosts))
        collective, messages = joined.channels
        hosts = joined.hosts
        if emulated.emulator is not None:
            slow = emulated.emulator
            collective, messages = (slow.around(links, ranks, ranks[rank]) for links in (collective, messages))
            hosts = slow.hosts(ranks)
        self.peers = Peers(rank, size, collective, hosts=hosts)
        self.queue = TaskQueue(collective.values(), f"collectives of {name}")
        self.messages = PointToPoint(messages, f"messages of {name}", rank=rank)
        self._timeout_s = timeout.total_seconds()
        self._monitored = 0
        """Number of monitored barriers so far."""
        sizes = {len(host) for host in hosts}
        self._per_host = sizes.pop() if len(sizes) == 1 else 1

    def break_off(self) -> None:
        """Ends the collectives of this group, on this rank: others that wait for it find out at once."""
        self.queue.close()
        self.peers.close()

    def setTimeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        self.queue.close()
        self.messages.close()
        self.peers.close()
        self.messages.hang_up()

    abort = shutdown

    def prefer(self, algorithm: str) -> None:
        self.algorithm = algorithm

    def algorithm_of(self, kind: str, payload_bytes: int) -> Algorithm:
        if kind == "reduce":
            return "tree"
        return self.counted_as(self.all_reduce_by(payload_bytes)) if kind == "all_reduce" else None

    def all_reduce_by(self, payload_bytes: int) -> str:
        """The all-reduce algorithm that was asked for, or the cheapest by the model of the links."""
        if self.algorithm != "auto":
            return self.algorithm
        return choose_all_reduce(payload_bytes, self._size, self._per_host, self.network)

    def counted_as(self, name: str) -> Algorithm:
        return OnHosts(name, tuple(map(len, self.peers.hosts))) if ALL_REDUCE[name].by_hosts else name

    def start(self, kind: str, steps: Steps, result: list[torch.Tensor], opts: Any) -> Collective:
        """Queues a collective; `steps` run once those before it are done."""
        task = self.queue.submit(Task(steps, kind), background=getattr(opts, "asyncOp", True))
        timeout = getattr(opts, "timeout", None)
        seconds = timeout.total_seconds() if timeout is not None and timeout > NO_TIMEOUT else self._timeout_s
        return Collective(self.queue, task, result, seconds)

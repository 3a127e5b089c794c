"""The `shoal` backend of torch.distributed: collectives over shared memory inside a host and TCP between hosts.

DDP, fully_shard, DTensor, pipelining and the functional collectives use it as they use Gloo. A non-contiguous tensor is
copied, and copied back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import BarrierOptions

from shoal.comm.c10d_forms import listed, options_of
from shoal.comm.choice import network_like
from shoal.comm.collectives.direct import barrier
from shoal.comm.exchanges import Exchanges
from shoal.comm.laid_flat import Flat
from shoal.comm.monitored import monitored_barrier
from shoal.comm.network import DEFAULT, agreed
from shoal.comm.peers import Steps
from shoal.comm.point_to_point import ANY
from shoal.comm.reductions import Reductions
from shoal.comm.transport import emulated
from shoal.comm.vector import Vector
from shoal.comm.work import NO_TIMEOUT, Collective


class ShoalGroup(Reductions, Exchanges):
    """A process group over Shoal's own links."""

    def getBackendName(self) -> str:
        return "shoal"

    def barrier(self, opts: Any = None) -> Any:
        self._enter("barrier", 0)

        def steps() -> Steps:
            yield from barrier(self.peers.begin("barrier"), Vector(torch.empty(0)))

        return self.start("barrier", steps(), [], options_of(opts, BarrierOptions))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier that reports on rank 0 which ranks did not arrive in time. Raises NotAllArrived."""
        self._monitored += 1
        # To rank 0 and back: an empty message from each rank, a list of all ranks to each.
        self._enter("gather", 0)
        self._enter("scatter", self._size * 8 * self._size)
        seconds = timeout.total_seconds() if timeout is not None and timeout > NO_TIMEOUT else self._timeout_s
        monitored_barrier(
            self.messages,
            self._rank,
            self._size,
            number=self._monitored,
            timeout_s=seconds,
            wait_all_ranks=wait_all_ranks,
        )

    # Between two

    def send(self, tensors: Any, to: int, tag: int = 0) -> Any:
        flat = Flat(listed(tensors)[0])
        self._enter("send", flat.nbytes)
        message = self.messages.send(to, tag, flat, background=True)
        return Collective(self.messages, message, [flat.given], self._timeout_s)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        flat = Flat(listed(tensors)[0])
        self._enter("recv", flat.nbytes)
        message = self.messages.receive(source, tag, flat, background=True)
        message.when_done(flat.restore)
        return Collective(self.messages, message, [flat.given], self._timeout_s)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self.recv(tensors, ANY, tag)


def create(options: Any, _: Any) -> ShoalGroup:
    """Creates a group of this backend for torch.distributed."""
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    # Never this rank's own file: members that choose algorithms by different numbers would deadlock.
    network = agreed() or DEFAULT
    if emulated.emulator is not None:
        network = network_like(emulated.emulator.emulation, network)
    return ShoalGroup(
        options.store, options.group_rank, options.group_size, options.group_id, options.timeout, network, ranks
    )

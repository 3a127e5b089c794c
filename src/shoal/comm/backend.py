"""The `shoal` backend of torch.distributed: collectives over shared memory inside a host and TCP between hosts.

Every call becomes a generator of messages in the group's queue (`progress.py`). DDP, fully_shard, DTensor, pipelining
and the functional collectives use it as they use Gloo. A non-contiguous tensor is copied, and copied back.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    FakeProcessGroup,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from shoal.comm.c10d_forms import also_by_name, listed, operation_of, options_of, tensors_of
from shoal.comm.choice import choose_all_reduce, network_like
from shoal.comm.collectives.algorithms import ALL_REDUCE
from shoal.comm.collectives.direct import (
    barrier,
    direct_all_gather,
    direct_all_to_all,
    direct_reduce_scatter,
    gather,
    scatter,
)
from shoal.comm.collectives.tree import tree_broadcast, tree_reduce
from shoal.comm.collectives.two_levels import has_two_levels, two_level_all_gather, two_level_reduce_scatter
from shoal.comm.counted import CountedGroup
from shoal.comm.laid_flat import Flat, as_few, even_parts, parts_by_rows
from shoal.comm.monitored import monitored_barrier
from shoal.comm.network import DEFAULT, NetworkTimes, agreed
from shoal.comm.peers import Peers, Steps
from shoal.comm.point_to_point import ANY, PointToPoint
from shoal.comm.progress import Task, TaskQueue, note_ranks_here
from shoal.comm.sparse import SparsePart
from shoal.comm.transport import emulated
from shoal.comm.transport.connect import connect
from shoal.comm.transport.token import job_token
from shoal.comm.vector import Vector, total_bytes
from shoal.comm.wire import Algorithm, OnHosts, even_payload
from shoal.comm.work import NO_TIMEOUT, Collective


class ShoalGroup(CountedGroup):
    """A process group over Shoal's own links."""

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
            store, rank, size, channels=2, token=job_token() if size > 1 else b"", name=name, timeout=timeout,
            carrier=carrier,
        )  # fmt: skip
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

    def getBackendName(self) -> str:
        return "shoal"

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
        return self._counted_as(self._all_reduce_by(payload_bytes)) if kind == "all_reduce" else None

    def _all_reduce_by(self, payload_bytes: int) -> str:
        """The all-reduce algorithm that was asked for, or the cheapest by the model of the links."""
        if self.algorithm != "auto":
            return self.algorithm
        return choose_all_reduce(payload_bytes, self._size, self._per_host, self.network)

    def _counted_as(self, name: str) -> Algorithm:
        return OnHosts(name, tuple(map(len, self.peers.hosts))) if ALL_REDUCE[name].by_hosts else name

    def _start(self, kind: str, steps: Steps, result: list[torch.Tensor], opts: Any) -> Collective:
        """Queues a collective; `steps` run once those before it are done."""
        task = self.queue.submit(Task(steps, kind), background=getattr(opts, "asyncOp", True))
        timeout = getattr(opts, "timeout", None)
        seconds = timeout.total_seconds() if timeout is not None and timeout > NO_TIMEOUT else self._timeout_s
        return Collective(self.queue, task, result, seconds)

    # Reductions

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors = listed(tensors)
        opts = options_of(opts, AllreduceOptions)
        operation, average = operation_of(opts.reduceOp)
        if any(tensor.layout == torch.sparse_coo for tensor in tensors):
            return self._allreduce_sparse(tensors, opts, average)
        ready = []
        for flat in as_few(tensors):
            algorithm = self._all_reduce_by(flat.nbytes)
            self._enter("all_reduce", flat.nbytes, self._counted_as(algorithm))
            ready.append((flat, ALL_REDUCE[algorithm]))

        def steps() -> Steps:
            peers = self.peers.begin("all_reduce")
            for flat, all_reduce in ready:
                if peers.size > 1 and flat.nbytes:
                    yield from all_reduce.steps(peers, flat, operation)
                if average:
                    _divide(flat.tensor, self._size)
                flat.restore()

        return self._start("all_reduce", steps(), tensors, opts)

    def allreduce_sparse(self, tensors: Any, opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def _allreduce_sparse(self, tensors: list[torch.Tensor], opts: Any, average: bool) -> Any:
        """Gathers indices and values of all ranks; every rank sums them in the same order."""
        if len(tensors) != 1 or not (average or opts.reduceOp == dist.ReduceOp.SUM):
            raise ValueError("an all-reduce of sparse tensors takes one, and SUM or AVG; call to_dense() first")
        mine = SparsePart(tensors[0])
        about = [torch.zeros_like(mine.about) for _ in range(self._size)]
        # No other rank knows its size, so the sizes are gathered first.
        self.allgather([about], [mine.about]).wait()
        parts = mine.parts(about)
        for own in (mine.indices, mine.values):
            self._enter("all_gather", even_payload(bytes_to_others=own.nbytes * (self._size - 1), ranks=self._size))

        def steps() -> Steps:
            peers = self.peers.begin("all_gather")
            yield from direct_all_gather(peers, Vector(mine.indices), [Vector(each) for each in parts.indices])
            yield from direct_all_gather(peers, Vector(mine.values), [Vector(each) for each in parts.values])
            parts.sum_into(tensors[0], divide_by=self._size if average else 1)

        return self._start("all_reduce", steps(), tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors = listed(tensors)
        opts = options_of(opts, ReduceOptions)
        operation, average = operation_of(opts.reduceOp)
        root, flat = opts.rootRank, Flat(tensors[0])
        self._enter("reduce", flat.nbytes, "tree")

        def steps() -> Steps:
            peers = self.peers.begin("reduce")
            # Only the root's tensor may change; other ranks reduce into a copy.
            own = flat if self._rank == root else Vector(flat.tensor.detach().clone())
            if peers.size > 1 and len(own):
                yield from tree_reduce(peers, own, operation, root=root)
            if self._rank == root:
                if average:
                    _divide(flat.tensor, self._size)
                flat.restore()

        return self._start("reduce", steps(), tensors, opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        return self._reduce_scatter([(output, input)], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._reduce_scatter(list(zip(outputs, inputs, strict=True)), opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._reduce_scatter([(outputs[0], inputs[0])], opts)

    def _reduce_scatter(self, pairs: Sequence[tuple[torch.Tensor, Any]], opts: Any) -> Any:
        """Each input is one tensor of even parts, or a list with a tensor for each rank."""
        opts = options_of(opts, ReduceScatterOptions)
        operation, average = operation_of(opts.reduceOp)
        ready = []
        for output, given in pairs:
            parts = self._parts(given)
            into = Flat(output)
            if into.nbytes != parts[self._rank].nbytes:
                mine = len(parts[self._rank])
                raise ValueError(f"a part of {mine} elements does not fit an output of {len(into)}")
            self._enter("reduce_scatter", total_bytes(parts))
            ready.append((into, parts))

        reduce_scatter = two_level_reduce_scatter if has_two_levels(self.peers.hosts) else direct_reduce_scatter

        def steps() -> Steps:
            peers = self.peers.begin("reduce_scatter")
            for into, parts in ready:
                yield from reduce_scatter(peers, parts, into, operation)
                if average:
                    _divide(into.tensor, self._size)
                into.restore()

        return self._start("reduce_scatter", steps(), [output for output, _ in pairs], opts)

    def _parts(self, given: Any) -> list[Vector]:
        if isinstance(given, torch.Tensor):
            return even_parts(Flat(given), self._size)
        return [Flat(tensor) for tensor in given]

    # Exchanges

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        return self._all_gather([(output, input)], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._all_gather(list(zip(outputs, inputs, strict=True)), opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _allgather_base = all_gather_single

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._all_gather([(outputs[0], inputs[0])], opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        by_input = [([row[at] for row in outputs], given) for at, given in enumerate(inputs)]
        return self._all_gather(by_input, opts)

    def _all_gather(self, pairs: Sequence[tuple[Any, torch.Tensor]], opts: Any) -> Any:
        """Each output is one tensor of even parts, or a list with a tensor for each rank."""
        opts = options_of(opts, AllgatherOptions)
        ready = []
        for output, given in pairs:
            outputs = [Flat(tensor) for tensor in listed(output)]
            parts = even_parts(outputs[0], self._size) if isinstance(output, torch.Tensor) else outputs
            mine = Flat(given)
            if mine.nbytes != parts[self._rank].nbytes:
                place = len(parts[self._rank])
                raise ValueError(f"a part of {len(mine)} elements does not fill its place of {place}")
            self._enter("all_gather", total_bytes(parts))
            ready.append((outputs, parts, mine))

        tag = self.tag
        all_gather = two_level_all_gather if has_two_levels(self.peers.hosts) else direct_all_gather

        def steps() -> Steps:
            peers = self.peers.begin("all_gather", tag)
            for outputs, parts, mine in ready:
                yield from all_gather(peers, mine, parts)
                for output in outputs:
                    output.restore()

        return self._start("all_gather", steps(), tensors_of([output for output, _ in pairs]), opts)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_split_sizes: Any = (), input_split_sizes: Any = (),
        opts: Any = None,
    ) -> Any:  # fmt: skip
        into, given = Flat(output), Flat(input)
        coming = parts_by_rows(into, output_split_sizes or (), self._size)
        going = parts_by_rows(given, input_split_sizes or (), self._size)
        kept = going[self._rank].nbytes
        return self._all_to_all(going, coming, [into], given.nbytes - kept, opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        into, going = [Flat(tensor) for tensor in outputs], [Flat(tensor) for tensor in inputs]
        return self._all_to_all(going, into, into, total_bytes(going) - going[self._rank].nbytes, opts)

    def _all_to_all(
        self, going: Sequence[Vector], coming: Sequence[Vector], into: list[Flat], bytes_to_others: int, opts: Any
    ) -> Any:
        self._enter("all_to_all", even_payload(bytes_to_others=bytes_to_others, ranks=self._size))

        def steps() -> Steps:
            yield from direct_all_to_all(self.peers.begin("all_to_all"), going, coming)
            for flat in into:
                flat.restore()

        return self._start("all_to_all", steps(), [flat.given for flat in into], options_of(opts, AllToAllOptions))

    # From and to a root

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        tensors = listed(tensors)
        opts = options_of(opts, BroadcastOptions)
        flat = Flat(tensors[0])
        self._enter("broadcast", flat.nbytes)

        def steps() -> Steps:
            peers = self.peers.begin("broadcast")
            if len(flat):
                yield from tree_broadcast(peers, flat, root=opts.rootRank)
            flat.restore()

        return self._start("broadcast", steps(), tensors, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = options_of(opts, GatherOptions)
        mine, root = Flat(inputs[0]), opts.rootRank
        into = [Flat(tensor) for tensor in outputs[0]] if self._rank == root else []
        self._enter("gather", mine.nbytes * self._size)

        def steps() -> Steps:
            yield from gather(self.peers.begin("gather"), mine, into or None, root=root)
            for flat in into:
                flat.restore()

        return self._start("gather", steps(), [flat.given for flat in into], opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = options_of(opts, ScatterOptions)
        into, root = Flat(outputs[0]), opts.rootRank
        parts = [Flat(tensor) for tensor in inputs[0]] if self._rank == root else None
        self._enter("scatter", into.nbytes * self._size)

        def steps() -> Steps:
            yield from scatter(self.peers.begin("scatter"), parts, into, root=root)
            into.restore()

        return self._start("scatter", steps(), [into.given], opts)

    def barrier(self, opts: Any = None) -> Any:
        self._enter("barrier", 0)

        def steps() -> Steps:
            yield from barrier(self.peers.begin("barrier"), Vector(torch.empty(0)))

        return self._start("barrier", steps(), [], options_of(opts, BarrierOptions))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier that reports on rank 0 which ranks did not arrive in time. Raises NotAllArrived."""
        self._monitored += 1
        # To rank 0 and back: an empty message from each rank, a list of all ranks to each.
        self._enter("gather", 0)
        self._enter("scatter", self._size * 8 * self._size)
        seconds = timeout.total_seconds() if timeout is not None and timeout > NO_TIMEOUT else self._timeout_s
        monitored_barrier(
            self.messages, self._rank, self._size,
            number=self._monitored, timeout_s=seconds, wait_all_ranks=wait_all_ranks,
        )  # fmt: skip

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


for _name in (
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base",
    "allgather", "all_gather_single", "_allgather_base", "all_to_all_single", "alltoall_base", "alltoall", "broadcast",
    "gather", "scatter",
):  # fmt: skip
    setattr(ShoalGroup, _name, also_by_name(vars(ShoalGroup)[_name]))


def _divide(values: torch.Tensor, by: int) -> None:
    values = values.detach()
    values.div_(by) if values.is_floating_point() or values.is_complex() else values.floor_divide_(by)


def create(options: Any, _: Any) -> ShoalGroup:
    """Creates a group of this backend for torch.distributed."""
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    # Never this rank's own file: members that choose algorithms by different numbers would deadlock.
    network = agreed() or DEFAULT
    if emulated.emulator is not None:
        network = network_like(emulated.emulator.emulation, network)
    return ShoalGroup(
        options.store, options.group_rank, options.group_size, options.group_id, options.timeout, network, ranks
    )  # fmt: skip

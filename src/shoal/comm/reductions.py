"""All-reduce, reduce and reduce-scatter of the `shoal` backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, ReduceOptions, ReduceScatterOptions

from shoal.comm.c10d_forms import also_by_name, listed, operation_of, options_of
from shoal.comm.collectives.algorithms import ALL_REDUCE
from shoal.comm.collectives.direct import direct_all_gather, direct_reduce_scatter
from shoal.comm.collectives.tree import tree_reduce
from shoal.comm.collectives.two_levels import has_two_levels, two_level_reduce_scatter
from shoal.comm.laid_flat import Flat, as_few, even_parts
from shoal.comm.linked import LinkedGroup
from shoal.comm.peers import Steps
from shoal.comm.sparse import SparsePart
from shoal.comm.vector import Vector, total_bytes
from shoal.comm.wire import even_payload


def _divide(values: torch.Tensor, by: int) -> None:
    values = values.detach()
    values.div_(by) if values.is_floating_point() or values.is_complex() else values.floor_divide_(by)


class Reductions(LinkedGroup):
    """Collectives that reduce."""

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors = listed(tensors)
        opts = options_of(opts, AllreduceOptions)
        operation, average = operation_of(opts.reduceOp)
        if any(tensor.layout == torch.sparse_coo for tensor in tensors):
            return self._allreduce_sparse(tensors, opts, average)
        ready = []
        for flat in as_few(tensors):
            algorithm = self.all_reduce_by(flat.nbytes)
            self._enter("all_reduce", flat.nbytes, self.counted_as(algorithm))
            ready.append((flat, ALL_REDUCE[algorithm]))

        def steps() -> Steps:
            peers = self.peers.begin("all_reduce")
            for flat, all_reduce in ready:
                if peers.size > 1 and flat.nbytes:
                    yield from all_reduce.steps(peers, flat, operation)
                if average:
                    _divide(flat.tensor, self._size)
                flat.restore()

        return self.start("all_reduce", steps(), tensors, opts)

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

        return self.start("all_reduce", steps(), tensors, opts)

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

        return self.start("reduce", steps(), tensors, opts)

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

        return self.start("reduce_scatter", steps(), [output for output, _ in pairs], opts)

    def _parts(self, given: Any) -> list[Vector]:
        if isinstance(given, torch.Tensor):
            return even_parts(Flat(given), self._size)
        return [Flat(tensor) for tensor in given]


also_by_name(
    Reductions,
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "_reduce_scatter_base",
)

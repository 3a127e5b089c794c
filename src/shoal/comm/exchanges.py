"""All-gather, all-to-all, broadcast, gather and scatter of the `shoal` backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ScatterOptions,
)

from shoal.comm.c10d_forms import also_by_name, listed, options_of, tensors_of
from shoal.comm.collectives.direct import direct_all_gather, direct_all_to_all, gather, scatter
from shoal.comm.collectives.tree import tree_broadcast
from shoal.comm.collectives.two_levels import has_two_levels, two_level_all_gather
from shoal.comm.laid_flat import Flat, even_parts, parts_by_rows
from shoal.comm.linked import LinkedGroup
from shoal.comm.peers import Steps
from shoal.comm.vector import Vector, total_bytes
from shoal.comm.wire import even_payload


class Exchanges(LinkedGroup):
    """Collectives that move tensors without changing them."""

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

        return self.start("all_gather", steps(), tensors_of([output for output, _ in pairs]), opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = (),
        input_split_sizes: Any = (),
        opts: Any = None,
    ) -> Any:
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

        return self.start("all_to_all", steps(), [flat.given for flat in into], options_of(opts, AllToAllOptions))

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

        return self.start("broadcast", steps(), tensors, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = options_of(opts, GatherOptions)
        mine, root = Flat(inputs[0]), opts.rootRank
        into = [Flat(tensor) for tensor in outputs[0]] if self._rank == root else []
        self._enter("gather", mine.nbytes * self._size)

        def steps() -> Steps:
            yield from gather(self.peers.begin("gather"), mine, into or None, root=root)
            for flat in into:
                flat.restore()

        return self.start("gather", steps(), [flat.given for flat in into], opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = options_of(opts, ScatterOptions)
        into, root = Flat(outputs[0]), opts.rootRank
        parts = [Flat(tensor) for tensor in inputs[0]] if self._rank == root else None
        self._enter("scatter", into.nbytes * self._size)

        def steps() -> Steps:
            yield from scatter(self.peers.begin("scatter"), parts, into, root=root)
            into.restore()

        return self.start("scatter", steps(), [into.given], opts)


also_by_name(
    Exchanges,
    "allgather",
    "all_gather_single",
    "_allgather_base",
    "all_to_all_single",
    "alltoall_base",
    "alltoall",
    "broadcast",
    "gather",
    "scatter",
)

"""What an optimiser of full parameters sends (LARS, LAMB, Muon), where ranks hold pieces of them.

Each parameter is updated by one of the ranks that hold it, balanced by size. For the bytes p of a rank's piece of a
parameter of n bytes:

    to the owner    all-to-all of p, over parameters of other owners: the gradient, and as much again for the values
                    where no rank has all of them (stage 3, tp, experts in one stack, shared memory)
    and back        all-to-all of n - p, over the parameters that this rank owns

once a step for each type of numbers, among the ranks that shard (uncut parameters), and among those and tp or ep.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from shoal.comm.wire import even_payload
from shoal.common.numbers import balanced
from shoal.estimate.held import Held
from shoal.estimate.placing import Member
from shoal.estimate.traffic import Call
from shoal.layout.forward import ParameterShape


def full_parameter_calls(held: Held, pieces: Mapping[str, int]) -> Iterator[Call]:
    """Of one update; `pieces`: elements of each parameter in this rank's shard. Nothing for element-wise optimisers."""
    placing = held.placing
    found: dict[tuple[str, str], tuple[Member, bool, list[ParameterShape]]] = {}
    for each in held.own() if held.shapes.full_parameters else ():
        cut = held.cut_across(each.name)
        member = placing.pieces(cut)
        if member.ranks > 1 and each.trains and 0 not in each.shape:
            values = cut is not None or placing.zero == 3 or placing.one_memory
            found.setdefault((member.group.axis, each.dtype), (member, values, []))[2].append(each)
    for member, values, params in found.values():
        owners = balanced([prod(each.shape) for each in params], member.ranks)
        there = back = 0
        for each, owner in zip(params, owners, strict=True):
            piece = pieces.get(each.name, 0)
            if owner == member.index:
                back += (prod(each.shape) - piece) * each.itemsize
            else:
                there += piece * each.itemsize * (2 if values else 1)
        for size in (there, back):
            payload = even_payload(bytes_to_others=size, ranks=member.ranks)
            yield member.group.axis, "optimizer", "all_to_all", payload, member.ranks

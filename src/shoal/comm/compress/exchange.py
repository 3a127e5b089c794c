"""How payloads are exchanged: summed where they add, gathered where they do not, in equal or unequal sizes; and a sum
by parts, for codecs that are nearly exact. Whatever is decoded is summed in the order of ranks, so all ranks end with
the same bits. (Where payloads add, the order is the all-reduce's own, which is one for all ranks as well.)
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from shoal.comm.compress.blocks import filled_up
from shoal.comm.compress.codec import Codec
from shoal.comm.compress.method import Draw, Over
from shoal.comm.compress.traffic import divided_up


def summed(payload: torch.Tensor, over: Over) -> torch.Tensor:
    """The sum of all ranks' payloads; the own one stays as it is."""
    total = payload.clone()
    if over.group is not None:
        dist.all_reduce(total, group=over.group)
    return total


def gathered(payload: torch.Tensor, over: Over) -> list[torch.Tensor]:
    """All ranks' payloads of one size, in the order of ranks."""
    if over.group is None:
        return [payload]
    everyone = payload.new_empty(over.size, len(payload))
    dist.all_gather_single(everyone, payload, group=over.group)
    return list(everyone)


def gathered_unequal(payload: torch.Tensor, over: Over) -> list[torch.Tensor]:
    """All ranks' payloads of any size, in the order of ranks: sizes first, then each to each, without padding."""
    if over.group is None:
        return [payload]
    own_size = torch.tensor([len(payload)], dtype=torch.int64, device=payload.device)
    sizes = torch.cat(gathered(own_size, over)).tolist()
    # What stays here is not sent.
    coming = [0 if rank == over.rank else size for rank, size in enumerate(sizes)]
    going = [0 if rank == over.rank else len(payload) for rank in range(over.size)]
    arrived = payload.new_empty(sum(coming))
    if any(sizes):
        dist.all_to_all_single(arrived, payload.repeat(over.size - 1), coming, going, group=over.group)
    parts = list(arrived.split(coming))
    parts[over.rank] = payload
    return parts


def added(payloads: list[torch.Tensor], codec: Codec, like: torch.Tensor, draw: Draw) -> torch.Tensor:
    """The sum of what payloads stand for, in their order."""
    total = codec.decode(payloads[0], len(like), like.dtype, draw)
    for payload in payloads[1:]:
        codec.add(payload, total, draw)
    return total


def summed_by_parts(x: torch.Tensor, codec: Codec, over: Over, draw: Draw) -> torch.Tensor:
    """An all-reduce of encoded parts: each rank decodes and sums one part of all ranks, and sends the sum, encoded
    again, to all. As many bytes as a ring all-reduce of the codes, but sums are made in full precision."""
    size = divided_up(len(x), over.size)
    parts = filled_up(x, over.size * size).view(over.size, size)
    sending = torch.stack([codec.encode(part, draw) for part in parts])
    arrived = sending
    if over.group is not None:
        arrived = torch.empty_like(sending)
        dist.all_to_all_single(arrived, sending, group=over.group)
    mine = added(list(arrived), codec, parts[0], draw)
    totals = [codec.decode(each, size, x.dtype, draw) for each in gathered(codec.encode(mine, draw), over)]
    return torch.cat(totals)[: len(x)]

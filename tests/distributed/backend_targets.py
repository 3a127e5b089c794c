"""The shoal backend on real ranks: every collective against a serial computation, many at once, and what goes wrong."""

from __future__ import annotations

import math
import os
import random
import resource
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm.serial import TYPES, numbers, summed
from shoal.comm.backend import ShoalGroup
from shoal.comm.collectives.algorithms import ALL_REDUCE
from shoal.comm.ledger import BOOK
from shoal.comm.transport.link import PeerLost
from shoal.launch.channel import Channel
from shoal.launch.join import join, leave
from shoal.parallel.apply import parallelize
from shoal.parallel.placement import mesh_of
from shoal.strategy import parse


def _joined(arguments: dict[str, Any]) -> Any:
    os.environ["SHOAL_CARRIER"] = arguments.get("carrier", "auto")
    return join(backend="shoal")


def everything(arguments: dict[str, Any], channel: Channel) -> list[str]:
    """Every collective for every type and size, in every layout; what differs from the serial computation."""
    me = _joined(arguments)
    wrong: list[str] = []
    for size in (0, 1, me.world - 1, me.world, me.world + 1, 10007, *arguments.get("more", ())):
        for dtype in TYPES if size < 1 << 20 else (torch.float32,):
            for strided in (False, True):
                for name, got, expected in _cases(me.rank, me.world, size, dtype, strided):
                    if not torch.equal(got, expected):
                        wrong.append(f"{name} of {size} {dtype}{' strided' if strided else ''}")
    leave()
    return wrong


def _laid(tensor: Tensor, strided: bool) -> Tensor:
    """The same numbers, with gaps between them."""
    if not strided:
        return tensor
    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


def _cases(rank: int, ranks: int, size: int, dtype: torch.dtype, strided: bool) -> Any:
    given = [numbers(each, size, dtype) for each in range(ranks)]
    wide = [numbers(each, ranks * size, dtype) for each in range(ranks)]
    root = ranks - 1
    for algorithm in ALL_REDUCE:
        dist.group.WORLD.algorithm = algorithm
        x = _laid(given[rank].clone(), strided)
        dist.all_reduce(x)
        yield algorithm, x, summed(given)
    dist.group.WORLD.algorithm = "auto"
    x = _laid(given[rank].clone(), strided)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    yield "max", x, torch.stack([g.to(torch.float64) for g in given]).amax(0).to(dtype)
    x = _laid(given[rank].clone(), strided)
    dist.broadcast(x, src=root)
    yield "broadcast", x, given[root]
    x = _laid(given[rank].clone(), strided)
    dist.reduce(x, dst=root)
    yield "reduce", x, summed(given) if rank == root else given[rank]
    out = _laid(torch.zeros(ranks * size, dtype=dtype), strided)
    dist.all_gather_single(out, _laid(given[rank], strided))
    yield "all_gather", out, torch.cat(given)
    out = _laid(torch.zeros(size, dtype=dtype), strided)
    dist.reduce_scatter_single(out, _laid(wide[rank], strided))
    yield "reduce_scatter", out, summed(wide).view(ranks, size)[rank]
    out = _laid(torch.zeros(ranks * size, dtype=dtype), strided)
    dist.all_to_all_single(out, _laid(wide[rank], strided))
    yield "all_to_all", out, torch.cat([w.view(ranks, size)[rank] for w in wide])
    parts = [_laid(torch.zeros(size, dtype=dtype), strided) for _ in range(ranks)]
    dist.gather(_laid(given[rank], strided), parts if rank == root else None, dst=root)
    yield "gather", torch.cat(parts), torch.cat(given) if rank == root else torch.cat(parts)
    out = _laid(torch.zeros(size, dtype=dtype), strided)
    dist.scatter(out, list(wide[root].view(ranks, size)) if rank == root else None, src=root)
    yield "scatter", out, wide[root].view(ranks, size)[rank]
    dist.barrier()


def at_random(arguments: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Random collectives on several groups, asynchronous, finished in another order; messages in between."""
    me = _joined(arguments)
    draw = random.Random(arguments["seed"])
    groups = [dist.group.WORLD, *(dist.new_group(backend="shoal") for _ in range(2))]
    wrong, flying = 0, []
    for number in range(arguments["count"]):
        kind = draw.choice(("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "mail", "barrier"))
        group, size = draw.choice(groups), draw.choice((0, 1, 3, 17, 1000, 40_000))
        options: dict[str, Any] = {"group": group, "async_op": True}
        given = [numbers(each + number, size, torch.float32) for each in range(me.world)]
        wide = [numbers(each + number, me.world * size, torch.float32) for each in range(me.world)]
        if kind == "all_reduce":
            out, expected = given[me.rank].clone(), summed(given)
            works = [dist.all_reduce(out, **options)]
        elif kind == "all_gather":
            out, expected = torch.zeros(me.world * size), torch.cat(given)
            works = [dist.all_gather_single(out, given[me.rank], **options)]
        elif kind == "reduce_scatter":
            out, expected = torch.zeros(size), summed(wide).view(me.world, size)[me.rank]
            works = [dist.reduce_scatter_single(out, wide[me.rank], **options)]
        elif kind == "broadcast":
            source = draw.randrange(me.world)
            out, expected = given[me.rank].clone(), given[source]
            works = [dist.broadcast(out, src=source, **options)]
        elif kind == "all_to_all":
            out, expected = torch.zeros(me.world * size), torch.cat([w.view(me.world, size)[me.rank] for w in wide])
            works = [dist.all_to_all_single(out, wide[me.rank], **options)]
        elif kind == "mail":
            before, behind = (me.rank - 1) % me.world, (me.rank + 1) % me.world
            out, expected = torch.zeros(size), given[before]
            works = [
                dist.isend(given[me.rank], behind, group=group, tag=number),
                dist.irecv(out, before, group=group, tag=number),
            ]
        else:
            out = expected = torch.zeros(0)
            works = [dist.barrier(**options)]
        flying.append((works, out, expected, given, wide))
        while flying and (len(flying) > 8 or draw.random() < 0.3):
            works, out, expected, *_ = flying.pop(draw.randrange(len(flying)))
            for work in works:
                work.wait()
            wrong += not torch.equal(out, expected)
    for works, out, expected, *_ in flying:
        for work in works:
            work.wait()
        wrong += not torch.equal(out, expected)
    leave()
    return {"wrong": wrong}


def bytes_entered(arguments: dict[str, Any], channel: Channel) -> list[tuple[int, int]]:
    """What the Book says of a group, and what its links were given to send."""
    me = _joined(arguments)
    group: ShoalGroup = dist.new_group(backend="shoal")
    BOOK.take()
    before = group.peers.sent.bytes
    for size in (1, 100, 60_000):
        dist.all_reduce(torch.zeros(me.world * size), group=group)
        dist.all_gather_single(torch.zeros(me.world * size), torch.zeros(size), group=group)
        dist.reduce_scatter_single(torch.zeros(size), torch.zeros(me.world * size), group=group)
        dist.all_to_all_single(torch.zeros(me.world * size), torch.zeros(me.world * size), group=group)
    entered = BOOK.take().bytes
    sent = group.peers.sent.bytes - before
    leave()
    return [(entered, sent)]


def survivors(arguments: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """One rank dies without a word while the others wait for each other."""
    me = _joined(arguments)
    channel.say({"pid": os.getpid()})
    dist.all_reduce(torch.zeros(1000))
    if me.rank == arguments["dies"]:
        time.sleep(0.2)
        os.kill(os.getpid(), 9)
    start = time.monotonic()
    try:
        for _ in range(1000):
            dist.all_reduce(torch.zeros(100_000))
    except PeerLost as lost:
        channel.say({"lost": lost.peer, "after_s": time.monotonic() - start, "rank": me.rank})
    return {}


def given_up(arguments: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """A peer that is given up on fails its own messages; others go on."""
    me = _joined(arguments)
    result: dict[str, Any] = {}
    if me.rank == 0:
        group: ShoalGroup = dist.group.WORLD
        hopeless = dist.irecv(torch.zeros(3), 1, tag=7)
        group.messages.give_up(1)
        try:
            hopeless.wait()
        except PeerLost as lost:
            result["lost"] = lost.peer
        out = torch.zeros(4)
        dist.recv(out, 2, tag=8)
        result["from_2"] = out.tolist()
    elif me.rank == 2:
        dist.send(torch.arange(4.0), 0, tag=8)
    leave()
    return result


def emulated_times(arguments: dict[str, Any], channel: Channel) -> dict[str, float]:
    """Milliseconds of an all-reduce over emulated links: the best of a few."""
    join(backend="shoal", emulate=arguments["emulate"])
    group = dist.new_group(backend="shoal")
    found = {}
    for size in arguments["sizes"]:
        x, best = torch.ones(size // 4), float("inf")
        for _ in range(3):
            dist.barrier(group=group)
            start = time.perf_counter()
            dist.all_reduce(x, group=group)
            best = min(best, 1000 * (time.perf_counter() - start))
        found[str(size)] = best
    leave()
    return found


WIDE = 700
"""A layer of more elements than are written under one lock."""


def _in_one_memory(rank: int, world: int) -> Any:
    strategy = parse(f"dp({world}, via=shared())")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, 3))
    mesh = mesh_of(strategy, rank=rank, backend="shoal")
    return parallelize(model, strategy, mesh, optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3))


def in_any_order(arguments: dict[str, Any], channel: Channel) -> list[bool]:
    """Whether three steps end in the same bits when ranks come in another order; with one micro-batch, and with two."""
    me = _joined(arguments)
    torch.manual_seed(me.rank)
    x = torch.randn(8, WIDE)
    found = []
    for micros in (1, 2):
        ends = []
        for order in (1, -1):
            engine = _in_one_memory(me.rank, me.world)
            for step in range(3):
                for micro in range(micros):
                    loss = engine.model(x + micro + step).square().sum()
                    time.sleep(0.02 * ((order * me.rank) % me.world))
                    engine.backward(loss, 8.0, last=micro == micros - 1)
                engine.step()
            ends.append([param.detach().clone() for param in engine.model.parameters()])
            engine.close()
        found.append(all(torch.equal(a, b) for a, b in zip(*ends, strict=True)))
    leave()
    return found


def pages_in_use(arguments: dict[str, Any], channel: Channel) -> dict[str, float]:
    """Resident bytes of the shared blocks over those of the parameters: after steps of one micro-batch, and of two."""
    me = _joined(arguments)
    engine = _in_one_memory(me.rank, me.world)
    parameters = sum(bucket.buffer.bytes for bucket in engine.buckets)
    found = {}
    for name, micros in (("together", 1), ("apart", 2)):
        for micro in range(micros):
            engine.backward(engine.model(torch.ones(2, WIDE)).sum(), 2.0, last=micro == micros - 1)
        engine.step()
        # Only what a process touched is resident in it.
        touched = sum(float(gradient.sum()) for bucket in engine.buckets for gradient in bucket.memory.in_use)
        assert math.isfinite(touched)
        found[name] = _resident("memfd:shoal-block") / parameters
    engine.close()
    leave()
    return found


def _resident(mapped: str) -> int:
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(maxsplit=1)[0]:
            inside = mapped in line
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def few_descriptors(arguments: dict[str, Any], channel: Channel) -> dict[str, int]:
    """Thirty groups under a limit of forty descriptors more than are open."""
    me = _joined(arguments)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = len(os.listdir("/proc/self/fd")) + 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most if arguments["hard"] else hard))
    total = torch.zeros(1)
    for _ in range(30):
        group = dist.new_group(backend="shoal")
        mine = torch.ones(1)
        dist.all_reduce(mine, group=group)
        total += mine
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    leave()
    return {"total": int(total), "world": me.world, "most": most, "soft": soft, "hard": hard}


def hierarchical_counts(arguments: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """What the ledger says of a hierarchical all-reduce, and what the links were given."""
    join(backend="shoal", emulate=arguments["emulate"])
    group = dist.new_group(backend="shoal")
    assert isinstance(group, ShoalGroup)
    group.prefer("hierarchical")
    dist.barrier(group=group)
    BOOK.take()
    before = (group.peers.sent.messages, group.peers.sent.bytes)
    dist.all_reduce(torch.ones(600), group=group)
    (entry,) = BOOK.take().entries.values()
    sent = [now - then for now, then in zip((group.peers.sent.messages, group.peers.sent.bytes), before, strict=True)]
    leave()
    return {"ledger": [entry.messages, entry.bytes], "sent": sent}


def over_hosts(arguments: dict[str, Any], channel: Channel) -> list[str]:
    """What differs from a serial computation, also where three of four ranks make hosts of two and one."""
    me = join(backend="shoal", emulate=arguments["emulate"])
    wrong = []
    for members in (range(me.world), range(me.world - 1)):
        group = dist.new_group(list(members), backend="shoal")
        if me.rank not in members:
            continue
        for part in (0, 1, 5000, 300_000):
            given = [numbers(each, len(members) * part, torch.float32) for each in members]
            mine = torch.empty(part)
            dist.reduce_scatter_single(mine, given[me.rank], group=group)
            if not torch.equal(mine, summed(given).view(len(members), part)[me.rank]):
                wrong.append(f"reduce-scatter of {part} among {len(members)}")
            # In place, as stage 1 of ZeRO asks for it.
            whole = given[me.rank].clone()
            dist.reduce_scatter_single(whole.view(len(members), part)[me.rank], whole, group=group)
            dist.all_gather_single(whole, whole.view(len(members), part)[me.rank], group=group)
            if not torch.equal(whole, summed(given)):
                wrong.append(f"all-gather of {part} among {len(members)}")
    leave()
    return wrong


def sparse_sums(arguments: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Sums of sparse tensors against dense ones: no elements, all on one rank, repeated indices, dense rows, types."""
    me = _joined(arguments)
    wrong, counted = [], []
    for dtype in (torch.float32, torch.float64, torch.int64):
        for sparse_dim, shape in ((1, (11, 3)), (2, (5, 7)), (1, (13,))):
            for least in (0, 1, 40):
                draw = torch.Generator().manual_seed(7 * me.rank + least)
                count = least * me.rank
                at = torch.stack([torch.randint(0, size, (count,), generator=draw) for size in shape[:sparse_dim]])
                values = torch.randint(-9, 9, (count, *shape[sparse_dim:]), generator=draw).to(dtype)
                given = torch.sparse_coo_tensor(at, values, shape, check_invariants=True)
                expected = given.to_dense()
                dist.all_reduce(expected)
                BOOK.take()
                before = dist.group.WORLD.peers.sent.bytes
                dist.all_reduce(given)
                entered = sum(entry.bytes for entry in BOOK.take().entries.values())
                counted.append([entered, dist.group.WORLD.peers.sent.bytes - before])
                if not (given.is_coalesced() and torch.equal(given.to_dense(), expected)):
                    wrong.append(f"{dtype} {shape} {least}")
    try:
        dist.all_reduce(torch.sparse_coo_tensor([[0]], [1.0], (2 + me.rank,), check_invariants=True))
        told = ""
    except ValueError as error:
        told = str(error)
    dist.barrier()
    leave()
    return {"wrong": wrong, "counted": counted, "told": told}


def monitored(arguments: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Monitored barriers: all come; some stay away; all come again."""
    me = _joined(arguments)
    group = dist.group.WORLD
    group.monitored_barrier()
    told = ""
    if me.rank not in arguments["away"]:
        try:
            group.monitored_barrier(timedelta(seconds=1.0), wait_all_ranks=arguments["all"])
        except RuntimeError as error:
            told = str(error)
    else:
        group._monitored += 1  # A rank that was elsewhere: its next barrier is the others' next.
    dist.barrier()
    group.monitored_barrier()
    value = torch.ones(1)
    dist.all_reduce(value)
    leave()
    return {"told": told, "sum": value.item()}

"""Every collective, through torch.distributed's functions and on the group itself, for real ranks to run.

Each entry of a table is a function of (group, rank, ranks) that returns the tensors the collective filled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.group import BACKENDS, PLAIN_SENDS_BYTES
from shoal.comm.ledger import BOOK
from shoal.launch.channel import Channel
from shoal.launch.join import join

N = 6
Call = Callable[[Any, int, int], Sequence[Tensor]]


def own(rank: int, size: int = N) -> Tensor:
    return torch.arange(size, dtype=torch.float32) + 100 * (rank + 1)


def empty(size: int = N) -> Tensor:
    return torch.zeros(size)


def empties(number: int) -> list[Tensor]:
    return [empty() for _ in range(number)]


def owns(rank: int, number: int) -> list[Tensor]:
    return [own(rank) + 10 * each for each in range(number)]


def done(work: Any, *tensors: Tensor) -> Sequence[Tensor]:
    if work is not None:
        work.wait()
    return tensors


def _coalesced(g: Any, r: int, p: int) -> Sequence[Tensor]:
    tensors = owns(r, 2)
    with dist._coalescing_manager(group=g):
        for tensor in tensors:
            dist.all_reduce(tensor, group=g)
    return tensors


def _objects(g: Any, r: int, p: int) -> Sequence[Tensor]:
    (tensor,) = [own(r)]
    dist.broadcast(tensor, 0, group=g)
    return [tensor]


def _around_the_ring(g: Any, r: int, p: int) -> Sequence[Tensor]:
    got = empty()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, own(r), (r + 1) % p, group=g),
            dist.P2POp(dist.irecv, got, (r - 1) % p, group=g),
        ]
    )
    for work in works:
        work.wait()
    return [got]


def _gather(g: Any, r: int, p: int) -> Sequence[Tensor]:
    got = empties(p) if r == 0 else None
    dist.gather(own(r), got, dst=0, group=g)
    return got or []


def _scatter(g: Any, r: int, p: int) -> Sequence[Tensor]:
    got = empty()
    dist.scatter(got, owns(r, p) if r == 0 else None, src=0, group=g)
    return [got]


def _from_anyone(g: Any, r: int, p: int) -> Sequence[Tensor]:
    got = empty()
    if r == 0:
        dist.send(own(r), 1, group=g)
    elif r == 1:
        dist.recv(got, None, group=g)
    return [got]


PUBLIC: dict[str, Call] = {
    "all_reduce": lambda g, r, p: done(dist.all_reduce(t := own(r), group=g), t),
    "all_reduce of two, coalesced": _coalesced,
    "all_reduce_coalesced": lambda g, r, p: done(dist.all_reduce_coalesced(t := owns(r, 2), group=g), *t),
    "reduce": lambda g, r, p: done(dist.reduce(t := own(r), 0, group=g), *([t] if r == 0 else [])),
    "broadcast": _objects,
    "all_gather": lambda g, r, p: done(dist.all_gather(t := empties(p), own(r), group=g), *t),
    "all_gather_single": lambda g, r, p: done(dist.all_gather_single(t := empty(N * p), own(r), group=g), t),
    "all_gather_into_tensor": lambda g, r, p: done(dist.all_gather_into_tensor(t := empty(N * p), own(r), group=g), t),
    "reduce_scatter": lambda g, r, p: done(dist.reduce_scatter(t := empty(), owns(r, p), group=g), t),
    "reduce_scatter_single": lambda g, r, p: done(dist.reduce_scatter_single(t := empty(), own(r, N * p), group=g), t),
    "reduce_scatter_tensor": lambda g, r, p: done(dist.reduce_scatter_tensor(t := empty(), own(r, N * p), group=g), t),
    "all_to_all": lambda g, r, p: done(dist.all_to_all(t := empties(p), owns(r, p), group=g), *t),
    "all_to_all_single": lambda g, r, p: done(dist.all_to_all_single(t := empty(N * p), own(r, N * p), group=g), t),
    "gather": _gather,
    "scatter": _scatter,
    "send and recv": _around_the_ring,
    "recv from anyone": _from_anyone,
    "barrier": lambda g, r, p: done(dist.barrier(group=g)),
    "functional all_reduce": lambda g, r, p: [functional.all_reduce(own(r), "sum", g) + 0],
    "functional all_gather": lambda g, r, p: [functional.all_gather_tensor(own(r), 0, g) + 0],
    "functional reduce_scatter": lambda g, r, p: [functional.reduce_scatter_tensor(own(r, N * p), "sum", 0, g) + 0],
    "functional all_to_all": lambda g, r, p: [functional.all_to_all_single(own(r, N * p), None, None, g) + 0],
}


def _direct_recv(g: Any, r: int, p: int) -> Sequence[Tensor]:
    got = empty()
    receiving = g.recv([got], (r - 1) % p, 5)
    g.send([own(r)], (r + 1) % p, 5).wait()
    return done(receiving, got)


def _direct_recv_anysource(g: Any, r: int, p: int) -> Sequence[Tensor]:
    got = empty()
    receiving = g.recv_anysource([got], 6)
    g.send([own(r)], (r + 1) % p, 6).wait()
    return done(receiving, got)


def _direct_gather(g: Any, r: int, p: int) -> Sequence[Tensor]:
    options = dist.GatherOptions()
    options.rootRank = 1
    got = empties(p) if r == 1 else []
    return done(g.gather([got] if got else [], [own(r)], options), *got)


def _direct_scatter(g: Any, r: int, p: int) -> Sequence[Tensor]:
    options = dist.ScatterOptions()
    options.rootRank = 1
    return done(g.scatter([t := empty()], [owns(r, p)] if r == 1 else [], options), t)


def _direct_reduce(g: Any, r: int, p: int) -> Sequence[Tensor]:
    options = dist.ReduceOptions()
    options.rootRank = 1
    return done(g.reduce([t := own(r)], options), *([t] if r == 1 else []))


DIRECT: dict[str, Call] = {
    "allreduce": lambda g, r, p: done(g.allreduce([t := own(r)]), t),
    "allreduce_coalesced": lambda g, r, p: done(g.allreduce_coalesced(t := owns(r, 2)), *t),
    "reduce_scatter": lambda g, r, p: done(g.reduce_scatter([t := empty()], [owns(r, p)]), t),
    "reduce_scatter_single": lambda g, r, p: done(g.reduce_scatter_single(t := empty(), own(r, N * p)), t),
    "reduce_scatter_single_coalesced": lambda g, r, p: done(
        g.reduce_scatter_single_coalesced([t := empty()], [own(r, N * p)]), t
    ),
    "reduce_scatter_tensor_coalesced": lambda g, r, p: done(
        g.reduce_scatter_tensor_coalesced([t := empty()], [own(r, N * p)]), t
    ),
    "_reduce_scatter_base": lambda g, r, p: done(g._reduce_scatter_base(t := empty(), own(r, N * p)), t),
    "allgather": lambda g, r, p: done(g.allgather([t := empties(p)], [own(r)]), *t),
    "allgather_coalesced": lambda g, r, p: done(
        # The outputs are one list a rank, each with a tensor for every input.
        g.allgather_coalesced(t := [empties(2) for _ in range(p)], owns(r, 2)),
        *[x for each in t for x in each],
    ),
    "allgather_into_tensor_coalesced": lambda g, r, p: done(
        g.allgather_into_tensor_coalesced([t := empty(N * p)], [own(r)]), t
    ),
    "all_gather_single": lambda g, r, p: done(g.all_gather_single(t := empty(N * p), own(r)), t),
    "all_gather_single_coalesced": lambda g, r, p: done(
        g.all_gather_single_coalesced([t := empty(N * p)], [own(r)]), t
    ),
    "_allgather_base": lambda g, r, p: done(g._allgather_base(t := empty(N * p), own(r)), t),
    "alltoall": lambda g, r, p: done(g.alltoall(t := empties(p), owns(r, p)), *t),
    "alltoall_base": lambda g, r, p: done(g.alltoall_base(t := empty(N * p), own(r, N * p), [], []), t),
    "all_to_all_single": lambda g, r, p: done(g.all_to_all_single(t := empty(N * p), own(r, N * p), [], []), t),
    "broadcast": lambda g, r, p: done(g.broadcast([t := own(r)]), t),
    "reduce": _direct_reduce,
    "gather": _direct_gather,
    "scatter": _direct_scatter,
    "send": _direct_recv,
    "recv": _direct_recv,
    "recv_anysource": _direct_recv_anysource,
    "barrier": lambda g, r, p: done(g.barrier()),
    "monitored_barrier": lambda g, r, p: done(g.monitored_barrier()),
    "all_gather_single by name": lambda g, r, p: done(g.all_gather_single(input=own(r), output=(t := empty(N * p))), t),
    "broadcast of one tensor": lambda g, r, p: done(g.broadcast(t := own(r), root=1), t),
    "allreduce of one tensor": lambda g, r, p: done(g.allreduce(tensor=(t := own(r)), op=dist.ReduceOp.MAX), t),
    "allgather by name": lambda g, r, p: done(
        g.allgather(input_tensors=[own(r)], output_tensors=[t := empties(p)]), *t
    ),
}


def compare_with_plain(arguments: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """For each call: whether it fills what plain Gloo fills, and what it enters into the ledger."""
    me = join(backend=BACKENDS[arguments.get("backend", "gloo")])
    plain = dist.new_group(backend="gloo")
    found: dict[str, Any] = {}
    for name, call in {"public": PUBLIC, "direct": DIRECT}[arguments["table"]].items():
        expected, trouble = _attempt(call, plain, me.rank, me.world)
        dist.barrier(group=plain)
        BOOK.take()
        got, own_trouble = _attempt(call, dist.group.WORLD, me.rank, me.world)
        ledger = BOOK.take().to_json()
        same = len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        found[name] = {"same": same, "trouble": own_trouble, "plain_trouble": trouble, "ledger": ledger}
        dist.barrier(group=plain)
    return found


def _attempt(call: Call, group: Any, rank: int, ranks: int) -> tuple[Sequence[Tensor], str]:
    try:
        return call(group, rank, ranks), ""
    except (RuntimeError, TypeError, ValueError) as error:
        return [], str(error).splitlines()[0]


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
SHAPES = ((1,), (7,), (3, 5), (2, 3, 4), (1, 1), (1000,), (331, 1601))
"""The last one is gathered by plain sends in every dtype, the others by Gloo."""


def against_serial(arguments: dict[str, Any], channel: Channel) -> list[str]:
    """Every case of the two replaced collectives that differs from what one process computes."""
    me = join(backend=BACKENDS[arguments.get("backend", "gloo")])
    wrong = []
    for dtype in DTYPES:
        for shape in SHAPES:
            for average in (False, True):
                if average and not dtype.is_floating_point:
                    continue
                wrong += _reduce_scatter_case(me.rank, me.world, dtype, shape, average=average)
            wrong += _all_gather_case(me.rank, me.world, dtype, shape)
    return wrong


def _values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)  # Small integers: sums are exact in bfloat16.


def _reduce_scatter_case(
    rank: int, ranks: int, dtype: torch.dtype, shape: tuple[int, ...], *, average: bool
) -> list[str]:
    whole = (ranks * shape[0], *shape[1:])
    everyone = torch.stack([_values(r, whole, dtype) for r in range(ranks)])
    expected = everyone.sum(0).view(ranks, *shape)[rank]
    expected = expected / ranks if average else expected
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    mine = everyone[rank].clone()
    strided = torch.stack([mine, mine], dim=-1)[..., 0]
    laid_out: dict[str, tuple[Tensor, Tensor]] = {
        "plain": (mine, torch.zeros(shape, dtype=dtype)),
        "strided input": (strided, torch.zeros(shape, dtype=dtype)),
        "strided output": (mine, torch.zeros(*shape, 2, dtype=dtype)[..., 0]),
        "flat input": (mine.reshape(-1), torch.zeros(shape, dtype=dtype)),
        "wide input": (mine.reshape(1, -1), torch.zeros(expected.numel(), dtype=dtype)),
    }
    wrong = []
    flights = []
    for name, (given, output) in laid_out.items():
        before = given.clone()
        flights.append((name, given, before, output, dist.reduce_scatter_single(output, given, op=op, async_op=True)))
    for name, given, before, output, work in reversed(flights):
        work.wait()
        work.wait()  # A second wait must not add anything twice.
        if not torch.equal(output.reshape(-1), expected.reshape(-1)) or not torch.equal(given, before):
            wrong.append(f"reduce_scatter {name} {dtype} {shape} average={average}")
        if not work.is_completed():
            wrong.append(f"reduce_scatter {name}: not completed after wait")
    return wrong


def _all_gather_case(rank: int, ranks: int, dtype: torch.dtype, shape: tuple[int, ...]) -> list[str]:
    parts = [_values(r, shape, dtype) for r in range(ranks)]
    expected = torch.cat([part.reshape(-1) for part in parts])
    whole = (ranks * shape[0], *shape[1:])
    in_place = torch.zeros(whole, dtype=dtype)
    in_place.view(ranks, *shape)[rank].copy_(parts[rank])
    laid_out: dict[str, tuple[Tensor, Tensor]] = {
        "plain": (parts[rank], torch.zeros(whole, dtype=dtype)),
        "stacked output": (parts[rank], torch.zeros(ranks, *shape, dtype=dtype)),
        "flat output": (parts[rank], torch.zeros(expected.numel(), dtype=dtype)),
        "strided input": (torch.stack([parts[rank]] * 2, dim=-1)[..., 0], torch.zeros(whole, dtype=dtype)),
        "in place": (in_place.view(ranks, *shape)[rank], in_place),
    }
    flights = [
        (name, output, dist.all_gather_single(output, given, async_op=True))
        for name, (given, output) in laid_out.items()
    ]
    wrong = []
    for name, output, work in reversed(flights):
        work.wait()
        if not torch.equal(output.reshape(-1), expected):
            wrong.append(f"all_gather {name} {dtype} {shape}")
    return wrong


def who_carries(arguments: dict[str, Any], channel: Channel) -> dict[str, str]:
    """Whose work object each collective returns: Shoal's where it replaces Gloo's, else torch's."""
    me = join(backend=BACKENDS[arguments.get("backend", "gloo")])
    whole, part = torch.ones(3 * me.world), torch.ones(3)
    large = torch.ones(PLAIN_SENDS_BYTES // 4 // me.world)
    works = {
        "sum": dist.reduce_scatter_single(part, whole, async_op=True),
        "mean": dist.reduce_scatter_single(part, whole, op=dist.ReduceOp.AVG, async_op=True),
        "max": dist.reduce_scatter_single(part, whole, op=dist.ReduceOp.MAX, async_op=True),
        "small gather": dist.all_gather_single(whole, part, async_op=True),
        "gather": dist.all_gather_single(large.new_empty(large.numel() * me.world), large, async_op=True),
    }
    for work in works.values():
        work.wait()
    return {name: type(work).__module__.partition(".")[0] for name, work in works.items()}


def polled_to_completion(arguments: dict[str, Any], channel: Channel) -> list[bool]:
    """Nobody waits: a collective that says it is completed must have its result in place."""
    me = join(backend=BACKENDS[arguments.get("backend", "gloo")])
    output = torch.zeros(3)
    work = dist.reduce_scatter_single(output, torch.ones(3 * me.world), async_op=True)
    while not work.is_completed():
        pass
    scattered = bool((output == me.world).all())
    gathered = torch.zeros(3 * me.world)
    work = dist.all_gather_single(gathered, torch.ones(3), async_op=True)
    future = work.get_future()
    future.wait()
    return [scattered, bool((gathered == 1).all())]


def other_operations(arguments: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Whether reductions that are neither sum nor mean come out as plain Gloo has them."""
    me = join(backend=BACKENDS[arguments.get("backend", "gloo")])
    plain = dist.new_group(backend="gloo")
    found: dict[str, Any] = {}
    for op in ("MAX", "MIN", "PRODUCT"):
        outputs = []
        for group in (plain, dist.group.WORLD):
            output = torch.zeros(4)
            dist.reduce_scatter_single(output, own(me.rank, 4 * me.world), op=getattr(dist.ReduceOp, op), group=group)
            outputs.append(output.tolist())
        found[op] = outputs[0] == outputs[1]
    return found


def gradients(arguments: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """The largest difference of gradients from those over plain Gloo, for DDP and fully_shard."""
    me = join(backend=BACKENDS[arguments.get("backend", "gloo")])
    plain = dist.new_group(backend="gloo")
    found: dict[str, list[Tensor]] = {}
    calls = {}
    for name, group in (("plain", plain), ("counted", dist.group.WORLD)):
        for wrapper in ("ddp", "fully_shard"):
            torch.manual_seed(0)
            model: Any = nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 5)).double()
            if wrapper == "ddp":
                model = DistributedDataParallel(model, process_group=group)
            else:
                mesh = DeviceMesh.from_group(group, "cpu")
                for layer in (model[0], model[2]):
                    fully_shard(layer, mesh=mesh)
                fully_shard(model, mesh=mesh)
            BOOK.take()
            inputs = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(me.rank))
            model(inputs).square().sum().backward()
            calls[f"{name} {wrapper}"] = sorted({row["kind"] for row in BOOK.take().to_json()})
            found[f"{name} {wrapper}"] = [
                g.full_tensor() if hasattr(g := p.grad, "full_tensor") else g for p in model.parameters()
            ]
    return {
        "calls": calls,
        "differences": {
            wrapper: max(
                float((a - b).abs().max())
                for a, b in zip(found[f"plain {wrapper}"], found[f"counted {wrapper}"], strict=True)
            )
            for wrapper in ("ddp", "fully_shard")
        },
    }


def refused(arguments: dict[str, Any], channel: Channel) -> list[str]:
    join()
    words = []
    for call in (
        lambda: dist.group.WORLD.split_group([0]),
        lambda: dist.group.WORLD.merge_remote_group(None, 2),
    ):
        try:
            call()
        except RuntimeError as error:
            words.append(str(error))
    return words


def last_calls(arguments: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """What the book keeps of the last collective, by group; and a world of one that sends nothing."""
    me = join(backend=BACKENDS[arguments.get("backend", "gloo")])
    pair = dist.new_group([0, 1])
    with BOOK.during("gradient"):
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
    if me.rank < 2:
        dist.broadcast(torch.ones(1), 0, group=pair)
    return {label: [call.number, call.kind, call.phase] for label, call in BOOK.last.items()}

"""What the ranks of a calibration do: the same collectives by every backend and every algorithm, turn by turn.

A round goes through all contestants at all sizes, so that whatever else the machine does affects all of them alike. The
slowest rank's time counts. Several hosts are measured as they are: links inside the first of them and links between
their first ranks. On one host the links between hosts are TCP on loopback.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shoal.calibration.findings import MESSAGES
from shoal.comm.collectives.algorithms import ALL_REDUCE
from shoal.comm.group import BACKENDS, registered
from shoal.launch.channel import Channel
from shoal.launch.devices import devices_here
from shoal.launch.join import emulate_links, join, leave

HOST_BACKENDS = ("shoal", "gloo")
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
ALGORITHMS = tuple(name for name in ALL_REDUCE if not ALL_REDUCE[name].by_hosts)
BYTES_A_TURN = 2 << 20
MOST_REPEATS = 40
FEWEST_ROUNDS = 3
PROBE_S = 0.02
SLOW_LINKS = "{}x1, 10us, 20GB/s | 50us, 2Gb/s"
BACKGROUND_BYTES = 8 << 20
POLL_S = 2e-3
"""Long enough for polling to cost nothing compared with sending."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """Something to be timed. `call` is None on ranks that take no part in it."""

    where: str
    """"backends", or the links it runs on: "inside" or "between"."""
    what: str
    by: str
    nbytes: int
    call: Callable[[], Any] | None


def measure(arguments: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """On every rank: seconds of each contestant, by round."""
    # What is measured is this machine as it is, whatever an earlier file says or a variable emulates.
    os.environ.update(SHOAL_CALIBRATION="", SHOAL_EMULATE="", SHOAL_CARRIER="auto")
    me = join(backend=BACKENDS["shoal"])
    world: Any = dist.new_group(backend=BACKENDS["shoal"])
    hosts: tuple[tuple[int, ...], ...] = world.peers.hosts
    links = _links(hosts)
    backends = {"shoal": world, "gloo": dist.new_group(backend=BACKENDS["gloo"])}
    here = devices_here(me.local_rank)
    if here.kind is not None and here.backend is not None and here.count >= max(len(host) for host in hosts):
        torch.accelerator.set_device_index(me.local_rank)
        backends[here.backend] = dist.new_group(backend=registered(here.backend))
    contestants = [
        each
        for nbytes in arguments["sizes"]
        for each in (*_of_backends(backends, nbytes, me.world), *_of_links(links, nbytes, me.rank))
    ]
    rounds, start_s = arguments["rounds"], time.monotonic()
    turns: list[list[float]] = []
    held_s = 0.0
    while len(turns) <= rounds:
        if len(turns) > FEWEST_ROUNDS and _longer_than(arguments["seconds"], start_s, world):
            break
        held_s += _held(world)
        turns.append([])
        for number, contestant in enumerate(contestants, 1):
            turns[-1].append(_timed(contestant, world))
            if number == len(contestants) or contestants[number].nbytes != contestant.nbytes:
                done = (len(turns) - 1) * len(contestants) + number
                channel.say({"event": "measured", "done": done, "of": (rounds + 1) * len(contestants)})
    # Of ranks that outnumber the cores each can have its share only.
    due_s = PROBE_S * len(turns) * min(1.0, len(os.sched_getaffinity(0)) / max(len(host) for host in hosts))
    disturbed = max(0.0, 1 - held_s / due_s)
    machine = _machine(arguments, me, world, channel) if arguments.get("machine") and len(hosts) == 1 else {}
    # The first round warmed up. The slowest rank's time counts.
    slowest = torch.tensor([*turns[1:], [disturbed] * len(contestants)], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=world)
    leave()
    rows = [
        {"where": c.where, "what": c.what, "by": c.by, "bytes": c.nbytes, "seconds": slowest[:-1, number].tolist()}
        for number, c in enumerate(contestants)
    ]
    return {
        "rows": rows,
        "ranks": me.world,
        "hosts": len(hosts),
        "torch": torch.__version__,
        "links": {name: len(ranks) for name, (ranks, _) in links.items()},
        "disturbed": float(slowest[-1, 0]),
        **machine,
    }


def _machine(arguments: dict[str, Any], me: Any, world: Any, channel: Channel) -> dict[str, Any]:
    """What each rank of a host computes while the others do the same."""
    from shoal.calibration.codecs import measure_codecs
    from shoal.calibration.operators import OPTIMISERS, measure_bandwidth, measure_operators
    from shoal.calibration.overheads import COUNTS, measure_overheads

    def meet() -> None:
        dist.barrier(group=world)

    def said(done: int, of: int) -> None:
        channel.say({"event": "measured", "what": "operators", "done": done, "of": of})

    rounds = arguments["machine"]
    found = {
        "machine": {
            "operators": measure_operators(rounds=rounds, meet=meet, said=said),
            "byte_s": measure_bandwidth(rounds=rounds, meet=meet),
            "overheads": measure_overheads(
                world=me.world, rank=me.rank, backend=BACKENDS["shoal"], rounds=rounds, meet=meet
            ),
            "codecs": measure_codecs(rounds=max(2, rounds), together=meet),
            "counts": COUNTS,
            "optimizers": list(OPTIMISERS),
            "ranks": me.world,
        }
    }
    # Links on which bytes have to wait, as they would between hosts.
    emulate_links(SLOW_LINKS.format(me.world), me.rank, me.world, BACKENDS["shoal"])
    found["machine"]["background_byte_s"] = _background_byte_s(dist.new_group(backend=BACKENDS["shoal"]), rounds=rounds)
    return found


def _background_byte_s(group: Any, *, rounds: int) -> list[float]:
    """The core's time for each byte of an all-reduce between hosts that runs in the background."""
    values, found = torch.zeros(BACKGROUND_BYTES // 4), []
    for _ in range(rounds + 1):
        dist.barrier(group=group)
        before_s = time.process_time()
        work: Any = dist.all_reduce(values, group=group, async_op=True)
        while not work.is_completed():
            time.sleep(POLL_S)
        work.wait()
        found.append((time.process_time() - before_s) / BACKGROUND_BYTES)
    return found[1:]


def _held(everyone: Any) -> float:
    """Seconds for which this rank had a core while it wanted one for PROBE_S; the rest went to other programs."""
    dist.barrier(group=everyone)
    start_s, held_s = time.perf_counter(), time.thread_time()
    while time.perf_counter() - start_s < PROBE_S:
        pass
    return time.thread_time() - held_s


def _longer_than(seconds: float, since_s: float, everyone: Any) -> bool:
    """Whether any rank has measured for so long: all have to stop after the same round."""
    took_s = torch.tensor([time.monotonic() - since_s])
    dist.all_reduce(took_s, op=dist.ReduceOp.MAX, group=everyone)
    return float(took_s) > seconds


def _links(hosts: tuple[tuple[int, ...], ...]) -> dict[str, tuple[tuple[int, ...], Any]]:
    """For each kind of link the ranks that are joined by it, and their group. Every rank makes every group."""
    links = {}
    inside = max(hosts, key=len)
    if len(inside) > 1:
        links["inside"] = (inside, dist.new_group(list(inside), backend=BACKENDS["shoal"]))
    if len(hosts) > 1:
        between = tuple(host[0] for host in hosts)
    else:
        os.environ["SHOAL_CARRIER"] = "tcp"
        between = inside
    links["between"] = (between, dist.new_group(list(between), backend=BACKENDS["shoal"]))
    os.environ["SHOAL_CARRIER"] = "auto"
    return links


def _of_backends(backends: dict[str, Any], nbytes: int, world: int) -> list[Contestant]:
    found = []
    elements = nbytes // 4 // world * world
    in_host = tuple(torch.zeros(count) for count in (elements, elements, elements // world))
    for name, group in backends.items():
        on_host = name in HOST_BACKENDS
        full, other, part = in_host if on_host else (each.to(_accelerator()) for each in in_host)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(dist.all_reduce, full, group=group),
            "reduce_scatter": partial(dist.reduce_scatter_single, part, full, group=group),
            "all_gather": partial(dist.all_gather_single, full, part, group=group),
            "all_to_all": partial(dist.all_to_all_single, other, full, group=group),
        }
        found += [Contestant("backends", kind, name, nbytes, calls[kind]) for kind in KINDS]
        if on_host:
            found.append(Contestant(MESSAGES, "send", name, nbytes, _message(full, group)))
    # Backend after backend within a kind: rivals are timed in the same moment.
    return sorted(found, key=lambda each: (*KINDS, "send").index(each.what))


def _accelerator() -> torch.device:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, torch.accelerator.current_device_index())


def _message(values: torch.Tensor, group: Any) -> Callable[[], Any] | None:
    """To the next rank and back; None on ranks beyond the second."""
    rank = dist.get_rank(group)
    if rank > 1:
        return None

    def call() -> None:
        ways = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
        for way in ways:
            way(values, group=group, group_dst=1 - rank) if way is dist.send else way(
                values, group=group, group_src=1 - rank
            )

    return call


def _of_links(links: dict[str, tuple[tuple[int, ...], Any]], nbytes: int, rank: int) -> list[Contestant]:
    found = []
    values = torch.zeros(nbytes // 4)
    for name, (ranks, group) in links.items():
        for algorithm in ALGORITHMS:
            call = _all_reduce_by(group, algorithm, values) if rank in ranks else None
            found.append(Contestant(name, "all_reduce", algorithm, nbytes, call))
    return found


def _all_reduce_by(group: Any, algorithm: str, values: torch.Tensor) -> Callable[[], Any]:
    def call() -> None:
        group.prefer(algorithm)
        dist.all_reduce(values, group=group)

    return call


def _timed(contestant: Contestant, everyone: Any) -> float:
    dist.barrier(group=everyone)
    if contestant.call is None:
        return 0.0
    repeats = max(2, min(MOST_REPEATS, BYTES_A_TURN // contestant.nbytes))
    start_s = time.perf_counter()
    for _ in range(repeats):
        contestant.call()
    if contestant.where == "backends" and contestant.by not in HOST_BACKENDS:
        torch.accelerator.synchronize()
    return (time.perf_counter() - start_s) / repeats / (2 if contestant.where == MESSAGES else 1)

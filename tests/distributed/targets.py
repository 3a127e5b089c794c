"""Functions that the tests of starting and ending run on real ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.ledger import BOOK
from shoal.launch.channel import Channel
from shoal.launch.join import JoinError, join, leave

FOREVER_S = 600.0


def add_up(arguments: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """The sum of all ranks' numbers, and what a rank sees of itself."""
    join()
    value = torch.tensor(float(channel.rank))
    dist.all_reduce(value)
    return {"rank": channel.rank, "world": channel.world, "sum": value.item(), "pid": os.getpid()}


def echo(arguments: dict[str, Any], channel: Channel) -> Any:
    return arguments["value"]


def surroundings(arguments: dict[str, Any], channel: Channel) -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "rendezvous": os.environ.get("SHOAL_RENDEZVOUS"),
        "asked": os.environ.get(arguments.get("name", "")),
        "directory": os.getcwd(),
        "is_local": channel.is_local,
        "started_with": open("/proc/self/environ", "rb").read().decode(errors="replace"),
    }


def modules_loaded(arguments: dict[str, Any], channel: Channel) -> list[str]:
    """Those of the named modules that this rank has without having imported them."""
    return [name for name in arguments["names"] if name in sys.modules]


def say_much(arguments: dict[str, Any], channel: Channel) -> float:
    """Many messages to a slow listener; the time the rank itself spent on saying them."""
    start_s = time.monotonic()
    for number in range(arguments["messages"]):
        channel.say({"number": number, "text": "ü\n" * 500})
    return time.monotonic() - start_s


def join_and_leave_twice(arguments: dict[str, Any], channel: Channel) -> list[float]:
    found = []
    for _ in range(2):
        me = join()
        value = torch.ones(3) * me.rank
        dist.all_reduce(value)
        found.append(value.sum().item())
        leave()
    return found


def raise_while_others_wait(arguments: dict[str, Any], channel: Channel) -> None:
    """Rank `failing` raises; the others sit in an all_reduce it never enters."""
    me = join()
    channel.say({"pid": os.getpid(), "rendezvous": os.environ["SHOAL_RENDEZVOUS"]})
    dist.barrier()
    if me.rank == arguments["failing"]:
        if arguments.get("for_user"):
            raise JoinError("this is for the person who started it\nand has two lines")
        raise KeyError("the cause ✂\nsecond line")
    dist.all_reduce(torch.ones(4))


def end_without_a_word(arguments: dict[str, Any], channel: Channel) -> None:
    me = join()
    channel.say({"pid": os.getpid()})
    dist.barrier()
    if me.rank == arguments["failing"]:
        if "signal" in arguments:
            os.kill(os.getpid(), arguments["signal"])
        os._exit(arguments["status"])
    dist.all_reduce(torch.ones(4))


def never_enter(arguments: dict[str, Any], channel: Channel) -> None:
    """Rank 1 stops communicating after three collectives; the others enter the fourth and wait."""
    me = join()
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
    if me.rank == 1:
        compute_without_end(arguments)
    with BOOK.during("gradient"):
        dist.all_reduce(torch.ones(2))


def compute_without_end(arguments: dict[str, Any]) -> None:
    if "signal" in arguments:
        os.kill(os.getpid(), arguments["signal"])
    time.sleep(FOREVER_S)


def compute_long(arguments: dict[str, Any], channel: Channel) -> str:
    """Slower than the watch's own steps, but within the time allowed."""
    me = join()
    if me.rank == 1:
        time.sleep(arguments["seconds"])
    dist.all_reduce(torch.ones(2))
    return "done"


def until_stopped(arguments: dict[str, Any], channel: Channel) -> str:
    """Steps of a collective each, until any rank was asked to stop; or deaf to it."""
    join()
    channel.say({"pid": os.getpid(), "event": "at work"})
    while True:
        stop = torch.tensor(float(channel.stop_requested and not arguments.get("deaf")))
        dist.all_reduce(stop)
        if stop.item():
            return "stopped"
        time.sleep(0.01)


def leave_threads_behind(arguments: dict[str, Any], channel: Channel) -> str:
    """A user's thread that never ends, and a signal handler of its own."""
    threading.Thread(target=time.sleep, args=(FOREVER_S,)).start()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return "result"


def many_pending_at_the_end(arguments: dict[str, Any], channel: Channel) -> float:
    """The root of a broadcast is done long before its peers have read everything."""
    me = join()
    value = torch.full((4 << 20,), float(me.rank + 1))
    dist.broadcast(value, src=0)
    if me.rank:
        time.sleep(0.2)
    return value.mean().item()


def exit_quietly(arguments: dict[str, Any], channel: Channel) -> None:
    raise SystemExit(3)


def not_json(arguments: dict[str, Any], channel: Channel) -> Any:
    return {"tensor": torch.ones(2)}


def join_by_variables(arguments: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Joins as if another launcher had started this process with the given variables."""
    for name in ("SHOAL_RENDEZVOUS", "SHOAL_TOKEN"):
        del os.environ[name]
    os.environ.update(arguments["each"][channel.rank])
    try:
        me = join(meet_s=arguments["meet_s"][channel.rank])
    except ValueError as error:  # Of Shoal's own, written for the user.
        return {"error": str(error)}
    value = torch.tensor(float(me.rank + 1))
    dist.all_reduce(value)
    return {"sum": value.item(), "rank": me.rank, "backend": me.backend, "listens": _listening_addresses()}


def _listening_addresses() -> list[str]:
    """The local addresses on which this process accepts connections, as the kernel writes them."""
    inodes = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in Path(table).read_text().splitlines()[1:]:
            cells = row.split()
            if cells[3] == "0A" and f"socket:[{cells[9]}]" in inodes:
                found.append(cells[1].partition(":")[0])
    return found

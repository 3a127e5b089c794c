"""Runs a function on several ranks of this machine: the order each rank gets, and the way back to the caller.

Nothing here imports torch: ranks are forked off a server that has it (`forkserver.py`), and `supervise.py`
supervises them until the last one has exited.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.launch.forkserver import server_for
from shoal.launch.rendezvous import private_directory
from shoal.launch.sessions import COMING, SESSIONS_FOLDER
from shoal.launch.supervise import LOST, LOST_FOLDER, OnMessage, Supervision

if TYPE_CHECKING:
    from shoal.launch.channel import Channel

Target = Callable[[dict[str, Any], "Channel"], Any]
"""What a rank runs: it takes the arguments and the line to its parent, and returns a JSON value."""


def warm_up(*modules: str, threads_per_rank: int | None = None, environment: Mapping[str, str] | None = None) -> None:
    """Starts the server in the background, so that it has torch and these modules by the time ranks are asked for."""
    server_for(_environment(threads_per_rank, environment)).load(modules)


def run_ranks(
    target: Target | str,
    arguments: dict[str, Any],
    *,
    ranks: int,
    on_message: OnMessage | None = None,
    hang_after_s: float = 300.0,
    threads_per_rank: int | None = None,
    environment: Mapping[str, str] | None = None,
    islands: Sequence[Sequence[int]] = (),
    rejoin: bool = False,
    coming: int = 0,
) -> list[Any]:
    """Calls `target(arguments, channel)` on each rank; its results by rank.

    `target` is a function that ranks can import by its name, or that name, "package.module:function". Arguments,
    messages and results are JSON values. `threads_per_rank` is OMP_NUM_THREADS if that is set, else 1. Ctrl-C asks the
    ranks to stop (`channel.stop_requested`) and waits for them; a second one kills them. Of several `islands` any but
    the first may be killed once all ranks allow it (`channel.allow_loss`): the results of its ranks are None then.
    With `rejoin` ranks that were lost are started again; `coming`: ranks after the others that are started as well, to
    be taken up while the rest work (`sessions.py`).
    Raises RankFailed, or RankHung where no rank moved for `hang_after_s`.
    """
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}: expected at least 1")
    name = target if isinstance(target, str) else name_of(target)
    variables = _environment(threads_per_rank, environment)
    with private_directory() as directory:
        more = {LOST_FOLDER: str(directory / LOST)} if len(islands) > 1 else {}
        sessions = directory / "sessions" if len(islands) > 1 and (rejoin or coming) else None
        if sessions is not None:
            more[SESSIONS_FOLDER] = str(sessions)
        for path in more.values():
            os.mkdir(path)
        orders = [
            _order(
                name, arguments, variables, rank=rank, world=ranks, hang_after_s=hang_after_s, store=directory / "store"
            )
            for rank in range(ranks + coming)
        ]
        for order in orders:
            order["environment"] |= more
        return Supervision(
            orders,
            on_message or _ignore,
            str(directory),
            server_for(variables),
            islands,
            sessions,
            range(ranks, ranks + coming),
        ).run()


def run_worlds(
    target: Target | str,
    arguments: Sequence[dict[str, Any]],
    *,
    ranks: int,
    on_message: OnMessage | None = None,
    hang_after_s: float = 300.0,
    threads_per_rank: int | None = None,
) -> list[list[Any]]:
    """As `run_ranks`, for several worlds of `ranks` ranks at a time that know nothing of each other: one for each of
    the `arguments`. Each has ranks from 0 on, and a meeting point of its own. Messages and failures count the ranks of
    all worlds together: rank r is rank r % ranks of world r // ranks. The first failure ends all of them."""
    name = target if isinstance(target, str) else name_of(target)
    variables = _environment(threads_per_rank, None)
    with private_directory() as directory:
        orders = [
            _order(
                name,
                given,
                variables,
                rank=rank,
                world=ranks,
                hang_after_s=hang_after_s,
                store=directory / f"store-{world}",
                before=world * ranks,
            )
            for world, given in enumerate(arguments)
            for rank in range(ranks)
        ]
        found = Supervision(orders, on_message or _ignore, str(directory), server_for(variables)).run()
    return [found[start : start + ranks] for start in range(0, len(found), ranks)]


def _order(
    target: str,
    arguments: dict[str, Any],
    variables: dict[str, str],
    *,
    rank: int,
    world: int,
    hang_after_s: float,
    store: Path,
    before: int = 0,
) -> dict[str, Any]:
    """What one rank is told to do."""
    return {
        "target": target,
        "arguments": arguments,
        "rank": rank,
        "world": world,
        "hang_after_s": hang_after_s,
        "threads": int(variables["OMP_NUM_THREADS"]),
        "sys_path": [path or os.getcwd() for path in sys.path],
        "argv": sys.argv,
        "directory": os.getcwd(),
        "environment": _rank_environment(variables, rank, world, store, hang_after_s, before=before),
    }


def name_of(target: Target) -> str:
    """The "package.module:function" by which another process finds a function."""
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
    if module in (None, "__main__") or getattr(sys.modules.get(module), name, None) is not target:
        raise ValueError(
            f"{target!r} cannot be run by ranks: they import it by its name, and no module has it under {name!r}; "
            "define it at the top level of a module that is imported, not of the script that is run"
        )
    return f"{module}:{name}"


def _ignore(rank: int, message: dict[str, Any]) -> None:
    pass


def _environment(threads: int | None, environment: Mapping[str, str] | None) -> dict[str, str]:
    variables = {**os.environ, **(environment or {})}
    if threads is None:
        given = variables.get("OMP_NUM_THREADS", "")
        threads = int(given) if given.isdecimal() else 1
    if threads < 1:
        raise ValueError(f"threads_per_rank is {threads}: expected at least 1")
    variables["OMP_NUM_THREADS"] = str(threads)
    return variables


LEFT_OUT = ("TORCHELASTIC_", "MASTER_", LOST_FOLDER, SESSIONS_FOLDER, COMING)
"""What of this process's environment its ranks do not get: it may be a rank itself."""


def _rank_environment(
    variables: dict[str, str], rank: int, world: int, store: Path, hang_after_s: float, *, before: int
) -> dict[str, str]:
    """`before`: ranks of other worlds that come first on this host, and take its first devices."""
    own = {k: v for k, v in variables.items() if not k.startswith(LEFT_OUT)}
    own |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(before + rank),
        "LOCAL_WORLD_SIZE": str(world),
    }
    return own | {"SHOAL_RENDEZVOUS": str(store), "SHOAL_HANG_AFTER_S": str(hang_after_s)}

"""Becoming a rank: from the environment a process was started in to an initialised torch.distributed.

Three ways lead in: the launcher's private rendezvous file, the variables that torchrun sets (`engines.py` sets them
for MPI and Slurm), or nothing at all, which is a world of one. All keys of a job lie under its token and all values are
signed with it, so that a process with another token cannot join the job or impersonate its ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.emulate import WrongEmulation, parse_emulation
from shoal.comm.group import BACKENDS, register_backends, registered
from shoal.comm.mesh import Members
from shoal.comm.network import agree_on
from shoal.comm.shared_block import SharedBlock
from shoal.comm.transport import emulated
from shoal.comm.transport.signed_store import SignedStore, StoreNotSigned, StoreTimeout
from shoal.comm.transport.token import derive, is_loopback, job_token
from shoal.launch.agree import agree
from shoal.launch.devices import devices_here
from shoal.launch.engines import adopt

MEET_S = 300.0
"""How long ranks wait for each other at the start; hosts of a batch system may start minutes apart."""
LEAVE_S = 30.0
"""How long a rank that is done stays for the others."""
LONGEST_S = 1e7
"""A bound on timeouts that torch can still represent."""


class JoinError(ValueError):
    """The ranks of a job could not be brought together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """This process's place in the job."""

    rank: int
    world: int
    local_rank: int
    device: torch.device
    backend: str
    """The backend its groups are made with, as torch.distributed names it."""
    store: SignedStore
    """For small values among the ranks, outside of the process groups."""
    timeout_s: float = 0.0
    """How long a collective may take: NCCL's and Gloo's time-out. 0: the program's own groups were taken."""


_joined: Rank | None = None
_times_joined = 0
_adopted = False


def join(
    *, backend: str | None = None, timeout_s: float | None = None, meet_s: float = MEET_S, emulate: str | None = None
) -> Rank:
    """Makes this process a rank of its job; a second call gives the same Rank.

    `backend` is a name of torch.distributed ("gloo" is the plain one); without it SHOAL_BACKEND's is taken, or the
    counting backend for this machine's devices: accelerators, if every rank has its own, else host memory.
    `timeout_s` bounds a collective (1800, or more where a hang may take longer to be one), `meet_s` the wait for the
    other ranks. `emulate` describes a cluster (`comm/emulate.py`) whose links the shoal backend is to imitate;
    without it SHOAL_EMULATE does. A program that has called init_process_group itself keeps its own world group, and
    groups made in addition are counted.
    """
    global _joined, _times_joined, _adopted
    if _joined is not None:
        return _joined
    register_backends()
    described = emulate or os.environ.get("SHOAL_EMULATE")
    _adopted = dist.is_initialized()
    if _adopted:
        base: dist.Store = dist.distributed_c10d._get_default_store()
        rank, world = dist.get_rank(), dist.get_world_size()
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
    else:
        adopt(os.environ)
        base, rank, world, local_rank = _meeting_place(os.environ, meet_s)
    token = job_token() if world > 1 else b"alone"
    # A rank that comes to a run under way has not joined as often as the others: a rendezvous serves once.
    prefix = _prefix(token, os.environ, 0 if "@" in os.environ.get("SHOAL_RENDEZVOUS", "") else _times_joined)
    raw_store = dist.PrefixStore(prefix, base)
    store = SignedStore(raw_store, token, prefix)
    _times_joined += 1
    if world > 1:
        store = _meet(store, rank, world, meet_s)
    try:
        agreed = agree(
            store, rank, world, devices_here(local_rank), asked=backend, emulates=bool(described), seconds=meet_s
        )
    except StoreTimeout as error:
        raise JoinError(
            f"rank {rank} waited {meet_s:g} s for {', '.join(error.keys)} in the store after all ranks had joined: "
            "another rank has ended, or another process deletes keys of the store at MASTER_ADDR."
        ) from error
    except dist.DistError as error:
        raise JoinError(_lost(rank)) from error
    agree_on(agreed.network)
    if agreed.note is not None and rank == 0:
        warnings.warn(agreed.note, stacklevel=2)
    device = torch.device("cpu")
    if agreed.device is not None:
        device = torch.device(agreed.device, local_rank)
        torch.accelerator.set_device_index(local_rank)
    chosen = backend or registered(agreed.backend)
    # Longer than the watch waits: its report of a hang is better than that a collective timed out.
    hang_after_s = float(os.environ.get("SHOAL_HANG_AFTER_S", 0))
    limit_s = 0.0 if _adopted else timeout_s or min(max(1800.0, 2 * hang_after_s), LONGEST_S)
    if not _adopted:
        time_limit = timedelta(seconds=limit_s)
        try:
            dist.init_process_group(
                chosen,
                store=raw_store,
                rank=rank,
                world_size=world,
                timeout=time_limit,
                device_id=None if agreed.device is None else device,
            )
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise JoinError(_lost(rank)) from error
    if described:
        emulate_links(described, rank, world, chosen)
    _joined = Rank(
        rank=rank, world=world, local_rank=local_rank, device=device, store=store, backend=chosen, timeout_s=limit_s
    )
    return _joined


def emulate_links(described: str, rank: int, world: int, backend: str) -> None:
    """From now on links are made to behave like those of the cluster described. All ranks call it alike."""
    wanted = parse_emulation(described)
    if backend != BACKENDS["shoal"]:
        raise WrongEmulation(f"--emulate {described!r}: only the shoal backend emulates links; this job has {backend}")
    if wanted.world != world:
        raise WrongEmulation(
            f"--emulate {described!r}: {wanted.hosts} hosts of {wanted.per_host} ranks are {wanted.world} ranks, and "
            f"the job has {world}"
        )
    if world > 1:
        everyone = Members("world", tuple(range(world)), rank, dist.group.WORLD)
        block = SharedBlock(everyone, 8 * wanted.hosts, keep_open=True)
        emulated.emulate(emulated.Emulator(wanted, emulated.Wires(block.view, block.descriptor)))


def current() -> Rank | None:
    """What `join` gave, as long as this process has not left."""
    return _joined


def leave(*, lost: Collection[int] = ()) -> None:
    """Takes this process out of its job, together with the other ranks but those that were lost; it may join again."""
    global _joined
    joined, _joined = _joined, None
    agree_on(None)
    if joined is None or _adopted or not dist.is_initialized():
        return
    if joined.world > 1:
        # A rank that closes its connections while a peer still reads from them would fail the peer.
        joined.store.set(f"left/{joined.rank}", "left")
        with contextlib.suppress(StoreTimeout, StoreNotSigned, dist.DistError):
            joined.store.get_all([f"left/{rank}" for rank in range(joined.world) if rank not in lost], LEAVE_S)
    emulated.emulate(None)
    dist.destroy_process_group()


def _meeting_place(environment: Mapping[str, str], meet_s: float) -> tuple[dist.Store, int, int, int]:
    if not ("RANK" in environment or "WORLD_SIZE" in environment):
        return dist.HashStore(), 0, 1, 0
    needed = ["RANK", "WORLD_SIZE"]
    rendezvous = environment.get("SHOAL_RENDEZVOUS")
    if not rendezvous:
        needed += ["MASTER_ADDR", "MASTER_PORT"]
    missing = [name for name in needed if not environment.get(name)]
    if missing:
        raise JoinError(
            f"{', '.join(missing)} not set, while {'RANK' if 'RANK' in environment else 'WORLD_SIZE'} is: "
            "a rank needs all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. torchrun and `shoal launch` "
            "set them; to run alone, unset them all."
        )
    rank, world = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if not 0 <= rank < world:
        raise JoinError(f"RANK is {rank} and WORLD_SIZE {world}: expected 0 <= RANK < WORLD_SIZE.")
    local_rank = _number(environment, "LOCAL_RANK") if environment.get("LOCAL_RANK") else rank
    if rendezvous:
        _stay_on_loopback()
        return dist.FileStore(rendezvous, world), rank, world, local_rank
    return _tcp_store(environment, rank, world, meet_s), rank, world, local_rank


def _tcp_store(environment: Mapping[str, str], rank: int, world: int, meet_s: float) -> dist.Store:
    address, port = environment["MASTER_ADDR"], _number(environment, "MASTER_PORT")
    if not 0 < port < 65536:
        raise JoinError(f"MASTER_PORT is {port}: expected a port from 1 to 65535.")
    local = is_loopback(address)
    if local:
        _stay_on_loopback()
    agent_listens = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listens = rank == 0 and not agent_listens
    wait: dict[str, Any] = {"timeout": timedelta(seconds=meet_s)}
    try:
        if listens and address in ("localhost", "127.0.0.1"):
            # torch would listen on every interface; handed a socket of ours it stays on this host.
            listener = listen_on(port)
            return dist.TCPStore(
                address, port, world, True, master_listen_fd=listener.detach(), wait_for_workers=False, **wait
            )
        if listens:
            return dist.TCPStore(address, port, world, True, multi_tenant=True, wait_for_workers=False, **wait)
        return dist.TCPStore(address, port, world, False, wait_for_workers=False, **wait)
    except dist.DistError as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise JoinError(_port_taken(port)) from error
        raise JoinError(
            f"rank {rank} could not reach the rendezvous {address}:{port} within {meet_s:g} s. Check "
            "that rank 0 was started, that MASTER_ADDR names its host, and that no firewall or other program "
            "holds that port."
        ) from error


def listen_on(port: int) -> socket.socket:
    """A listening socket on loopback; port 0 takes any free one. A taken port raises a JoinError that says so."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if isinstance(error, PermissionError):
            raise JoinError(f"port {port} may not be used by this user; choose one above 1023.") from error
        raise JoinError(_port_taken(port)) from error
    return listener


def _port_taken(port: int) -> str:
    return (
        f"port {port} is in use by another program on this host. Choose another (MASTER_PORT, or --port); "
        "`shoal launch` without --port takes a free one."
    )


def _meet(store: SignedStore, rank: int, world: int, meet_s: float) -> SignedStore:
    """Waits until every rank is here, so that a missing one is named rather than waited for without end. Gives the
    store of this session."""
    try:
        # Something fresh from each rank makes the session: what was signed in an earlier one does not count in it.
        if not store.claim(f"here/{rank}", secrets.token_hex(16)):
            raise JoinError(f"two processes claim to be rank {rank}; each rank of a job must have its own RANK.")
        found = store.get_all([f"here/{other}" for other in range(world)], meet_s)
        current = store.session("\0".join(found[f"here/{other}"] for other in range(world)))
        # A rank that went on at once would no longer look after its value for those that still read it.
        current.set(f"process/{rank}", json.dumps([socket.gethostname(), os.getpid()]))
        current.get_all([f"process/{other}" for other in range(world)], meet_s)
        return current
    except dist.DistError as error:
        raise JoinError(_lost(rank)) from error
    except StoreTimeout as error:
        numbers = ", ".join(key.partition("/")[2] for key in error.keys)
        raise JoinError(
            f"rank{'s' if len(error.keys) > 1 else ''} {numbers} of {world} did not connect within {meet_s:g} s. "
            "Check that every rank was started and holds the same SHOAL_TOKEN: ranks with another token "
            "belong to another job."
        ) from error


def _lost(rank: int) -> str:
    return (
        f"rank {rank} lost the rendezvous while it waited for the others: the process that hosts it "
        "(rank 0, or the launcher) gave up or ended, and its own message has the reason."
    )


def process_of(store: SignedStore, rank: int) -> tuple[str, int]:
    """The host and process of a rank, as it has signed them."""
    host, pid = json.loads(store.look(f"process/{rank}") or '["an unknown host", 0]')
    return str(host), int(pid)


def _prefix(token: bytes, environment: Mapping[str, str], times_joined: int) -> str:
    names = [environment.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")]
    return f"shoal/{derive(token, 'prefix', *names).hex()}/{times_joined}"


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise JoinError(f"{name} is {environment[name]!r}: expected a whole number.") from None


def _stay_on_loopback() -> None:
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])

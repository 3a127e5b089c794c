"""Ranks that another engine has started: MPI and Slurm say in variables of their own who a process is.

`adopt` turns them into the variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), which the
rest of Shoal reads. Variables of torchrun come first: it may run inside a Slurm step. MPI comes before Slurm, because
mpirun starts its daemons with srun. A batch shell and a step of one task are no ranks: Shoal starts its own there.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

LOOPBACK = "127.0.0.1"


class EngineError(ValueError):
    """Ranks of an engine that cannot find each other, or a command that is not for several of them."""


class Names(NamedTuple):
    """The variables of one MPI."""

    library: str
    rank: str
    world: str
    local_rank: str
    local_world: str


MPI = (
    Names(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Names(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Names("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def adopt(environment: MutableMapping[str, str]) -> str | None:
    """Sets the variables of torchrun from those of MPI or Slurm. Returns the engine's name, None if there is none.

    Raises:
        EngineError: Ranks are on several hosts and nothing says where rank 0 is.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return None
    for names in MPI:
        if _number(environment, names.world) > 1 and names.rank in environment:
            _adopt_mpi(environment, names)
            return names.library
    if _number(environment, "SLURM_STEP_NUM_TASKS") > 1 and "SLURM_PROCID" in environment:
        _adopt_slurm(environment)
        return "Slurm"
    return None


def _adopt_mpi(environment: MutableMapping[str, str], names: Names) -> None:
    world = _number(environment, names.world)
    if "MASTER_ADDR" not in environment:
        if _number(environment, names.local_world) != world:
            raise EngineError(
                f"mpirun has started {world} ranks on several hosts and does not say where rank 0 is; name its host: "
                "mpirun -x MASTER_ADDR=HOST ... (-genv MASTER_ADDR HOST under MPICH)"
            )
        environment["MASTER_ADDR"] = LOOPBACK
    job = environment.get("PMIX_NAMESPACE") or environment.get("SLURM_JOB_ID", "")
    _set(environment, environment[names.rank], world, environment.get(names.local_rank, "0"), job)


def _adopt_slurm(environment: MutableMapping[str, str]) -> None:
    if "MASTER_ADDR" not in environment:
        several = _number(environment, "SLURM_STEP_NUM_NODES") > 1
        nodes = environment.get("SLURM_STEP_NODELIST", "")
        environment["MASTER_ADDR"] = first_host(nodes) if several else LOOPBACK
    step = f"{environment.get('SLURM_JOB_ID', '')}.{environment.get('SLURM_STEP_ID', '')}"
    world = _number(environment, "SLURM_STEP_NUM_TASKS")
    _set(environment, environment["SLURM_PROCID"], world, environment.get("SLURM_LOCALID", "0"), step)


def _set(environment: MutableMapping[str, str], rank: str, world: int, local_rank: str, job: str) -> None:
    environment.update({"RANK": rank, "WORLD_SIZE": str(world), "LOCAL_RANK": local_rank})
    # All ranks of a job compute the same port, and two jobs of a host hardly ever do.
    environment.setdefault("MASTER_PORT", str(20_000 + zlib.crc32(job.encode()) % 20_000))


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `node[03-05,9]` -> `node03`."""
    found = re.match(r"([^\[\],]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    if found is None:
        raise EngineError(f"SLURM_STEP_NODELIST is {nodes!r}: expected hosts; set MASTER_ADDR to that of rank 0")
    return "".join(part or "" for part in found.groups())


def refuse_several(verb: str, environment: Mapping[str, str]) -> None:
    """Refuses a command that starts ranks of its own where a launcher has started it several times."""
    world = _number(environment, "WORLD_SIZE")
    if world > 1:
        raise EngineError(
            f"a launcher has started `shoal {verb}` {world} times, and each would start ranks of its own; run it once, "
            "without srun, mpirun or torchrun"
        )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else 0

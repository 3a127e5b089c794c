"""What the ranks of a job have to agree on before they can talk: the devices, the backend, and what links cost.

Rank 0 decides for all, by its own variables and its own calibration file, and by the devices that all ranks report.
Ranks that chose algorithms by different numbers would wait for each other without end.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from shoal.comm.calibration import read_calibration
from shoal.comm.network import DEFAULT, LinkTimes, NetworkTimes
from shoal.comm.transport.signed_store import SignedStore
from shoal.launch.devices import DevicesHere


class CannotAgree(ValueError):
    """Rank 0 cannot decide as things are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreed:
    """What rank 0 decided."""

    backend: str
    """Without the prefix of its counting group."""
    device: str | None
    """The kind of accelerator on which every rank computes; None for host memory."""
    network: NetworkTimes
    note: str | None = None
    """Why accelerators that are there are not used."""


def agree(
    store: SignedStore, rank: int, world: int, here: DevicesHere, *, asked: str | None, emulates: bool, seconds: float
) -> Agreed:
    """The decision of rank 0. `asked` is the backend that the caller names. A refusal reaches every rank."""
    store.set(f"device/{rank}", json.dumps(asdict(here)))
    if rank == 0:
        try:
            measured = read_calibration()
            everyone = [DevicesHere(**json.loads(store.get(f"device/{other}", seconds))) for other in range(world)]
            chosen, note = choose(
                asked, everyone, calibrated=measured.backend if measured is not None else None, emulates=emulates
            )
        except ValueError as error:
            store.set("agreed", json.dumps({"refused": str(error)}))
            raise
        network = measured.network if measured is not None else DEFAULT
        device = here.kind if here.backend is not None and chosen == here.backend else None
        agreed: dict[str, Any] = {"backend": chosen, "device": device, "network": asdict(network), "note": note}
        store.set("agreed", json.dumps(agreed))
    else:
        agreed = json.loads(store.get("agreed", seconds))
    if "refused" in agreed:
        raise CannotAgree(agreed["refused"])
    levels = {level: LinkTimes(**times) for level, times in agreed["network"].items()}
    network = NetworkTimes(**levels)
    return Agreed(backend=agreed["backend"], device=agreed["device"], network=network, note=agreed["note"])


def choose(
    asked: str | None, everyone: list[DevicesHere], *, calibrated: str | None, emulates: bool
) -> tuple[str, str | None]:
    """The backend, and why accelerators are left unused (None where they are used, or there are none).

    A backend that is asked for decides where tensors lie. Otherwise accelerators are used if every rank has one of its
    own and of the same kind.
    """
    first = everyone[0]
    variable = os.environ.get("SHOAL_BACKEND") or None
    wanted, source = (asked, "--backend") if asked is not None else (variable, "SHOAL_BACKEND")
    wanted = None if wanted is None else wanted.removeprefix("shoal-")
    own = first.backend
    if wanted is not None:
        if wanted not in ("shoal", "gloo", own):
            here = f"shoal, gloo or {own}" if own else "shoal or gloo (there is no accelerator here)"
            raise CannotAgree(f"{source} {wanted}: expected {here}")
        without = [rank for rank, each in enumerate(everyone) if not each.has_own or each.kind != first.kind]
        if wanted == own and without:
            rank = without[0]
            raise CannotAgree(
                f"{source} {wanted}: rank {rank} has no {first.kind} device of its own, since its host has "
                f"{everyone[rank].count} and it is rank {everyone[rank].local_rank} there; start fewer ranks on that "
                f"host, or leave {source} out to compute in host memory"
            )
        return wanted, None
    if own is None or emulates:
        return default_backend(calibrated, emulates=emulates), None
    if all(each.has_own and each.kind == first.kind for each in everyone):
        return own, None
    most = max(each.local_rank for each in everyone) + 1
    fewest = min(each.count if each.kind == first.kind else 0 for each in everyone)
    note = (
        f"a host has {most} ranks and {fewest} {first.kind} device{'' if fewest == 1 else 's'}: all ranks compute in "
        "host memory. Start one rank for each device to use them"
    )
    return default_backend(calibrated), note


def default_backend(calibrated: str | None = None, *, emulates: bool = False) -> str:
    """For tensors in host memory: what was measured to be fastest; otherwise Shoal's own where the system has what it
    needs (anonymous files and their like), and Gloo elsewhere. Links are emulated by Shoal's own only."""
    if not (hasattr(os, "memfd_create") and hasattr(os, "eventfd")):
        return "gloo"
    return calibrated if calibrated is not None and not emulates else "shoal"

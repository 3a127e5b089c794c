"""What the ranks of a job have to agree on before they can talk: the backend, and what they take links to cost.

Rank 0 decides for all, by its own variables and its own calibration file, whatever the others have. Ranks that chose
algorithms by different numbers would wait for each other without end.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict

from shoal.comm.calibration import read_calibration
from shoal.comm.group import BACKENDS
from shoal.comm.network import DEFAULT, LinkTimes, Network
from shoal.comm.transport.signed_store import SignedStore


class CannotAgree(ValueError):
    """Rank 0 cannot decide as things are."""


def agree(store: SignedStore, rank: int, *, emulates: bool, seconds: float) -> tuple[str, Network]:
    """The backend for tensors in host memory, and the network. What keeps rank 0 from deciding is told to all."""
    if rank == 0:
        try:
            measured = read_calibration()
            chosen = default_backend(measured.backend if measured is not None else None, emulates=emulates)
        except ValueError as error:
            store.set("agreed", json.dumps({"refused": str(error)}))
            raise
        network = measured.network if measured is not None else DEFAULT
        store.set("agreed", json.dumps({"backend": chosen, "network": asdict(network)}))
        return chosen, network
    said = json.loads(store.get("agreed", seconds))
    if "refused" in said:
        raise CannotAgree(said["refused"])
    return said["backend"], Network(**{level: LinkTimes(**times) for level, times in said["network"].items()})


def default_backend(calibrated: str | None = None, *, emulates: bool = False) -> str:
    """SHOAL_BACKEND if set; otherwise what was measured to be fastest; otherwise Shoal's own where the system has what
    it needs (anonymous files and their like), and Gloo elsewhere. Links are emulated by Shoal's own only."""
    asked = os.environ.get("SHOAL_BACKEND")
    if asked and asked not in BACKENDS:
        raise CannotAgree(f"SHOAL_BACKEND is {asked!r}: expected {', '.join(BACKENDS)}")
    if asked:
        return asked
    if not (hasattr(os, "memfd_create") and hasattr(os, "eventfd")):
        return "gloo"
    return calibrated if calibrated is not None and not emulates else "shoal"

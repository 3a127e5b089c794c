"""Steps of several strategies on the same ranks, and what each rank counted of one."""

from __future__ import annotations

from typing import Any

from shoal.comm.ledger import BOOK
from shoal.job import load_job
from shoal.launch.join import join, leave
from shoal.runtime.setup import prepare
from shoal.strategy import parse


def counted(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """For each strategy: the ledger of its third step."""
    me = join()
    job = load_job(arguments["job"])
    found = {}
    for text in arguments["strategies"]:
        ready = prepare(job, parse(text), rank=me.rank, backend=me.backend)
        for step in range(3):
            BOOK.take()
            ready.runner.step(step, 0)
        found[text] = BOOK.take().without("shapes", "agreement").to_json()
        ready.engine.close()
    leave()
    return found

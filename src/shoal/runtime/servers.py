"""Parameter servers of a run: workers connect to them, and a rank that only serves does so until the workers leave."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.backend import ShoalGroup
from shoal.comm.compress.compressor import Compressor
from shoal.comm.follow import Announcer, follow
from shoal.comm.json_exchange import only_among
from shoal.comm.ledger import BOOK, Book
from shoal.job import Job
from shoal.job.elementwise import probe
from shoal.job.probe_layouts import attributes_of
from shoal.job.random_optimizer import without_draws
from shoal.launch.join import current
from shoal.parallel.apply import recipe_of
from shoal.parallel.engine import Engine
from shoal.parallel.runnable import NotRunnable
from shoal.parallel.server.messages import Post
from shoal.parallel.server.remote import RemoteOptimizer
from shoal.parallel.server.serve import Server
from shoal.runtime.float64 import KeepFloat64
from shoal.runtime.step import build_model
from shoal.strategy import Strategy
from shoal.strategy.islands import is_loose
from shoal.strategy.seats import seats_of
from shoal.strategy.terms.sync import Served

AXIS = "ps"
_sessions = 0


def announcer(strategy: Strategy) -> Announcer | None:
    """Where ranks only serve: what tells them of the groups that workers make. Once for each mesh."""
    global _sessions
    place = current()
    if not strategy.servers or place is None:
        return None
    _sessions += 1
    return Announcer(place.store, _sessions)


def _rule(strategy: Strategy) -> Served:
    rule = strategy.axes[0].term.sync  # type: ignore[attr-defined]
    assert isinstance(rule, Served)
    return rule


def _compressor(strategy: Strategy) -> Compressor | None:
    """How workers compress what they push."""
    term = strategy.axes[0].term.compress  # type: ignore[attr-defined]
    return term if isinstance(term, Compressor) else None


def connect(engine: Engine, strategy: Strategy, *, seed: int, dtype: torch.dtype | None = None) -> None:
    """Hands the optimiser of an engine to its servers, if it has some. All workers call it alike. `seed`: of what
    compression draws; `dtype`: of a proof."""
    seats, mesh, owner = engine.placement.seats, engine.placement.mesh, engine.owner
    if seats is None:
        return
    if engine.update_draws is not None or engine.optimizer.needs_closure:
        why = "draws random numbers" if engine.update_draws is not None else "computes the loss again"
        name = type(engine.optimizer.optimizer).__name__
        raise NotRunnable(f"{strategy}: {name} {why} in its step, and servers only have gradients; use via=allreduce()")
    marked = [name for name, param in engine.model.named_parameters() if attributes_of(param)]
    if marked and not owner.recipe.elementwise:
        raise NotRunnable(
            f"{strategy}: the model sets attributes on {marked[0]}, which an optimiser of full parameters may read, "
            "and servers do not have them; use via=allreduce()"
        )
    if strategy.servers:
        only_among(engine.placement.world)
    groups = [mesh.of_all_ranks(AXIS) for _ in range(2)]
    _require_shoal(groups[0], strategy)
    if engine.device.type != "cpu":
        raise NotRunnable(f"{strategy}: servers hold parameters in host memory, and this model is on {engine.device}")
    server, codec = None, _compressor(strategy)
    if seats.colocated and mesh.rank in seats.servers:
        posts = [Post(group, Book()) for group in groups]
        server = Server(
            seats,
            mesh.rank,
            owner.recipe,
            _rule(strategy),
            engine.clip,
            *posts,
            losses=_losses(strategy),
            compress=None if codec is None else (codec, seed),
            around=_exactly(dtype),
        )
    posts, place = [Post(group, BOOK) for group in groups], engine.placement
    remote = RemoteOptimizer(
        seats,
        mesh.rank,
        owner.buckets,
        list(owner.recipe.labels),
        *posts,
        together=not is_loose(strategy.axes[0].term),
        by_tickets=_rule(strategy).by_tickets,
        server=server,
        # Those along cp and spatial hold the same gradients, and each has a place of its own at the servers.
        times=lambda bucket: place.multiplicity(bucket.family) * place.context.size * place.planes.size,
        compress=None if codec is None else (codec, seed, engine.clip),
        elementwise=owner.recipe.elementwise,
    )
    owner.serve(remote)


def serve_here(
    job: Job,
    strategy: Strategy,
    *,
    rank: int,
    backend: str | None,
    dtype: torch.dtype | None = None,
    watch: Callable[[], None] = lambda: None,
    at_step: Callable[[int], None] = lambda step: None,
) -> dict[str, Any]:
    """On a rank that only serves: from the making of groups to the end of the last worker. What it sent."""
    global _sessions
    place, seats = current(), seats_of(strategy)
    assert place is not None
    assert seats is not None
    _sessions += 1
    book = Book()
    groups = follow(place.store, _sessions, backend, [AXIS, AXIS])
    _require_shoal(groups[0], strategy)
    model = build_model(job, dtype)
    tried = probe(without_draws(job.optimizer), model, job.options)
    recipe = recipe_of(model, job.optimizer, job.options, elementwise=tried.elementwise)
    posts = [Post(group, book) for group in groups]
    codec = _compressor(strategy)
    server = Server(
        seats,
        rank,
        recipe,
        _rule(strategy),
        job.clip,
        *posts,
        losses=_losses(strategy),
        watch=watch,
        at_step=at_step,
        compress=None if codec is None else (codec, job.seed),
        around=_exactly(dtype),
    )
    server.run()
    for group in groups:
        dist.destroy_process_group(group)
    return {"sent_bytes": book.take().bytes}


def _exactly(dtype: torch.dtype | None) -> Any:
    """In a proof optimisers compute in float64, also those that ask for less (Muon)."""
    return KeepFloat64 if dtype == torch.float64 else nullcontext


def _losses(strategy: Strategy) -> bool:
    return is_loose(strategy.axes[0].term)


def _require_shoal(group: Any, strategy: Strategy) -> None:
    if not isinstance(group, ShoalGroup):
        raise NotRunnable(f"{strategy}: parameter servers need the shoal backend; leave --backend out")


def is_server(strategy: Strategy, rank: int) -> bool:
    """Whether a rank only serves."""
    return rank >= strategy.workers

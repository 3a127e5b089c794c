"""What the tests of compressed training run on real ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distributed import proofs
from shoal.checkpoint.restore import restore
from shoal.checkpoint.save import open_checkpoint, save
from shoal.comm.compress.method import Method
from shoal.comm.ledger import BOOK
from shoal.job import constant, load_job, no_options
from shoal.launch.join import Rank, join, leave
from shoal.parallel import apply
from shoal.parallel.kept_errors import errors
from shoal.runtime import setup
from shoal.runtime.setup import Prepared, prepare
from shoal.strategy import parse
from shoal.strategy.contract import Contract, contract
from shoal.strategy.terms.compress import none


class Lossless(Method):
    """A compression that sends everything, of all but small tensors: what is left to test is the way there and back."""

    def pays(self, shape: Sequence[int], itemsize: int, *, ranks: int = 2) -> bool:
        return prod(shape) >= 64


@contextmanager
def lossless() -> Iterator[None]:
    def method(term: Any, *, clip: float | None = None) -> Method:
        return Lossless(none())

    def exact(strategy: Any, facts: Any = None) -> Contract:
        return replace(contract(strategy, facts), kind="exact")

    before, promised = apply.Method, proofs.contract
    apply.Method, proofs.contract = method, exact
    try:
        yield
    finally:
        apply.Method, proofs.contract = before, promised


@contextmanager
def on_hosts(of: int) -> Iterator[None]:
    """Ranks believe to be on hosts of so many ranks."""
    before = setup.host_of
    setup.host_of = lambda rank: f"host {rank // of}"
    try:
        yield
    finally:
        setup.host_of = before


def prove_lossless(arguments: dict[str, Any], channel: Any) -> list[dict[str, Any]]:
    """As `prove_many`, with a compression that loses nothing."""
    with lossless(), on_hosts(arguments.get("per_host", 1)):
        return proofs.prove_many(arguments, channel)


def _ready(me: Rank, spec: str, strategy: str, *, dtype: torch.dtype | None = None, frozen: bool = False) -> Prepared:
    job = load_job(spec)
    if frozen:
        # A rate of zero leaves the parameters alone, and a momentum of one sums up what the optimiser was given.
        sum_up = partial(torch.optim.SGD, lr=0.0, momentum=1.0)
        job = replace(job, optimizer=sum_up, options=no_options, schedule=constant, clip=None)
    return prepare(job, parse(strategy), rank=me.rank, backend=me.backend, dtype=dtype)


def _train(ready: Prepared, first: int, stop: int, *, same_batch: bool = False) -> list[str]:
    """The steps; how their ledgers differ from what was predicted."""
    unlike, counter = [], 0
    for _ in range(first):
        counter = ready.runner.order.next(counter)
    for step in range(first, stop):
        BOOK.take()
        ready.runner.step(step, counter)
        counted = BOOK.take().without("shapes")
        if step > first:
            unlike += ready.differences(counted)
        if not same_batch:
            counter = ready.runner.order.next(counter)
    return unlike


def _summed(ready: Prepared, pieces: Any) -> dict[str, torch.Tensor]:
    """Pieces of all ranks added up, as whole parameters of the model."""
    engine = ready.engine
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, (shape, _) in engine.shapes.items()}
    for piece in pieces:
        part = engine.part_of(piece.name)
        whole = total[piece.name] if part is None else torch.zeros(part.local_shape(total[piece.name].shape))
        mine = torch.zeros(whole.shape, dtype=torch.float64).view(-1)
        mine[piece.start : piece.start + piece.values.numel()] = piece.values.double()
        if part is None:
            total[piece.name] += mine.view(whole.shape)
        else:
            spread = torch.zeros_like(total[piece.name])
            part.fill(spread, mine.view(whole.shape))
            total[piece.name] += spread
    for name in sorted(total):
        dist.all_reduce(total[name])
    return total


def conserve(arguments: dict[str, Any], channel: Any) -> list[dict[str, Any]]:
    """For each case: four steps on one batch with the parameters held; how far the sum of what the optimiser was given
    and what was kept back is from four dense gradients, of the largest element."""
    me, found, steps = join(), [], 4
    for spec, strategy, plain in arguments["cases"]:
        dense = _ready(me, spec, plain, dtype=torch.float64, frozen=True)
        _train(dense, 0, 1, same_batch=True)
        wanted = _summed(dense, (piece for key, piece in dense.engine.owner.state() if key == "momentum_buffer"))
        dense.engine.close()
        ready = _ready(me, spec, strategy, dtype=torch.float64, frozen=True)
        unlike = _train(ready, 0, steps, same_batch=True)
        given = _summed(ready, (piece for key, piece in ready.engine.owner.state() if key == "momentum_buffer"))
        assert ready.engine.compression is not None
        families = {slot.name: bucket.family for bucket in ready.engine.buckets for slot in bucket.buffer.slots}
        kept = _summed(
            ready,
            (
                piece
                for key, piece in errors(ready.engine.compression)
                if ready.engine.placement.writes(families[piece.name])
            ),
        )
        apart = max(
            float((given[name] + kept[name] - steps * wanted[name]).abs().max()) / float(wanted[name].abs().max())
            for name in wanted
            if wanted[name].abs().max() > 1e-9
        )
        held = max(float(value.abs().max()) for value in kept.values())
        fragments = sum(map(len, ready.engine.compression.fragments.values()))
        ready.engine.close()
        found.append({"apart": apart, "kept": held, "ledger": sorted(set(unlike)), "fragments": fragments})
    leave()
    return found


def _digest(ready: Prepared) -> str:
    digest = hashlib.sha256()
    for piece in ready.engine.owner.parameters():
        digest.update(piece.values.numpy().tobytes())
    assert ready.engine.compression is not None
    for fragments in ready.engine.compression.fragments.values():
        for each in fragments:
            for name, value in sorted(each.state.items()):
                digest.update(name.encode() + value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def go_on(arguments: dict[str, Any], channel: Any) -> list[list[str]]:
    """For each case: six steps in a row, and three, a checkpoint and three more by an engine that starts anew: what is
    left of both, parameters and errors."""
    me, found = join(), []
    for at, (spec, strategy) in enumerate(arguments["cases"]):
        ready = _ready(me, spec, strategy)
        _train(ready, 0, 3)
        path = save(Path(arguments["folder"]) / str(at), ready.engine, step=3, progress={})
        _train(ready, 3, 6)
        again = _ready(me, spec, strategy)
        restore(again.engine, open_checkpoint(path))
        _train(again, 3, 6)
        found.append([_digest(ready), _digest(again)])
        ready.engine.close()
        again.engine.close()
    leave()
    return found


def save_errors(arguments: dict[str, Any], channel: Any) -> None:
    """Three steps under a strategy, and a checkpoint."""
    me = join()
    ready = _ready(me, arguments["job"], arguments["strategy"])
    _train(ready, 0, 3)
    save(Path(arguments["folder"]), ready.engine, step=3, progress={})
    leave()


def load_errors(arguments: dict[str, Any], channel: Any) -> dict[str, float]:
    """Under another strategy: the sum over replicas of what each has taken up of every parameter, as a fingerprint."""
    me = join()
    ready = _ready(me, arguments["job"], arguments["strategy"])
    restore(ready.engine, open_checkpoint(Path(arguments["checkpoint"])))
    compression = ready.engine.compression
    assert compression is not None
    assert compression.step == 3
    families = {slot.name: bucket.family for bucket in ready.engine.buckets for slot in bucket.buffer.slots}
    pieces = (p for _, p in errors(compression) if ready.engine.placement.writes(families[p.name]))
    total = _summed(ready, pieces)
    _train(ready, 3, 5)
    leave()
    weights = {name: torch.linspace(-1, 1, value.numel(), dtype=torch.float64) for name, value in total.items()}
    return {name: float((value.view(-1) * weights[name]).sum()) for name, value in total.items()}

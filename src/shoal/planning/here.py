"""Plans for a job on the machine at hand: every legal strategy of a few ranks, estimated operator by operator.

The job may be any model, not only a transformer. Ranks are few, so strategies are listed as expressions, and the rules
of the algebra judge each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from shoal.comm.network import LinkTimes
from shoal.common.numbers import divisors, ordered_products
from shoal.estimate.codecs import named
from shoal.estimate.crossover import Codec, Computing, Ends, ReducedBucket, Setting
from shoal.estimate.estimate import Estimate
from shoal.estimate.outer_calls import period
from shoal.estimate.shard_table import BUCKET_BYTES
from shoal.estimate.steps.machine import Machine
from shoal.estimate.steps.model import JobModel
from shoal.estimate.steps.price import price_step
from shoal.estimate.target import SLOWDOWNS, local_slowdown
from shoal.strategy import (
    ModelFacts,
    Strategy,
    SyncTerm,
    accumulate,
    cp,
    diloco,
    dp,
    is_legal,
    pp,
    recompute,
    shared,
    spatial,
    tp,
)
from shoal.strategy.terms.compress import CompressTerm, compressors
from shoal.strategy.terms.term import Term

MOST_RANKS = 16
MICRO = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CHUNKS = (2, 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanHere:
    """Strategies with their estimates, the fastest step first."""

    model: JobModel
    machine: Machine
    world: int
    ranked: tuple[tuple[Strategy, Estimate], ...]


def plan_here(
    model: JobModel, facts: ModelFacts, machine: Machine, *, world: int, rules: Sequence[SyncTerm] = ()
) -> PlanHere:
    """All that are legal, and fit into the host's memory. With `rules` also islands that stay together by
    one of them; they need more steps to a target, so ranking multiplies their step by that."""
    if world > machine.ranks:
        raise ValueError(
            f"{world} ranks were asked for, and {machine.ranks} were calibrated: more of them would share what was "
            f"measured of each; run `shoal calibrate --ranks {world}` first"
        )
    found = []
    for strategy in legal_here(facts, world=world, rules=rules, planes=plane_cuts(world) if model.planes else ()):
        term = strategy.term(spatial)
        if term is not None and term.grid not in model.planes:
            continue
        estimate = price_step(model, strategy, machine)
        if estimate.memory_bytes is None or estimate.memory_bytes * world <= machine.memory_bytes:
            found.append((strategy, estimate))
    found.sort(key=lambda pair: ((pair[1].step_s or 0.0) * local_slowdown(period(pair[0])), str(pair[0])))
    return PlanHere(model=model, machine=machine, world=world, ranked=tuple(found))


def plane_cuts(world: int) -> list[spatial]:
    """The ways to cut planes on any part of this number of ranks: by height, and into tiles."""
    found = [spatial(n, split) for n in divisors(world) if n > 1 for split in ("height", "both")]
    return list({each.grid: each for each in reversed(found)}.values())[::-1]


def legal_here(
    facts: ModelFacts, *, world: int, rules: Sequence[SyncTerm] = (), planes: Sequence[spatial] = ()
) -> Iterator[Strategy]:
    """Every legal product of dp, tp, cp, pp and the `planes` given over this number of ranks of one host, with
    micro-batches and recomputation; with `rules` also islands of such products."""
    if not 1 <= world <= MOST_RANKS:
        raise ValueError(f"{world} ranks of one host were asked for; expected 1 to {MOST_RANKS}")
    seen = set()
    for cut in [(), *((each,) for each in planes)]:
        if world % _size(cut) == 0:
            for strategy in _products(world // _size(cut), rules, cut):
                if str(strategy) not in seen and is_legal(strategy, world=world, facts=facts):
                    seen.add(str(strategy))
                    yield strategy


def _products(ranks: int, rules: Sequence[SyncTerm], cut: tuple[spatial, ...]) -> Iterator[Strategy]:
    """Of dp, tp, cp and pp over this number of ranks, each of which is cut further."""
    for islands, *sizes in ordered_products(ranks, 5):
        outers = [(dp(islands, sync=rule),) for rule in rules] if islands > 1 else [()]
        for terms in ((*outer, *inner) for outer in outers for inner in _axes(*sizes, planes=cut)):
            for again in (None, recompute("selective"), recompute("full")):
                yield Strategy(*terms, *([again] if again is not None else []))


def _size(cut: tuple[spatial, ...]) -> int:
    return prod(each.n for each in cut)


def _axes(
    data: int, tensor: int, context: int, stages: int, *, planes: tuple[spatial, ...]
) -> Iterator[tuple[Term, ...]]:
    datas: list[Term | None] = [None]
    if data > 1:
        datas = [dp(data, zero=stage) for stage in range(4)]
        if tensor == context == stages == 1 and not planes:
            datas = [dp(data, via=shared()), *datas]
    tensors: list[Term | None] = [None] if tensor == 1 else [tp(tensor), tp(tensor, sequence=True)]
    contexts: list[Term | None] = [None] if context == 1 else [cp(context), cp(context, "ulysses")]
    for one, two, three in product(datas, tensors, contexts):
        inner: list[Term] = [*(each for each in (one, two, three) if each is not None), *planes]
        if stages == 1:
            for micro in MICRO:
                yield (*inner, *([accumulate(micro)] if micro > 1 else []))
            continue
        for pipeline in _pipelines(stages):
            yield (pipeline, *inner)


def _pipelines(stages: int) -> Iterator[pp]:
    for micro in MICRO:
        for schedule in ("gpipe", "1f1b", "zero-bubble"):
            yield pp(stages, schedule, micro=micro)
        for chunks in CHUNKS:
            if micro % stages == 0:
                yield pp(stages, "interleaved", micro=micro, chunks=chunks)


def break_even_bandwidths(model: JobModel, machine: Machine, link: LinkTimes) -> dict[str, float]:
    """Bytes a second between two hosts, one rank on each, below which compressed gradients beat dense ones: by
    compression, those that never do left out. `link` is what messages cost at its ends."""
    setting, found = _setting(model, machine, link), {}
    for term, codec in _codecs(machine).items():
        rate = setting.overtakes(term, codec)
        if 0 < rate < float("inf"):
            found[str(term)] = rate
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class OverLink:
    """A strategy of two hosts, one rank each, joined by a link."""

    strategy: Strategy
    step_s: float
    slowdown: float
    """Steps to a target, relative to dense gradients."""

    @property
    def score_s(self) -> float:
        """Seconds for what one dense step learns."""
        return self.step_s * self.slowdown


def over_link(
    model: JobModel,
    machine: Machine,
    link: LinkTimes,
    *,
    bytes_per_s: float,
    periods: Sequence[int],
    optimizer: str = "adamw",
) -> list[OverLink]:
    """Dense gradients, every compression that was timed on this machine, and islands of each period, best first."""
    setting = _setting(model, machine, link)
    found = [OverLink(strategy=Strategy(dp(2)), step_s=setting.dense_s(bytes_per_s), slowdown=1.0)]
    for term, codec in _codecs(machine).items():
        step_s = setting.compressed_s(term, codec, bytes_per_s)
        found.append(
            OverLink(strategy=Strategy(dp(2, compress=term)), step_s=step_s, slowdown=SLOWDOWNS[type(term).__name__])
        )
    for period_ in periods:
        found.append(
            OverLink(
                strategy=Strategy(dp(2, sync=diloco(period_))),
                step_s=setting.islands_s(period_, bytes_per_s),
                slowdown=local_slowdown(period_, optimizer=optimizer),
            )
        )
    return sorted(found, key=lambda each: (each.score_s, str(each.strategy)))


def _setting(model: JobModel, machine: Machine, link: LinkTimes) -> Setting:
    """Two hosts of one rank each that train the job."""
    dense = price_step(model, Strategy(dp(2)), machine)
    assert dense.step_s is not None
    computed_s = dense.step_s - dense.step_split["data"]
    return Setting(
        computing=Computing(step_s=computed_s, buckets=_buckets(model, dense.step_split["compute"])),
        ends=Ends(times=link, background_byte_s=machine.background_byte_s),
    )


def _codecs(machine: Machine) -> dict[CompressTerm, Codec]:
    """Compressions with what they cost here."""
    found = {}
    for term in (term for method in compressors() for term in method.measured()):
        times = named(machine.codecs, term)
        if times is not None and term.ring_bytes(1.0, 1.0, ranks=2, itemsize=4) is not None:
            found[term] = Codec(tensor_s=times[0], element_s=times[1])
    return found


def _buckets(model: JobModel, compute_s: float) -> tuple[ReducedBucket, ...]:
    """Filled from the last parameter on, as backward meets them; ready when it has come so far."""
    groups: list[list[tuple[int, ...]]] = [[]]
    for shape in reversed([each.shape for each in model.shapes.parameters]):
        if groups[-1] and 4 * sum(map(prod, [*groups[-1], shape])) > BUCKET_BYTES:
            groups.append([])
        groups[-1].append(shape)
    found, done = [], 0
    for group in groups:
        done += 4 * sum(map(prod, group))
        # A third of computing is forward.
        found.append(ReducedBucket(shapes=tuple(group), ready_s=compute_s * (1 + 2 * done / model.parameter_bytes) / 3))
    return tuple(found)

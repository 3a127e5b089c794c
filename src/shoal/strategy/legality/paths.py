"""Rules about the paths between replicas: servers, shared memory and collectives, and what may be compressed
on each.
"""

from __future__ import annotations

from shoal.common.numbers import divisors
from shoal.strategy.legality.levels import LOOSE, composites_around, is_composite
from shoal.strategy.legality.rule import Breach, Case, RuleTable
from shoal.strategy.terms.axes import dp
from shoal.strategy.terms.compress import CompressTerm, compressors, none
from shoal.strategy.terms.modifiers import amp, offload
from shoal.strategy.terms.numerals import count, counted
from shoal.strategy.terms.sync import asp, bsp, hogwild
from shoal.strategy.terms.via import allreduce, ps, shared

rule = RuleTable()


@rule(
    dp,
    why="An all-reduce waits for every replica; where replicas do not wait, the model needs an owner: a "
    "server, or shared memory.",
)
def loose_replicas_need_an_owner(case: Case, index: int, level: dp) -> Breach | None:
    if not isinstance(level.sync, LOOSE) or not isinstance(level.via, allreduce):
        return None
    return Breach(
        level,
        f"an all-reduce waits for all {count(level.n)} replicas, which is what {level.sync} means not to do",
        lambda: [case.changed(index, via=None), case.changed(index, via=ps(1))],
    )


@rule(dp, hogwild, why="HOGWILD is writing into memory that all replicas share.")
def hogwild_writes_shared_memory(case: Case, index: int, level: dp) -> Breach | None:
    if not isinstance(level.sync, hogwild) or isinstance(level.via, shared):
        return None
    served = level.via if isinstance(level.via, ps) else None
    return Breach(
        level,
        f"hogwild() writes into shared memory, not through {level.via}",
        lambda: [case.changed(index, via=None), case.changed(index, sync=asp(), via=served)],
    )


@rule(dp, shared, why="Shared memory holds one model; replicas that are averaged need one each.")
def shared_memory_holds_one_model(case: Case, index: int, level: dp) -> Breach | None:
    if not isinstance(level.via, shared) or level.sync.exchanges != "model":
        return None
    return Breach(
        level,
        f"{level.sync} averages models, and in shared memory there is only one",
        lambda: [case.changed(index, via=None), case.changed(index, sync=hogwild())],
    )


@rule(
    dp,
    shared,
    why="Ranks that share memory are on one host, and a host is the innermost level of any placement.",
)
def shared_memory_is_innermost(case: Case, index: int, level: dp) -> Breach | None:
    last = len(case.strategy.axes) - 1
    if not isinstance(level.via, shared) or index == last:
        return None
    sync = asp() if isinstance(level.sync, hogwild) else level.sync
    return Breach(
        level,
        "ranks that share memory are on one host, so the level stands innermost and not outside "
        f"{case.strategy.terms[last]}",
        lambda: [case.moved(index, last), case.changed(index, sync=sync, via=None)],
    )


@rule(dp, shared, why="Through shared memory nothing is sent, so there is nothing to compress.")
def shared_memory_sends_nothing(case: Case, index: int, level: dp) -> Breach | None:
    if not isinstance(level.via, shared) or isinstance(level.compress, none):
        return None
    return Breach(
        level,
        f"through shared memory nothing is sent that {level.compress} could make smaller",
        lambda: [case.changed(index, compress=none())],
    )


@rule(
    dp,
    CompressTerm,
    why="Some compressions are collectives themselves: they replace an all-reduce, not a server or a neighbour.",
)
def sparse_collectives_replace_allreduce(case: Case, index: int, level: dp) -> Breach | None:
    neighbours = level.sync.neighbours
    if not level.compress.collective_only or (isinstance(level.via, allreduce) and not neighbours):
        return None
    return Breach(
        level,
        f"{level.compress} is a collective of all replicas and cannot go through "
        f"{'a gossip' if neighbours else level.via}",
        lambda: [
            *(case.changed(index, compress=other) for other in _alike(level.compress)),
            case.changed(index, via=allreduce()),
        ],
    )


@rule(dp, CompressTerm, why="A compression between groups that sum densely inside (HiTopKComm) needs such groups.")
def compression_between_groups_needs_groups(case: Case, index: int, level: dp) -> Breach | None:
    if not level.compress.between_groups:
        return None
    grouped = isinstance(level.via, allreduce) and level.via.by_hosts
    if grouped or any(place > index and isinstance(other.sync, bsp) for place, other in case.levels()):
        return None
    return Breach(
        level,
        f"{type(level.compress).__name__} works between groups that sum densely inside: it needs a bsp level of dp "
        "inside it, or a hierarchical all-reduce",
        lambda: [
            case.changed(index, via=allreduce("hierarchical")),
            *(case.changed(index, compress=other) for other in _alike(level.compress)),
        ],
    )


@rule(
    dp,
    CompressTerm,
    why="Compression acts once a step, or its error would count once per micro-batch; zero 2 and 3 reduce "
    "every micro-batch.",
)
def compression_acts_once_a_step(case: Case, index: int, level: dp) -> Breach | None:
    micro = case.strategy.micro_batches
    if level.zero < 2 or micro == 1 or isinstance(level.compress, none):
        return None
    return Breach(
        level,
        f"zero={level.zero} reduces gradients in each of the {count(micro)} micro-batches, and "
        f"{level.compress} acts once a step",
        lambda: [case.changed(index, zero=1), case.changed(index, compress=none())],
    )


@rule(dp, why="Gossip goes from neighbour to neighbour; there is no server and no collective to choose.")
def gossip_sends_to_neighbours(case: Case, index: int, level: dp) -> Breach | None:
    if not level.sync.neighbours or level.via == allreduce():
        return None
    return Breach(
        level,
        f"gossip goes from neighbour to neighbour, not through {level.via}",
        lambda: [case.changed(index, via=None)],
    )


@rule(
    dp,
    ps,
    why="A co-located shard lives on a worker, so there are no more shards than workers; regions are of equal size.",
)
def colocated_shards_have_hosts(case: Case, index: int, level: dp) -> Breach | None:
    if isinstance(level.via, ps) and level.n % level.via.levels:
        via = level.via
        fitting = [divisor for divisor in divisors(level.n) if divisor <= via.levels][-1]
        return Breach(
            level,
            f"{counted(level.n, 'replica')} cannot form {counted(via.levels, 'region')} of equal size (levels=)",
            lambda: [case.changed(index, via=via.replace(levels=fitting))],
        )
    if not isinstance(level.via, ps) or not level.via.colocated or level.via.shards <= level.n:
        return None
    shards = level.via.shards
    return Breach(
        level,
        f"{count(shards)} shards cannot live on {counted(level.n, 'worker')}",
        lambda: [case.changed(index, via=ps(level.n, colocated=True)), case.changed(index, via=ps(shards))],
    )


@rule(
    dp,
    allreduce,
    why="A hierarchical all-reduce works in groups of equal size, so the number of replicas is a product.",
)
def hierarchies_need_groups(case: Case, index: int, level: dp) -> Breach | None:
    if not isinstance(level.via, allreduce) or not level.via.by_hosts or is_composite(level.n):
        return None
    return Breach(
        level,
        f"{counted(level.n, 'replica')} cannot be put into several groups of one size",
        lambda: [case.changed(index, via=None), *case.resized(index, composites_around(level.n))],
    )


@rule(
    amp,
    shared,
    why="amp refreshes 16-bit copies of the weights between steps, and without locks there is no moment between steps.",
)
def amp_needs_a_moment(case: Case, index: int, precision: amp) -> Breach | None:
    writers = [level for _, level in case.levels() if isinstance(level.sync, hogwild)]
    if not writers:
        return None
    return Breach(
        precision,
        f"{writers[0]} changes the weights at any time, so there is no moment to refresh their 16-bit copies",
        lambda: [case.put(index)],
    )


@rule(
    offload,
    shared,
    why="Weights in shared memory are in host memory already, and each replica steps them there.",
)
def shared_memory_is_host_memory(case: Case, index: int, moved: offload) -> Breach | None:
    if moved.what == "activations":
        return None
    return Breach(
        moved,
        f"with weights in shared memory, {moved.what} {'are' if moved.what.endswith('s') else 'state is'} "
        "in host memory already",
        lambda: [case.put(index)],
    )


def _alike(term: CompressTerm) -> list[CompressTerm]:
    """Compressions with the same arguments that can go anywhere, those that plans try first."""
    found = [
        method
        for method in compressors()
        if list(method.arguments) == list(term.arguments) and not method.collective_only and method.loss == term.loss
    ]
    return [method(**term.values()) for method in sorted(found, key=lambda method: not method.searched)]

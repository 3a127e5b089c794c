"""Rules about levels of data parallelism: which may stand inside which, what shards, who serves, and what may be compressed."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.strategy.axes import dp, ensemble
from shoal.strategy.compress import CompressTerm, none
from shoal.strategy.modifiers import amp, offload
from shoal.strategy.numerals import count, counted
from shoal.strategy.rule import Breach, Case, Table, divisors
from shoal.strategy.sync import SyncTerm, asp, bsp, gossip, hogwild, softsync, ssp
from shoal.strategy.terms import pp
from shoal.strategy.via import allreduce, ps, shared

rule = Table()

LOOSE = (softsync, ssp, asp)
"""Synchronisations in which a replica does not wait for all others, so that no collective can carry them."""


def _name(term: object) -> str:
    return type(term).__name__


@rule(dp, why="A replica that steps by itself must be whole: levels that are not bsp lie outside all levels that are.")
def loose_levels_lie_outside(case: Case) -> Iterator[Breach]:
    tight: int | None = None
    for index, level in case.levels():
        if isinstance(level.sync, bsp):
            tight = index if tight is None else tight
        elif tight is not None:
            outer = tight
            yield Breach(
                level,
                f"a level with {_name(level.sync)} lies inside {case.strategy.terms[outer]}, which waits for all its replicas",
                lambda index=index, outer=outer: [case.moved(index, outer), case.changed(index, sync=bsp(), via=None)],  # type: ignore[misc]
            )


@rule(dp, why="Shards of the optimiser only make one model if all their owners step together.")
def shards_step_together(case: Case) -> Iterator[Breach]:
    for index, level in case.levels():
        if level.zero and not isinstance(level.sync, bsp):
            yield Breach(
                level,
                f"zero={level.zero} splits one optimiser over replicas that {_name(level.sync)} lets step at different times",
                lambda index=index: [case.changed(index, zero=0), case.changed(index, sync=bsp(), via=None)],  # type: ignore[misc]
            )


@rule(dp, why="A shard is reduced by its owner: that is half of an all-reduce, and servers or shared memory already own the whole.")
def shards_meet_by_allreduce(case: Case) -> Iterator[Breach]:
    for index, level in case.levels():
        if level.zero and not isinstance(level.via, allreduce):
            yield Breach(
                level,
                f"zero={level.zero} gives every replica a shard to own, but {level.via} owns the parameters already",
                lambda index=index: [case.changed(index, via=allreduce()), case.changed(index, zero=0)],  # type: ignore[misc]
            )


@rule(dp, why="What is split once is not held twice, so there is nothing left for a second level to split.")
def one_level_shards(case: Case) -> Iterator[Breach]:
    sharded = [(index, level) for index, level in case.levels() if level.zero]
    for index, level in sharded[:-1]:
        yield Breach(
            level,
            f"an inner level ({sharded[-1][1]}) shards already, and at most one level may",
            lambda index=index: [case.changed(index, zero=0), case.changed(sharded[-1][0], zero=0)],  # type: ignore[misc]
        )


@rule(bsp, why="Backup workers drop the slowest replica's gradient, and under zero that replica owns a shard nobody else has.")
def shards_need_every_owner(case: Case) -> Iterator[Breach]:
    for index, level in case.levels():
        if level.zero and isinstance(level.sync, bsp) and level.sync.backup:
            yield Breach(
                level,
                f"{counted(level.sync.backup, 'replica')} may be left behind, and with zero={level.zero} its shard of the model",
                lambda index=index: [case.changed(index, sync=bsp()), case.changed(index, zero=0)],  # type: ignore[misc]
            )


@rule(bsp, why="At least one gradient must remain to make a step.")
def backups_leave_a_worker(case: Case) -> Iterator[Breach]:
    for index, level in case.levels():
        if isinstance(level.sync, bsp) and level.sync.backup >= level.n:
            most, backup = level.n - 1, level.sync.backup
            yield Breach(
                level,
                f"of {counted(level.n, 'replica')}, {count(backup)} cannot be backups; at least one gradient must count",
                lambda index=index, most=most, backup=backup: [  # type: ignore[misc]
                    case.changed(index, sync=bsp(backup=most)), *case.resized(index, [min(backup + 1, 2**20)])
                ],
            )  # fmt: skip


@rule(bsp, why="Synchronised batch norm waits for the statistics of every replica in the forward pass; none can be left behind.")
def backups_miss_batch_statistics(case: Case) -> Iterator[Breach]:
    if case.facts.batch_norm != "sync":
        return
    for index, level in case.levels():
        if isinstance(level.sync, bsp) and level.sync.backup:
            yield Breach(
                level,
                "synchronised batch norm waits for every replica, so a slow one cannot be left behind",
                lambda index=index: [case.changed(index, sync=bsp())],  # type: ignore[misc]
            )


@rule(softsync, why="n-softsync waits for n/k gradients, which must be at least one.")
def softsync_waits_for_one(case: Case) -> Iterator[Breach]:
    for index, level in case.levels():
        if isinstance(level.sync, softsync) and level.sync.k > level.n:
            yield Breach(
                level,
                f"the server would wait for {level.n}/{level.sync.k} of a gradient; k is at most the number of replicas",
                lambda index=index, n=level.n: [case.changed(index, sync=softsync(n))],  # type: ignore[misc]
            )


@rule(dp, why="An all-reduce waits for every replica, so where replicas do not wait the model needs an owner: a server, or shared memory.")
def loose_replicas_need_an_owner(case: Case) -> Iterator[Breach]:
    for index, level in case.levels():
        if isinstance(level.sync, LOOSE) and isinstance(level.via, allreduce):
            yield Breach(
                level,
                f"an all-reduce waits for all {count(level.n)} replicas, and {_name(level.sync)} means not to",
                lambda index=index: [case.changed(index, via=None), case.changed(index, via=ps(1))],  # type: ignore[misc]
            )


@rule(hogwild, why="HOGWILD is writing into memory that all replicas share.")
def hogwild_writes_shared_memory(case: Case) -> Iterator[Breach]:
    for index, level in case.levels():
        if isinstance(level.sync, hogwild) and not isinstance(level.via, shared):
            yield Breach(
                level,
                f"hogwild writes into shared memory, not through {level.via}",
                lambda index=index, via=level.via: [  # type: ignore[misc]
                    case.changed(index, via=shared()), case.changed(index, sync=asp(), via=via if isinstance(via, ps) else None)
                ],
            )  # fmt: skip


@rule(shared, why="Shared memory holds one model; replicas that are averaged need one each.")
def shared_memory_holds_one_model(case: Case) -> Iterator[Breach]:
    for index, level in case.levels():
        if isinstance(level.via, shared) and level.sync.exchanges == "model":
            yield Breach(
                level,
                f"{_name(level.sync)} averages models, and in shared memory there is only one",
                lambda index=index: [case.changed(index, via=None), case.changed(index, sync=hogwild())],  # type: ignore[misc]
            )


@rule(shared, why="Ranks that share memory are on one host, and hosts are the innermost level of any placement.")
def shared_memory_is_innermost(case: Case) -> Iterator[Breach]:
    last = len(case.strategy.axes) - 1
    for index, level in case.levels():
        if isinstance(level.via, shared) and index != last:
            inner = case.strategy.terms[last]
            yield Breach(
                level,
                f"ranks that share memory are on one host, so the level stands innermost, not outside {inner}",
                lambda index=index: [  # type: ignore[misc]
                    case.moved(index, last),
                    case.changed(index, sync=asp() if isinstance(level.sync, hogwild) else level.sync, via=None),
                ],
            )  # fmt: skip


@rule(shared, why="Through shared memory nothing is sent, so there is nothing to compress.")
def shared_memory_sends_nothing(case: Case) -> Iterator[Breach]:
    for index, level in case.levels():
        if isinstance(level.via, shared) and not isinstance(level.compress, none):
            yield Breach(
                level,
                f"through shared memory nothing is sent that {_name(level.compress)} could make smaller",
                lambda index=index: [case.changed(index, compress=none())],  # type: ignore[misc]
            )


@rule(CompressTerm, why="gTop-k and HiTopKComm are collectives of their own: they replace an all-reduce, not a server or a neighbour.")
def sparse_collectives_replace_allreduce(case: Case) -> Iterator[Breach]:
    for index, level in case.levels():
        if level.compress.collective_only and (not isinstance(level.via, allreduce) or isinstance(level.sync, gossip)):
            from shoal.strategy.compress import topk

            path = "gossip" if isinstance(level.sync, gossip) else str(level.via)
            ratio = level.compress.values()["r"]
            yield Breach(
                level,
                f"{_name(level.compress)} is a collective of all replicas and cannot go through {path}",
                lambda index=index, ratio=ratio: [case.changed(index, compress=topk(ratio)), case.changed(index, via=allreduce())],  # type: ignore[misc]
            )


@rule(CompressTerm, why="HiTopKComm sums densely inside a group and sparsely between groups, so it needs both.")
def hitopk_needs_two_levels(case: Case) -> Iterator[Breach]:
    levels = case.levels()
    for place, (index, level) in enumerate(levels):
        if _name(level.compress) != "hitopk":
            continue
        inner = [other for _, other in levels[place + 1 :] if isinstance(other.sync, bsp)]
        if not inner and not (isinstance(level.via, allreduce) and level.via.algorithm == "hierarchical"):
            from shoal.strategy.compress import mstopk

            ratio = level.compress.values()["r"]
            yield Breach(
                level,
                "hitopk works between groups that sum densely inside: it needs a bsp level of dp inside it, or a hierarchical all-reduce",
                lambda index=index, ratio=ratio: [  # type: ignore[misc]
                    case.changed(index, via=allreduce("hierarchical")), case.changed(index, compress=mstopk(ratio))
                ],
            )  # fmt: skip


@rule(CompressTerm, why="Compression acts once per step, or its error would be counted once per micro-batch; zero 2 and 3 reduce each micro-batch.")
def compression_acts_once_a_step(case: Case) -> Iterator[Breach]:
    micro = case.strategy.micro_batches
    for index, level in case.levels():
        if level.zero >= 2 and micro > 1 and not isinstance(level.compress, none):
            yield Breach(
                level,
                f"zero={level.zero} reduces gradients in each of the {count(micro)} micro-batches, "
                f"and {_name(level.compress)} acts once a step",
                lambda index=index: [case.changed(index, zero=1), case.changed(index, compress=none())],  # type: ignore[misc]
            )


@rule(gossip, why="Gossip goes from neighbour to neighbour; there is no server and no collective to choose.")
def gossip_speaks_to_neighbours(case: Case) -> Iterator[Breach]:
    for index, level in case.levels():
        if isinstance(level.sync, gossip) and level.via != allreduce():
            yield Breach(
                level,
                f"gossip goes from neighbour to neighbour, not through {level.via}",
                lambda index=index: [case.changed(index, via=None)],  # type: ignore[misc]
            )


@rule(gossip, why="A torus has two sides of at least two; a prime number of replicas is only a ring.")
def a_torus_has_two_sides(case: Case) -> Iterator[Breach]:
    for index, level in case.levels():
        if isinstance(level.sync, gossip) and level.sync.graph == "torus" and not _composite(level.n):
            yield Breach(
                level,
                f"{counted(level.n, 'replica')} cannot stand on a torus: {level.n} is no product of two sides of at least two",
                lambda index=index, level=level: [  # type: ignore[misc]
                    case.changed(index, sync=gossip("ring", level.sync.mode)), *case.resized(index, _composites_around(level.n))
                ],
            )  # fmt: skip


@rule(gossip, why="Asynchronous gossip deadlocks unless the graph falls into two camps that only ask each other (AD-PSGD).")
def async_gossip_needs_two_camps(case: Case) -> Iterator[Breach]:
    for index, level in case.levels():
        if isinstance(level.sync, gossip) and level.sync.mode == "async" and not _two_camps(level.sync.graph, level.n):
            graph = level.sync.graph
            yield Breach(
                level,
                f"neighbours in a {graph} graph of {level.n} do not fall into two camps, so replicas may wait in a circle",
                lambda index=index, graph=graph, n=level.n: [  # type: ignore[misc]
                    case.changed(index, sync=gossip(graph, "sync")),
                    *[case.changed(index, n=size, sync=gossip("ring", "async")) for size in (n - n % 2, n + n % 2) if size > 1],
                ],
            )  # fmt: skip


@rule(gossip, why="A member of a gossip sends its model, so all of its own replicas must hold the same one.")
def gossip_members_agree(case: Case) -> Iterator[Breach]:
    outside = False
    for index, level in case.levels():
        if outside and not isinstance(level.sync, bsp):
            yield Breach(
                level,
                f"the replicas under {_name(level.sync)} hold different models, and the gossip outside needs one from each member",
                lambda index=index: [case.changed(index, sync=bsp(), via=None)],  # type: ignore[misc]
            )
        outside = outside or isinstance(level.sync, gossip)


@rule(dp, why="An outer average must fall on a step at which the inner replicas have just agreed.")
def periods_nest(case: Case) -> Iterator[Breach]:
    period, outer = 0, None
    for index, level in case.levels():
        inner = level.sync.values().get("h")
        if inner is None:
            continue
        if period and period % inner:
            fitting = [divisor for divisor in divisors(period) if divisor <= inner][-1]
            yield Breach(
                level,
                f"replicas agree every {inner} steps, and {outer} averages them every {period}, which is no multiple",
                lambda index=index, level=level, fitting=fitting: [case.changed(index, sync=level.sync.replace(h=fitting))],  # type: ignore[misc]
            )
        period, outer = inner, level


@rule(ps, why="A co-located shard lives on a worker, so there are no more shards than workers.")
def colocated_shards_have_hosts(case: Case) -> Iterator[Breach]:
    for index, level in case.levels():
        if isinstance(level.via, ps) and level.via.colocated and level.via.shards > level.n:
            shards = level.via.shards
            yield Breach(
                level,
                f"{count(shards)} shards cannot live on {counted(level.n, 'worker')}",
                lambda index=index, n=level.n, shards=shards: [  # type: ignore[misc]
                    case.changed(index, via=ps(n, colocated=True)), case.changed(index, via=ps(shards))
                ],
            )  # fmt: skip


@rule(allreduce, why="A hierarchical all-reduce works in groups of equal size, so the number of replicas is a product.")
def hierarchies_need_groups(case: Case) -> Iterator[Breach]:
    for index, level in case.levels():
        hierarchical = isinstance(level.via, allreduce) and level.via.algorithm == "hierarchical"
        if hierarchical and level.n > 1 and not _composite(level.n):
            yield Breach(
                level,
                f"{counted(level.n, 'replica')} cannot be put into several groups of the same size",
                lambda index=index, level=level: [case.changed(index, via=allreduce()), *case.resized(index, _composites_around(level.n))],  # type: ignore[misc]
            )


@rule(ensemble, why="Members never speak to each other, so nothing may span several of them: an ensemble is the outermost axis.")
def ensembles_stand_outside(case: Case) -> Iterator[Breach]:
    for index, members in case.places(ensemble):
        if index > 0:
            yield Breach(
                members,
                f"{case.strategy.terms[0]} outside it would join members that train apart; an ensemble stands outermost",
                lambda index=index: [case.moved(index, 0)],  # type: ignore[misc]
            )


@rule(ensemble, why="Distillation teaches one network what several know.")
def distillation_needs_teachers(case: Case) -> Iterator[Breach]:
    for index, members in case.places(ensemble):
        if members.distill and members.n < 2:
            yield Breach(
                members,
                "one member is no ensemble to learn from",
                lambda index=index: [case.changed(index, n=2), case.changed(index, distill=False)],  # type: ignore[misc]
            )


@rule(amp, why="fp16 skips a step whose gradients overflow and rescales the loss, and all who share a model must skip together.")
def fp16_skips_together(case: Case) -> Iterator[Breach]:
    precision = next(case.places(amp))
    if precision[1].dtype != "fp16":
        return
    loose: list[SyncTerm | str] = [level.sync for _, level in case.levels() if isinstance(level.sync, LOOSE)]
    loose += ["pipedream" for _, pipeline in case.places(pp) if pipeline.schedule == "pipedream"]
    if loose:
        yield Breach(
            precision[1],
            f"an overflow must make everyone skip the step, and under {loose[0]} there is no common step",
            lambda: [case.put(precision[0], amp("bf16"))],
        )


@rule(amp, shared, why="amp refreshes 16-bit copies of the weights between steps, and without locks there is no moment between steps.")
def amp_needs_a_moment(case: Case) -> Iterator[Breach]:
    index, precision = next(case.places(amp))
    for _, level in case.levels():
        if isinstance(level.via, shared):
            yield Breach(
                precision,
                f"{level} changes shared weights at any time, so there is no moment to refresh their 16-bit copies",
                lambda: [case.put(index)],
            )


@rule(offload, shared, why="Weights in shared memory are in host memory already, and each replica steps them there.")
def shared_memory_is_host_memory(case: Case) -> Iterator[Breach]:
    if not any(isinstance(level.via, shared) for _, level in case.levels()):
        return
    for index, moved in case.places(offload):
        if moved.what != "activations":
            yield Breach(
                moved,
                f"{moved.what} of weights in shared memory are in host memory already",
                lambda index=index: [case.put(index)],  # type: ignore[misc]
            )


def _composite(number: int) -> bool:
    """Whether a number is a product of two numbers of at least two."""
    return any(number % factor == 0 for factor in range(2, int(number**0.5) + 1))


def _composites_around(number: int) -> list[int]:
    """The composite numbers next below and next above: 4 at the least."""
    below = next((candidate for candidate in range(number - 1, 3, -1) if _composite(candidate)), None)
    above = next(candidate for candidate in range(number + 1, number + 10) if _composite(candidate))
    return [size for size in (below, above) if size is not None]


def _two_camps(graph: str, replicas: int) -> bool:
    """Whether the graph is bipartite."""
    if replicas <= 2:
        return True
    if graph == "ring":
        return replicas % 2 == 0
    if graph == "torus":
        rows = next(rows for rows in range(int(replicas**0.5), 0, -1) if replicas % rows == 0)
        return all(side % 2 == 0 for side in (rows, replicas // rows) if side > 2)
    return False  # Exponential and complete graphs of three and more hold triangles.

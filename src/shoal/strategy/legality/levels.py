"""Rules about levels of data parallelism: how they nest, what may be split, and which replicas wait for which."""

from __future__ import annotations

from shoal.common.numbers import divisors
from shoal.strategy.graphs import sides
from shoal.strategy.legality.rule import Breach, Case, RuleTable
from shoal.strategy.terms.axes import dp, ensemble, pp
from shoal.strategy.terms.modifiers import amp
from shoal.strategy.terms.numerals import count, counted
from shoal.strategy.terms.sync import asp, bsp, softsync, ssp
from shoal.strategy.terms.via import allreduce

rule = RuleTable()

LOOSE = (softsync, ssp, asp)
"""Synchronisations in which a replica does not wait for all others, so that no collective can carry them."""


@rule(
    dp,
    why="A replica that steps by itself must be complete: levels that are not bsp lie outside all levels that are.",
)
def loose_levels_lie_outside(case: Case, index: int, level: dp) -> Breach | None:
    outer = next((place for place, other in case.levels() if place < index and isinstance(other.sync, bsp)), None)
    if isinstance(level.sync, bsp) or outer is None:
        return None
    return Breach(
        level,
        f"a level under {type(level.sync).__name__} lies inside {case.strategy.terms[outer]}, which waits "
        "for all its replicas",
        lambda: [case.moved(index, outer), case.changed(index, sync=bsp(), via=None)],
    )


@rule(dp, why="Shards of an optimiser only make one model if all their owners step together.")
def shards_step_together(case: Case, index: int, level: dp) -> Breach | None:
    if not level.zero or isinstance(level.sync, bsp):
        return None
    return Breach(
        level,
        f"zero={level.zero} splits one optimiser over replicas that {level.sync} lets step at different times",
        lambda: [case.changed(index, zero=0), case.changed(index, sync=bsp(), via=None)],
    )


@rule(
    dp,
    why="A shard is reduced to its owner, which is half of an all-reduce; servers and shared memory own "
    "all parameters already.",
)
def shards_need_allreduce(case: Case, index: int, level: dp) -> Breach | None:
    if not level.zero or isinstance(level.via, allreduce):
        return None
    return Breach(
        level,
        f"zero={level.zero} gives every replica a shard to own, but with {level.via} the parameters have "
        "an owner already",
        lambda: [case.changed(index, via=allreduce()), case.changed(index, zero=0)],
    )


@rule(
    dp,
    why="What one level has split is not held twice, so there is nothing left for a second level to split.",
)
def one_level_shards(case: Case, index: int, level: dp) -> Breach | None:
    inner = [(place, other) for place, other in case.levels() if place > index and other.zero]
    if not level.zero or not inner:
        return None
    return Breach(
        level,
        f"the level {inner[-1][1]} inside it shards already, and at most one level may",
        lambda: [case.changed(index, zero=0), case.changed(inner[-1][0], zero=0)],
    )


@rule(
    dp,
    bsp,
    why="Backup workers leave the slowest replicas behind, and under zero each of them owns a shard no other rank has.",
)
def shards_need_every_owner(case: Case, index: int, level: dp) -> Breach | None:
    if not level.zero or not isinstance(level.sync, bsp) or not level.sync.backup:
        return None
    return Breach(
        level,
        f"{counted(level.sync.backup, 'replica')} may be left behind each step, and with zero={level.zero} "
        "a part of the model with it",
        lambda: [case.changed(index, sync=bsp()), case.changed(index, zero=0)],
    )


@rule(dp, bsp, why="At least one gradient must remain to make a step.")
def backups_leave_a_worker(case: Case, index: int, level: dp) -> Breach | None:
    backup = level.sync.backup if isinstance(level.sync, bsp) else 0
    if backup < level.n:
        return None
    return Breach(
        level,
        f"{count(backup)} of {counted(level.n, 'replica')} cannot be backups: at least one gradient must count",
        lambda: [case.changed(index, sync=bsp(backup=level.n - 1)), *case.resized(index, [backup + 1])],
    )


@rule(
    dp,
    bsp,
    why="Synchronised batch norm waits for the statistics of every replica, so none can be left behind.",
)
def backups_miss_batch_statistics(case: Case, index: int, level: dp) -> Breach | None:
    if case.facts.batch_norm != "sync" or not isinstance(level.sync, bsp) or not level.sync.backup:
        return None
    return Breach(
        level,
        "synchronised batch norm waits for every replica, so the slowest cannot be left behind",
        lambda: [case.changed(index, sync=bsp())],
    )


@rule(dp, softsync, why="n-softsync waits for n/k gradients, which must be at least one.")
def softsync_waits_for_one(case: Case, index: int, level: dp) -> Breach | None:
    if not isinstance(level.sync, softsync) or level.sync.k <= level.n:
        return None
    return Breach(
        level,
        f"the server would wait for {level.n}/{level.sync.k} of a gradient; k is at most the number of replicas",
        lambda: [
            case.changed(index, sync=softsync(level.n)),
            *case.resized(index, [level.sync.values()["k"]]),
        ],
    )


@rule(dp, why="An outer average must fall on a step at which the inner replicas have just agreed.")
def periods_nest(case: Case, index: int, level: dp) -> Breach | None:
    inner = level.sync.values().get("h")
    outer = [other for place, other in case.levels() if place < index and "h" in other.sync.arguments]
    if inner is None or not outer:
        return None
    period = outer[-1].sync.values()["h"]
    if period % inner == 0:
        return None
    fitting = [divisor for divisor in divisors(period) if divisor <= inner][-1]
    return Breach(
        level,
        f"its replicas agree every {inner} steps, and {outer[-1]} averages them every {period}, which is "
        "no multiple of that",
        lambda: [case.changed(index, sync=level.sync.replace(h=fitting))],
    )


@rule(
    ensemble,
    why="Members never communicate, so nothing may span several of them: an ensemble is the outermost axis.",
)
def ensembles_stand_outside(case: Case, index: int, members: ensemble) -> Breach | None:
    if index == 0:
        return None
    return Breach(
        members,
        f"{case.strategy.terms[0]} outside it would join members that train separately; an ensemble must be outermost",
        lambda: [case.moved(index, 0)],
    )


@rule(ensemble, why="Distillation teaches one network what several others know.")
def distillation_needs_teachers(case: Case, index: int, members: ensemble) -> Breach | None:
    if not members.distill or members.n >= 2:
        return None
    return Breach(
        members,
        "a single member is no ensemble to learn from",
        lambda: [case.changed(index, n=2), case.changed(index, distill=False)],
    )


@rule(
    amp,
    why="fp16 skips a step whose gradients overflow and rescales the loss, and all ranks that share a model must "
    "skip together.",
)
def fp16_skips_together(case: Case, index: int, precision: amp) -> Breach | None:
    loose = [str(level.sync) for _, level in case.levels() if isinstance(level.sync, LOOSE)]
    loose += ["pipedream" for _, pipeline in case.places(pp) if pipeline.schedule == "pipedream"]
    if precision.dtype != "fp16" or not loose:
        return None
    return Breach(
        precision,
        f"on an overflow all must skip the same step, and under {loose[0]} there is no common step",
        lambda: [case.put(index, amp("bf16"))],
    )


def is_composite(number: int) -> bool:
    """Whether a number is a product of two numbers of at least two."""
    return sides(number)[0] > 1


def composites_around(number: int) -> list[int]:
    """The composite numbers next below (from 4 on) and next above."""
    below = next((candidate for candidate in range(number - 1, 3, -1) if is_composite(candidate)), 0)
    above = next(candidate for candidate in range(number + 1, number + 10) if is_composite(candidate))
    return [below, above] if below else [above]

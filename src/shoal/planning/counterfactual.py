"""What a change would do to a plan: faster links, more devices, another degree, slower links and compression.

Each change estimates rows again, or plans again in the part of the space where the best plans lie; the sentence says
what became of the time, or how much memory is missing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from shoal.cluster import BadCluster, Cluster, Level
from shoal.common.numbers import falls_to_zero
from shoal.estimate.cost.inputs import RECOMPUTE, SCHEDULES
from shoal.estimate.offload import HOST_LINK_BYTES_PER_S, StepPhases, offload_estimate
from shoal.planning.candidates import Candidates, Column, distinct
from shoal.planning.enumerate import Space, compressed, compressible
from shoal.planning.price import price_candidates, simulated, times_s
from shoal.planning.rank import Plan, Question, Simulate, make_plan, ranked, scores

NEAR = 2000
"""Rows, best first, that a change of links is tried on; as many again that would be best if messages took no time."""
CROSSING = 150
"""Rows of each kind among which dense and compressed plans are compared on slower links."""
AHEAD = 300
"""Rows, best first, whose choices a plan for another number of devices tries."""
AMONG = 2
"""Rows, best first, that are simulated to find the best with one choice changed."""
CLOSE = 0.01
"""The break-even bandwidth is found to a hundredth."""
MESSAGES = ("tensor", "context", "expert", "data", "pipeline")
GB = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One counterfactual."""

    what: str
    outcome: str
    ratio: float | None = None
    """The measure of the ranking, against the plan's best; None where nothing fits or nothing changes hands."""
    strategy: str | None = None

    def __str__(self) -> str:
        return f"{self.what}: {self.outcome}"


def changes(plan: Plan) -> list[Change]:
    """All that apply to the plan; none if nothing fits."""
    if plan.best is None:
        return []
    found = [*faster_links(plan), *other_sizes(plan), *other_degrees(plan)]
    crossing = compression_overtakes(plan)
    return [*found, *([crossing] if crossing else [])]


def with_links(cluster: Cluster, ratio: float, *, level: int) -> Cluster:
    """The cluster with one level of links `ratio` times as fast."""
    levels = tuple(
        Level(
            ranks=each.ranks,
            bytes_per_s=each.bytes_per_s * (ratio if place == level else 1.0),
            latency_s=each.latency_s,
        )
        for place, each in enumerate(cluster.levels)
    )
    return replace(cluster, levels=levels)


def faster_links(plan: Plan) -> list[Change]:
    """Each level of links twice as fast."""
    question, cluster = plan.question, plan.question.cluster
    near = _near(plan)
    found = []
    for level, each in enumerate(cluster.levels):
        if each.ranks == 1:
            continue
        faster = replace(question, cluster=with_links(cluster, 2.0, level=level))
        where = "intra-node" if level == 0 else "inter-node" if level == 1 else f"level {level + 1}"
        found.append(_change(f"twice the {where} bandwidth", plan, _replanned(faster, near)))
    return found


def other_sizes(plan: Plan) -> list[Change]:
    """One more node, and twice the devices."""
    question, cluster = plan.question, plan.question.cluster
    space = _space_ahead(plan)
    found = []
    sizes = [("one more node", cluster.devices + cluster.node), ("twice the devices", 2 * cluster.devices)]
    if cluster.node >= cluster.devices:
        sizes = sizes[1:]
    for name, devices in sizes:
        what = f"{name} ({devices:,} devices)"
        try:
            larger = replace(question, cluster=cluster.resized(devices))
        except BadCluster:
            continue
        grown = _ahead(larger, space)
        batch = question.global_batch * devices // cluster.devices
        if _gains(grown, plan) or question.by == "step" or batch * cluster.devices != question.global_batch * devices:
            found.append(_sized(what, plan, grown))
            continue
        # Odd numbers of nodes divide badly; a batch that grows with them leaves each device its share.
        shared = _ahead(replace(larger, global_batch=batch), space)
        found.append(_sized(what, plan, shared if _gains(shared, plan) else grown))
    return found


def _ahead(question: Question, space: Space) -> Plan:
    """Planned in a part of the space, and in all of it where nothing of that part fits."""
    found = make_plan(replace(question, space=space), simulate="best")
    return found if found.best is not None else make_plan(question, simulate="best")


def _gains(changed: Plan, plan: Plan) -> bool:
    return changed.best is not None and _measure(changed) < _measure(plan)


def _sized(what: str, plan: Plan, changed: Plan) -> Change:
    """As of other changes; with the batch if that changed, and with advice if nothing is gained."""
    change = _change(what, plan, changed)
    batch = changed.question.global_batch
    if batch != plan.question.global_batch:
        return replace(change, outcome=f"{change.outcome} and a batch of {batch:,}")
    if change.ratio is None or change.ratio < 1:
        return change
    return replace(change, outcome=f"no gain, it divides badly ({change.outcome}); better kept as a spare")


def other_degrees(plan: Plan) -> list[Change]:
    """The best plan with one choice changed, all others free only where they must give way (dp, micro-batches)."""
    best, rows = plan.best, plan.priced.rows
    assert best is not None
    wanted: list[tuple[str, str, int]] = []
    for axis in ("tp", "pp", "cp", "ep"):
        now = int(getattr(rows, axis)[best])
        wanted += [(axis, f"{axis} {now} -> {size}", size) for size in (now // 2, now * 2) if size >= 1 and size != now]
    zero, kept = int(rows.zero[best]), int(rows.recompute[best])
    wanted += [("zero", f"zero {zero} -> {each}", each) for each in (0, 1, 3) if each != zero]
    wanted += [
        ("recompute", f"recompute {RECOMPUTE[kept]} -> {RECOMPUTE[each]}", each) for each in range(3) if each != kept
    ]
    schedule = int(rows.schedule[best])
    if schedule:
        wanted += [
            ("schedule", f"{SCHEDULES[schedule]} -> {name}", SCHEDULES.index(name))
            for name in ("1f1b", "interleaved", "zero-bubble")
            if name != SCHEDULES[schedule]
        ]
    held = {
        name: getattr(rows, name) == getattr(rows, name)[best]
        for name in ("tp", "pp", "cp", "ep", "zero", "recompute", "outer", "compress")
    }
    found = []
    for column, what, value in wanted:
        mask = getattr(rows, column) == value
        for name, same in held.items():
            gives_way = name == column or (column in ("pp", "cp", "tp", "ep") and name == "outer")
            mask = mask if gives_way else mask & same
        if column == "pp" and value == 1:
            mask &= rows.schedule == 0
        if mask.any():
            found.append(_among(what, plan, mask))
    return found


def compression_overtakes(plan: Plan) -> Change | None:
    """The bandwidth between nodes below which the best compressed plan beats the best dense one."""
    question, cluster = plan.question, plan.question.cluster
    if cluster.node >= cluster.devices or len(cluster.levels) < 2:
        return None
    outermost = len(cluster.levels) - 1
    dense = _near_on_slow_links(plan, gradients=True)
    squeezed = compressed(_near_on_slow_links(plan, gradients=False), node=cluster.node)
    if not len(squeezed):
        return None
    # What fits does not depend on the links.
    fits = price_candidates(squeezed, shape=question.shape, cluster=cluster, profile=question.profile).fits
    squeezed = squeezed.rows(fits)

    def lead(log_ratio: float) -> float:
        """Logarithm of best dense over best compressed on links that many times as fast: above 0 compression wins."""
        if not len(squeezed):
            return -1.0
        links = with_links(cluster, float(np.exp(log_ratio)), level=outermost)
        best = [
            scores(question, rows, times_s(rows, shape=question.shape, cluster=links, profile=question.profile)).min()
            for rows in (dense, squeezed)
        ]
        return float(np.log(best[0] / best[1]))

    now_gb_s = cluster.levels[outermost].bytes_per_s / GB
    slow, fast = np.log(1e-4), np.log(100.0)
    ahead, behind = lead(slow), lead(fast)
    if ahead <= 0:
        return Change(what="compression", outcome="does not overtake dense gradients at any bandwidth")
    if behind > 0:
        return Change(
            what="compression", outcome=f"is ahead of dense gradients even at {np.exp(fast) * now_gb_s * 8:.3g} Gb/s"
        )
    low = float(np.exp(falls_to_zero(lead, slow, fast, above=ahead, below=behind, close=CLOSE)))
    links = replace(question, cluster=with_links(cluster, low, level=outermost))
    winner = _replanned(links, squeezed, simulate="nothing")
    assert winner.best is not None
    text = f"{winner.strategy(winner.best)} overtakes dense gradients (now {now_gb_s * 8:.3g} Gb/s a device)"
    return Change(
        what=f"a bandwidth below {low * now_gb_s * 8:.3g} Gb/s a device between nodes",
        outcome=text,
        strategy=str(winner.strategy(winner.best)),
    )


def _near(plan: Plan) -> Candidates:
    """The best rows, and those that would be best if messages took no time."""
    priced, rows = plan.priced, plan.ranked
    silent = priced.step_s[rows] - sum(priced.split_s[name][rows] for name in MESSAGES)
    quick = rows[np.argsort(silent, kind="stable")[:NEAR]]
    return priced.rows.rows(distinct(np.concatenate([rows[:NEAR], quick])))


def _near_on_slow_links(plan: Plan, *, gradients: bool) -> Candidates:
    """Best uncompressed rows on infinitely fast, current, 10x to 1000x slower links; `gradients` False: as if gradients
    took no time, so that these are the ones worth compressing.
    """
    priced = plan.priced
    rows = plan.ranked[priced.rows.compress[plan.ranked] == 0]
    data_s, pipeline_s = priced.split_s["data"][rows], priced.split_s["pipeline"][rows]
    if not gradients:
        rows = rows[compressible(priced.rows.rows(rows), node=plan.question.cluster.node)]
        data_s, pipeline_s = 0.0 * priced.split_s["data"][rows], priced.split_s["pipeline"][rows]
        first_s = priced.step_s[rows] - priced.split_s["data"][rows]
    else:
        first_s = priced.step_s[rows]
    best = [
        rows[np.argsort(first_s + slower * (data_s + pipeline_s), kind="stable")[:CROSSING]]
        for slower in (-1, 0, 9, 99, 999)
    ]
    return priced.rows.rows(distinct(np.concatenate(best)))


def _replanned(question: Question, rows: Candidates, *, simulate: Simulate = "best") -> Plan:
    priced = price_candidates(rows, shape=question.shape, cluster=question.cluster, profile=question.profile)
    return ranked(question, priced, simulate=simulate)


def _space_ahead(plan: Plan) -> Space:
    """The choices of the best rows, and the plainest ones."""
    rows = plan.priced.rows.rows(plan.ranked[:AHEAD])

    def there(name: str, *more: int) -> tuple[int, ...]:
        return tuple(int(each) for each in sorted({*getattr(rows, name).tolist(), *more}))

    pipelines = {
        (SCHEDULES[schedule], chunks)
        for schedule, chunks in zip(rows.schedule.tolist(), rows.chunks.tolist(), strict=True)
        if schedule
    }
    return Space(
        zeros=there("zero", 1),
        sequences=there("sequence"),
        pipelines=tuple(sorted(pipelines | {("1f1b", 1)})),
        micro_batches=there("micro_batch", 1),
        orders=there("order", 0),
        recomputes=tuple(RECOMPUTE[each] for each in there("recompute", 0)),
    )


def _change(what: str, plan: Plan, changed: Plan) -> Change:
    assert plan.best is not None
    if changed.best is None:
        if not len(changed.priced):
            batch = plan.question.global_batch
            return Change(what=what, outcome=f"no legal strategy: a batch of {batch:,} does not divide among them")
        return Change(what=what, outcome=f"out of memory by {_missing_gb(changed):.1f} GB")
    ratio = _measure(changed) / _measure(plan)
    other = str(changed.strategy(changed.best))
    same = other == str(plan.strategy(plan.best))
    return Change(
        what=what, outcome=f"{_percent(ratio)}{'' if same else f' with {other}'}", ratio=ratio, strategy=other
    )


def _among(what: str, plan: Plan, mask: Column) -> Change:
    assert plan.best is not None
    priced = plan.priced
    members = np.flatnonzero(mask)
    fitting = members[priced.fits[members]]
    if not len(fitting):
        missing = (priced.memory_bytes[members].min() - priced.limit_bytes) / GB
        return Change(what=what, outcome=f"out of memory by {missing:.1f} GB")
    near = fitting[np.argsort(plan.score[fitting], kind="stable")[:AMONG]]
    question = plan.question
    rows = priced.rows.rows(near)
    split_s = simulated(rows, shape=question.shape, cluster=question.cluster, profile=question.profile)
    score = plan.score[near] * sum(split_s.values()) / priced.step_s[near]
    first, ratio = near[np.argmin(score)], float(score.min() / plan.score[plan.best])
    return Change(what=what, outcome=_percent(ratio), ratio=ratio, strategy=str(plan.strategy(int(first))))


def _measure(plan: Plan) -> float:
    assert plan.best is not None
    return plan.cost(plan.best) if plan.question.by == "cost" else float(plan.score[plan.best])


def _missing_gb(plan: Plan) -> float:
    return float(plan.priced.memory_bytes.min() - plan.priced.limit_bytes) / GB


def _percent(ratio: float) -> str:
    change = 100 * (ratio - 1)
    return "no change" if abs(change) < 0.05 else f"{change:+.1f}%" if abs(change) < 9.95 else f"{change:+.0f}%"


def what_would_fit(plan: Plan) -> list[str]:
    """Nothing fits: by how much the best misses, and what would help, each in a sentence."""
    question, cluster, priced = plan.question, plan.question.cluster, plan.priced
    if not len(priced):
        return [
            f"no strategy of {cluster.devices:,} devices is legal for {question.shape.name} with a global batch of "
            f"{question.global_batch:,}: give a batch that divides among more of them"
        ]
    least = int(np.argmin(priced.memory_bytes))
    need, limit = float(priced.memory_bytes[least]), priced.limit_bytes
    split = {name: float(column[least]) for name, column in priced.memory_split_bytes.items()}
    lines = [
        f"nothing fits: the smallest of {len(priced):,} legal strategies, {plan.strategy(least)}, needs "
        f"{need / GB:.1f} GB on a device and {limit / GB:.1f} of {cluster.device.memory_bytes / GB:.1f} GB may be "
        f"planned for: it misses by {(need - limit) / GB:.1f} GB",
        "its memory: "
        + ", ".join(f"{name} {value / GB:.1f} GB" for name, value in split.items() if value >= 0.05 * GB),
    ]
    devices = cluster.devices
    while devices < 64 * cluster.devices:
        devices *= 2
        try:
            larger = make_plan(replace(question, cluster=cluster.resized(devices)), simulate="best")
        except BadCluster:
            break
        if larger.best is not None:
            lines.append(f"{devices:,} devices would do, with {larger.strategy(larger.best)}")
            break
    lines += _offloading(plan, least, split, need=need, limit=limit)
    lines.append(f"devices with {need / limit * cluster.device.memory_bytes / GB:.0f} GB of memory would do")
    return lines


def _offloading(plan: Plan, row: int, split: dict[str, float], *, need: float, limit: float) -> list[str]:
    """Which state of a row would have to wait in host memory for it to fit, and what that does to a step."""
    question, cluster = plan.question, plan.question.cluster
    state, parameters, kept = (split.get(name, 0.0) for name in ("optimizer", "parameters", "activations"))
    alone = price_candidates(
        plan.priced.rows.rows(np.array([row])),
        shape=question.shape,
        cluster=cluster,
        profile=question.profile,
        everything=True,
    )
    step_s = float(alone.step_s[0])
    update_s = float(alone.split_s["optimizer"][0])
    # A backward pass is two forward passes' worth of work.
    phases = StepPhases(forward_s=(step_s - update_s) / 3, backward_s=(step_s - update_s) * 2 / 3, update_s=update_s)
    zero = max((level.zero for level in plan.strategy(row).dp_levels), default=0)
    for terms, sizes in (
        ('offload("optimizer")', {"state_bytes": state}),
        ('offload("activations")', {"activation_bytes": kept}),
        ('offload("optimizer") * offload("activations")', {"state_bytes": state, "activation_bytes": kept}),
        ('offload("optimizer") * offload("parameters")', {"state_bytes": state, "parameter_bytes": parameters}),
    ):
        if "parameters" in terms and zero not in (0, 3):
            continue
        found = offload_estimate(phases, **sizes)
        if need - found.freed_bytes <= limit:
            return [
                f"{terms} would do: {(need - found.freed_bytes) / GB:.1f} GB stay on the device, and a step that would "
                f"take {step_s:.2f} s takes {found.step_s:.2f} s over a host link of "
                f"{HOST_LINK_BYTES_PER_S / GB:.0f} GB/s (assumed)"
            ]
    return []

"""`make_plan`: every legal strategy estimated, those that fit ranked, with a Pareto front and the best per family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from shoal.cluster import BadCluster, Cluster
from shoal.estimate.cost import GOOD, Profile
from shoal.estimate.estimate import Estimate
from shoal.estimate.target import TargetCost, default_target, local_slowdown
from shoal.planning.candidates import COMPRESSORS, FAMILIES, Candidates, Column, distinct
from shoal.planning.enumerate import (
    FULL_SPACE,
    Space,
    averaged,
    compressed,
    compressible,
    enumerate_legal,
    exchanged,
)
from shoal.planning.legal import facts_of
from shoal.planning.price import Priced, joined, price_candidates, simulated
from shoal.shapes.shape import Transformer
from shoal.strategy import ModelFacts, Strategy, SyncTerm

BY = ("time", "step", "cost")
Simulate = Literal["shown", "best", "nothing"]
"""Which rows of a ranking have their pipeline simulated."""
WORTH_CHANGING = 0.01
"""Ulysses, or compressors, are tried where what they send otherwise takes at least this part of the step."""
MOST_CHANGED = 5_000
"""Rows, the fastest first, for which Ulysses, compressors, or local steps are tried."""
KIND = ("tp", "pp", "schedule", "recompute", "compress", "local")
"""Columns by which plans that are shown differ."""
SHOWN = 10
"""Top rows simulated before a plan is shown, in addition to the Pareto front and the best of each family."""
ALIKE = 4
"""Further rows simulated of each kind (family, schedule, pp) among them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is to be planned: all that a change (a counterfactual) can change."""

    shape: Transformer
    cluster: Cluster
    global_batch: int
    target: TargetCost
    by: str = "time"
    precision: str = "bf16"
    price_an_hour: float | None = None
    """Price of one device."""
    watts: float | None = None
    """Of one device, if not what the cluster's device states."""
    price_a_kwh: float | None = None
    profile: Profile = GOOD
    facts: ModelFacts | None = None
    """Of a model that was looked into; else those of the shape."""
    space: Space = FULL_SPACE
    sync: SyncTerm | None = None
    """Islands that stay together by this rule are tried, too."""
    periods: tuple[int, ...] = ()
    """Steps from one exchange of such islands to the next that are tried; none: the rule's own."""

    @property
    def device_watts(self) -> float | None:
        """None where neither the user nor the device's datasheet says."""
        return self.cluster.device.watts if self.watts is None else self.watts

    @property
    def in_money(self) -> bool:
        """Whether a price was given; without one costs are device-hours."""
        return self.price_an_hour is not None or self.price_a_kwh is not None

    @property
    def model_facts(self) -> ModelFacts:
        """With this question's batch."""
        if self.facts is None:
            return facts_of(self.shape, global_batch=self.global_batch)
        return replace(self.facts, global_batch=self.global_batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Rows of one cluster, ranked."""

    question: Question
    priced: Priced
    """All legal rows, in no order."""
    score: Column
    """What the ranking minimises: seconds to the target, seconds of a step, or cost; infinite where it does not fit."""
    ranked: Column = field(repr=False)
    """Rows that fit, best first."""

    @property
    def best(self) -> int | None:
        """The first of the ranking; None if nothing fits."""
        return int(self.ranked[0]) if len(self.ranked) else None

    def strategy(self, row: int) -> Strategy:
        """A row as an expression."""
        return self.priced.rows.strategy(row)

    def steps(self, row: int) -> float:
        """Steps to the target."""
        rows, question = self.priced.rows, self.question
        term, local_steps = COMPRESSORS[int(rows.compress[row])], max(1, int(rows.local[row]))
        return question.target.steps(question.global_batch, compress=type(term).__name__, local_steps=local_steps)

    def time_s(self, row: int) -> float:
        """Seconds to the target."""
        return float(self.priced.step_s[row]) * self.steps(row)

    def estimate(self, row: int) -> Estimate:
        """A row in the form that a measured run has too."""
        priced = self.priced
        return Estimate(
            strategy=str(self.strategy(row)),
            world=self.question.cluster.devices,
            step_s=float(priced.step_s[row]),
            step_split={name: float(column[row]) for name, column in priced.split_s.items()},
            memory_bytes=round(float(priced.memory_bytes[row])),
            memory_split={name: round(float(column[row])) for name, column in priced.memory_split_bytes.items()},
            steps_to_target=self.steps(row),
            time_to_target_s=self.time_s(row),
        )

    def device_hours(self, row: int) -> float:
        """To the target, of all devices."""
        return self.time_s(row) / 3600 * self.question.cluster.devices

    def energy_kwh(self, row: int) -> float | None:
        """To the target, all devices at full power; None where the power is unknown."""
        watts = self.question.device_watts
        return None if watts is None else self.device_hours(row) * watts / 1000

    def cost(self, row: int) -> float:
        """Device-hours to the target, or money where a price was given: for devices, for energy, or the sum."""
        question = self.question
        if not question.in_money:
            return self.device_hours(row)
        energy_kwh = self.energy_kwh(row)
        for_energy = energy_kwh * question.price_a_kwh if energy_kwh and question.price_a_kwh else 0.0
        return self.device_hours(row) * (question.price_an_hour or 0.0) + for_energy


def precision_of(cluster: Cluster) -> str:
    """The format that a device trains in: bf16 if it has it, else fp16, else fp32."""
    return next((each for each in ("bf16", "fp16") if each in cluster.device.peak_flops), "fp32")


def default_batch(target: TargetCost, *, devices: int) -> int:
    """The power of two next below the noise scale, but at least one sample for eight devices, or many would idle."""
    noise, least = int(np.log2(max(1.0, target.noise_batch))), int(np.ceil(np.log2(max(1.0, devices / 8))))
    return int(2 ** max(noise, least))


def question_for(shape: Transformer, cluster: Cluster, *, global_batch: int | None = None, **more: object) -> Question:
    """A question with defaults: target by scaling laws, batch by the noise scale, precision by the device."""
    target = more.pop("target", None) or default_target(shape)
    assert isinstance(target, TargetCost)
    batch = global_batch or default_batch(target, devices=cluster.devices)
    precision = more.pop("precision", None) or precision_of(cluster)
    return Question(shape=shape, cluster=cluster, global_batch=batch, target=target, precision=precision, **more)  # type: ignore[arg-type]


def make_plan(question: Question, *, simulate: Simulate = "shown") -> Plan:
    """The plan for the question's own number of devices; `simulate` as in `ranked`."""
    if question.by not in BY:
        raise ValueError(f"by is {question.by!r}; expected one of {', '.join(BY)}")
    return ranked(question, price_all(question), simulate=simulate)


def price_all(question: Question) -> Priced:
    """All legal rows with their estimates."""
    shape, cluster = question.shape, question.cluster
    rows = enumerate_legal(
        world=cluster.devices,
        facts=question.model_facts,
        node=cluster.node,
        precision=question.precision,
        space=question.space,
    )
    priced = price_candidates(rows, shape=shape, cluster=cluster, profile=question.profile)

    def tried(*variants: Candidates) -> Priced:
        found = priced
        for more in variants:
            if len(more):
                found = joined(found, price_candidates(more, shape=shape, cluster=cluster, profile=question.profile))
        return found

    turns = _fastest(priced, _worth(priced, "context"))
    priced = tried(exchanged(priced.rows.rows(turns), world=cluster.devices, facts=question.model_facts))
    if cluster.node >= cluster.devices:
        return priced
    rows = priced.rows
    variants = [compressed(rows.rows(_fastest(priced, _worth(priced, "data"))), node=cluster.node)]
    if question.sync is not None:
        there = rows.rows(_fastest(priced, priced.fits & compressible(rows, node=cluster.node)))
        variants.append(averaged(there, node=cluster.node, sync=question.sync, periods=question.periods))
    return tried(*variants)


def _worth(priced: Priced, cause: str) -> Column:
    """Rows that fit and in which these messages take time."""
    return priced.fits & (priced.split_s[cause] >= WORTH_CHANGING * priced.step_s)


def _fastest(priced: Priced, which: Column) -> Column:
    found = np.flatnonzero(which)
    return np.asarray(found[np.argsort(priced.step_s[found], kind="stable")[:MOST_CHANGED]])


def ranked(question: Question, priced: Priced, *, simulate: Simulate = "shown") -> Plan:
    """Rows that fit, by the question's measure; of equals the one that needs less memory.

    Pipelines are ranked as if their stages were even; those that would be shown (or only the best) are simulated,
    again and again until all of them have been.
    """
    score = np.where(priced.fits, scores(question, priced.rows, priced.step_s), np.float32(np.inf))
    order = _sorted(np.flatnonzero(priced.fits), score, priced.memory_bytes)
    left = (priced.rows.pp > 1) & priced.fits & (simulate != "nothing")
    if left.any():
        kinds, priced = _kinds(priced.rows), priced.with_own_times()
    while True:
        plan = Plan(question=question, priced=priced, score=score, ranked=order)
        shown = order[:1]
        if simulate == "shown" and len(shown):
            shown = distinct(np.array([*one_of_each(plan, SHOWN), *pareto(plan), *families(plan).values()]))
        if not left[shown].any():
            return plan
        chosen = _with_the_like(shown[left[shown]], kinds, order[left[order]])
        left[chosen] = False
        rows = priced.rows.rows(chosen)
        found = simulated(rows, shape=question.shape, cluster=question.cluster, profile=question.profile)
        priced.put_times(chosen, found)
        score[chosen] = scores(question, rows, priced.step_s[chosen])
        order = _sorted(order, score, priced.memory_bytes)


def _kinds(rows: Candidates) -> Column:
    """Rows of one number have the same pipeline and belong to the same family."""
    parts = (rows.family, rows.schedule, rows.chunks, rows.pp)
    return np.ravel_multi_index(parts, [int(part.max()) + 1 for part in parts])


def _with_the_like(shown: Column, kinds: Column, order: Column) -> Column:
    """These rows and the best of their kind: if simulation moves one of them back, it moves those as well."""
    of_order = kinds[order]
    best = [order[np.flatnonzero(of_order == kind)[:ALIKE]] for kind in distinct(kinds[shown])]
    return distinct(np.concatenate([shown, *best]))


def scores(question: Question, rows: Candidates, step_s: Column) -> Column:
    """What the ranking minimises, for rows that take this long. In single precision, so that placements which take the
    same time tie, whatever their last digits."""
    if question.by == "step":
        return np.asarray(step_s.astype(np.float32))
    steps = np.array(
        [question.target.steps(question.global_batch, compress=type(term).__name__) for term in COMPRESSORS]
    )[rows.compress]
    for local_steps in distinct(rows.local[rows.local > 0]).tolist():
        slower = local_slowdown(local_steps, optimizer=question.target.optimizer)
        steps = steps * np.where(rows.local == local_steps, slower, 1.0)
    return np.asarray((step_s * steps).astype(np.float32))


def _sorted(rows: Column, score: Column, memory_bytes: Column) -> Column:
    """Best first, of equals the one that needs less memory. An order in which few are out of place takes a tenth of the
    time."""
    # One number to sort by: the bits of two numbers above 0 are ordered as the numbers are.
    bits = [column[rows].astype(np.float32).view(np.uint32).astype(np.uint64) for column in (score, memory_bytes)]
    return np.asarray(rows[np.argsort(bits[0] << np.uint64(32) | bits[1], kind="stable")])


def cheapest(question: Question) -> Plan:
    """By cost fewer devices may win: the plan of the number of devices, halved again and again, that costs least."""
    plans = []
    devices = question.cluster.devices
    while devices >= 1:
        try:
            smaller = replace(question, cluster=question.cluster.resized(devices))
        except BadCluster:
            break
        plans.append(make_plan(smaller))
        if devices % 2:
            break
        devices //= 2
    fitting = [plan for plan in plans if plan.best is not None]
    if not fitting:
        return plans[0]
    return min(fitting, key=lambda plan: plan.cost(plan.ranked[0]))


def one_of_each(plan: Plan, top: int) -> list[int]:
    """The best row of each kind. Rows of a kind belong to one family and have the same KIND; what else they differ in
    (the order of axes, micro-batches, ranks moved between levels of dp) hardly changes their time."""
    rows = plan.priced.rows
    columns = [rows.family, *(getattr(rows, name) for name in KIND)]
    found: dict[tuple[int, ...], int] = {}
    for row in plan.ranked:
        found.setdefault(tuple(int(column[row]) for column in columns), int(row))
        if len(found) == top:
            break
    return list(found.values())


def pareto(plan: Plan) -> list[int]:
    """Rows that no other beats in both time and memory, fastest first."""
    rows = plan.ranked
    if not len(rows):
        return []
    memory = plan.priced.memory_bytes[rows]
    least_before = np.concatenate([[np.inf], np.minimum.accumulate(memory)[:-1]])
    return [int(row) for row in rows[memory < least_before * (1 - 1e-9)]]


def families(plan: Plan) -> Mapping[str, int]:
    """The best row of each family, best family first; where nothing fits, the row that needs least memory."""
    codes = plan.priced.rows.family
    order = plan.ranked
    in_order = codes[order]
    firsts = [int(np.argmax(in_order == code)) for code in range(len(FAMILIES)) if (in_order == code).any()]
    found = {FAMILIES[in_order[place]]: int(order[place]) for place in sorted(firsts)}
    for code, name in enumerate(FAMILIES):
        members = np.flatnonzero(codes == code) if name not in found else order[:0]
        if len(members):
            found[name] = int(members[np.argmin(plan.priced.memory_bytes[members])])
    return found

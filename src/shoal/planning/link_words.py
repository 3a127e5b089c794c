"""Which period and which compression for the links between nodes: a plan's answer in sentences.

Of all rows that fit, the best with gradients that are summed densely in every step, compressed, and as islands of each
period.
"""

from __future__ import annotations

import numpy as np

from shoal.cluster import Cluster
from shoal.planning.candidates import COMPRESSORS, Column, distinct
from shoal.planning.quantities import seconds
from shoal.planning.rank import Plan

SMALL = 0.1
"""An exchange that takes at most this part of a step is no longer what holds training back."""


def link_words(plan: Plan) -> list[str]:
    """Sentences, the recommendation last."""
    rows, cluster = plan.priced.rows, plan.question.cluster
    if cluster.node >= cluster.devices:
        return ["All devices share a node: no slow link is to be spared."]
    together = (rows.local == 0) & (rows.compress == 0)
    dense = _best(plan, together)
    if dense is None:
        return []
    lines = [f"Links between nodes: {_rate(cluster)} for a device."]
    periods = distinct(rows.local[rows.local > 0]).tolist()
    masks = [together, (rows.local == 0) & (rows.compress > 0)]
    for steps in periods:
        masks += [(rows.local == steps) & (rows.compress == 0), (rows.local == steps) & (rows.compress > 0)]
    known = sorted(
        (row for row in (_best(plan, mask) for mask in masks) if row is not None), key=lambda row: plan.score[row]
    )
    lines += [_sentence(plan, row, dense) for row in known]
    enough = next((steps for steps in periods if _exchange(plan, steps) <= SMALL), None)
    if enough is not None:
        lines.append(
            f"From {enough} steps on an exchange takes at most {SMALL:.0%} of a step: longer periods gain "
            "little and learn less."
        )
    lines.append(_server_words(plan, dense))
    lines.append(f"So: {_name(plan, known[0])}: {plan.strategy(known[0])}")
    return lines


def _best(plan: Plan, which: Column) -> int | None:
    there = np.flatnonzero(which & np.isfinite(plan.score))
    return int(there[np.argmin(plan.score[there])]) if len(there) else None


def _name(plan: Plan, row: int) -> str:
    rows = plan.priced.rows
    steps, code = int(rows.local[row]), int(rows.compress[row])
    what = str(COMPRESSORS[code]) if code else "dense gradients"
    if not steps:
        return f"{what} in every step"
    return f"islands that exchange every {steps} steps{f' with {what}' if code else ''}"


def _sentence(plan: Plan, row: int, dense: int) -> str:
    step_s, data_s = float(plan.priced.step_s[row]), float(plan.priced.split_s["data"][row])
    more = plan.steps(row) / plan.steps(dense)
    sooner = plan.time_s(dense) / plan.time_s(row)
    return (
        f"{_name(plan, row)}: {seconds(step_s)} a step, {data_s / step_s:.0%} of it exchange; "
        f"{more:.3g} times the steps; at the target {sooner:.3g} times as fast as dense"
    )


def _exchange(plan: Plan, period: int) -> float:
    """The part of a step that exchanges take in the best dense islands of a period."""
    rows = plan.priced.rows
    row = _best(plan, (rows.local == period) & (rows.compress == 0))
    return 1.0 if row is None else float(plan.priced.split_s["data"][row] / plan.priced.step_s[row])


def _server_words(plan: Plan, dense: int) -> str:
    """What parameter servers would need to keep up with the workers."""
    question, priced = plan.question, plan.priced
    compute_s = float(priced.step_s[dense] - priced.split_s["data"][dense])
    rows, bytes_per_s = priced.rows, _bytes_per_s(question.cluster)
    workers = int(rows.outer[dense] * rows.dp[dense] * rows.ep[dense])
    shards = server_shards(4.0 * question.shape.parameters, workers, bytes_per_s=bytes_per_s, compute_s=compute_s)
    return (
        f"Parameter servers behind this link would need at least {shards:,} shards to keep up with {workers:,} "
        "workers (2 S N / (B T), Zou et al. 2017)."
    )


def server_shards(parameter_bytes: float, workers: int, *, bytes_per_s: float, compute_s: float) -> int:
    """Servers that take in N gradients and give out N models of S bytes, at B bytes a second each, while workers
    compute for T seconds: at least 2 S N / (B T)."""
    return max(1, int(np.ceil(2 * parameter_bytes * workers / (bytes_per_s * compute_s))))


def _bytes_per_s(cluster: Cluster) -> float:
    return float(cluster.levels[-1].bytes_per_s)


def _rate(cluster: Cluster) -> str:
    bits = 8 * _bytes_per_s(cluster)
    return f"{bits / 1e9:.3g} Gb/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mb/s"

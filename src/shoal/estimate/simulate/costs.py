"""What the events of one step take: passes through each stage, messages between stages, and what follows the passes.

The seconds are those of the cost model, stage by stage instead of for the slowest one; the simulation finds idle time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.estimate.cost import GOOD, PHYSICS, Inputs, Physics, Profile
from shoal.estimate.cost.data import data_time
from shoal.estimate.cost.inputs import SCHEDULES, Column
from shoal.estimate.cost.price import message_time, overfull
from shoal.estimate.cost.schedule import stages
from shoal.estimate.cost.span import pass_parts
from shoal.estimate.cost.time import head_time, layer_time
from shoal.strategy.terms import pp


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """Seconds of one undisturbed replica, and how many there are."""

    term: pp
    """The pipeline; pp(1) where there is none."""
    forward_s: tuple[float, ...]
    """For each stage one micro-batch."""
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    """The part of the backward that a split backward puts off."""
    message_s: float
    """From one stage to the next: it keeps both ends busy."""
    data_s: float
    """Gradients, as far as they show, after the last pass."""
    optimizer_s: float
    fixed_s: float
    """Once a step."""
    waits: float
    """Part of everything that is added because the slowest of many nodes is waited for."""
    replicas: int
    members: int
    """Ranks of one stage of one replica, which move in lockstep: tp, cp and ep."""
    node: int
    """Devices joined by the innermost links."""
    islands: int = 1
    """Groups of replicas that step by themselves; 1 where all step together."""
    period: int = 1
    """Steps after which islands are averaged,"""
    average_s: float = 0.0
    """which takes this long."""

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.replicas * self.members * self.term.n


def step_costs(
    inputs: Inputs,
    profile: Profile = GOOD,
    *,
    physics: Physics = PHYSICS,
    outer: int = 1,
    outer_s: float = 0.0,
    local_steps: int = 0,
    devices: int | None = None,
) -> StepCosts:
    """The costs of one row. `outer` groups of replicas lie outside it, which add `outer_s` to a step; with
    `local_steps` they are islands that are averaged after that many steps."""
    if len(inputs) != 1:
        raise ValueError(f"one strategy is simulated at a time; {len(inputs)} rows were given")
    layer = layer_time(inputs, profile, physics)
    heads = head_time(inputs, profile, physics)
    held = stages(inputs, profile)
    sharded = data_time(inputs, profile, physics, layer=layer, held=held)
    ranks, chunks, micro = (_integer(each) for each in (inputs.pp, inputs.chunks, inputs.micro_batches))
    alone = ranks == 1
    term = pp(
        ranks, "1f1b" if alone else SCHEDULES[_integer(inputs.schedule)], micro=micro, chunks=1 if alone else chunks
    )
    message_s = np.where(inputs.pp > 1, message_time(inputs, profile, physics), 0.0)
    parts = pass_parts(inputs, profile, layer=layer, heads=heads, sharded=sharded, message_s=message_s)
    forward, backward, weight = parts.stages(term.schedule, ranks=term.n, chunks=term.chunks)
    total = inputs.devices * outer if devices is None else np.asarray(float(devices))
    nodes = np.maximum(1.0, total / np.minimum(inputs.level_ranks[0], total))
    members = _integer(inputs.tp * inputs.cp * inputs.ep)
    return StepCosts(
        term=term,
        forward_s=_tuple(forward),
        backward_s=_tuple(backward),
        weight_s=_tuple(weight),
        message_s=_one(message_s),
        data_s=_one(sharded.step_s) + (0.0 if local_steps else outer_s),
        optimizer_s=_one(sharded.optimizer_s),
        fixed_s=physics.fixed_s,
        waits=_one(physics.jitter * np.log2(nodes) + overfull(inputs, profile, held) - 1),
        replicas=_integer(inputs.dp / inputs.ep) * outer,
        islands=outer if local_steps else 1,
        period=max(1, local_steps),
        average_s=local_steps * outer_s,
        members=members,
        node=_integer(inputs.level_ranks[0]),
    )


def _tuple(stages: Column) -> tuple[float, ...]:
    return tuple(stages[:, 0].tolist())


def _one(column: Column | float) -> float:
    return float(np.asarray(column).reshape(-1)[0])


def _integer(column: Column | float) -> int:
    return round(_one(column))

"""`price`: step time and memory of every row, with their splits, in one pass over columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shoal.estimate.cost.constants import PHYSICS, Physics
from shoal.estimate.cost.data import data_time
from shoal.estimate.cost.inputs import Column, Inputs
from shoal.estimate.cost.links import path
from shoal.estimate.cost.memory import Memory, memory
from shoal.estimate.cost.profile import Profile
from shoal.estimate.cost.profiles import GOOD
from shoal.estimate.cost.schedule import INTERLEAVED, Stages, bubble_s, messages, spared_s, stages
from shoal.estimate.cost.span import pass_parts, step_spans_s
from shoal.estimate.cost.time import PASSES, head_time, layer_time

SPLIT = ("compute", "host", "tensor", "context", "expert", "data", "pipeline", "bubble", "optimizer", "other")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Columns of predictions. `split_s` sums to `step_s`, `memory.split_bytes` to `memory_bytes`."""

    step_s: Column
    split_s: Mapping[str, Column]
    memory: Memory
    fits: Column

    @property
    def memory_bytes(self) -> Column:
        """Peak of the rank that needs most."""
        return self.memory.total_bytes

    def __getattr__(self, name: str) -> Column:
        """`compute_s` and its like."""
        if name.endswith("_s") and name[:-2] in SPLIT:
            return self.split_s[name[:-2]]
        raise AttributeError(name)


def price(inputs: Inputs, profile: Profile = GOOD, *, physics: Physics = PHYSICS, simulate: bool = True) -> Prices:
    """Estimates of all rows, under one profile or (`gathered`) one for each; `simulate` as in `step_split_s`."""
    split = step_split_s(inputs, profile, physics=physics, simulate=simulate)
    held = memory(inputs, profile, held=stages(inputs, profile))
    return Prices(
        step_s=sum(split.values(), np.zeros(1)), split_s=split, memory=held, fits=held.total_bytes <= held.limit_bytes
    )


def step_split_s(
    inputs: Inputs, profile: Profile = GOOD, *, physics: Physics = PHYSICS, simulate: bool = True
) -> dict[str, Column]:
    """The time of a step of every row, by cause.

    Pipelines are simulated; `simulate` False takes what even stages would give instead, for more rows than can be.
    """
    layer = layer_time(inputs, profile, physics)
    head_forward, head_backward = head_time(inputs, profile, physics)
    held = stages(inputs, profile)
    micro = inputs.micro_batches
    sharded = data_time(inputs, profile, physics, layer=layer, held=held)

    layer_s = layer.forward.total_s + layer.backward.total_s + sharded.layer_s
    head_s = head_forward.total_s + head_backward.total_s + sharded.head_s
    stage_hosts_s = np.where(inputs.pp > 1, profile.host_pass_s, 0.0)
    plain_s, last_s = held.most * layer_s + stage_hosts_s, held.last * layer_s + head_s
    message_s = np.where(inputs.pp > 1, message_time(inputs, profile, physics), 0.0)
    # Stages at the ends have one neighbour, those inside two.
    inside = np.where((inputs.pp > 2) & (inputs.schedule != INTERLEAVED), 2.0, 1.0)
    # Whichever makes the longer step, so that faster links never change it for a longer one.
    more = messages(inputs, inside=inside > 1) - messages(inputs, inside=inside < 1)
    last_slowest = (micro - 1 / inputs.chunks) * (last_s - plain_s) >= more * message_s
    layers_there = np.where(last_slowest, held.last, held.most)
    head_there = np.where(last_slowest, 1.0, 0.0)
    slowest_s = np.where(last_slowest, last_s, plain_s)
    through_s = inputs.layers * layer_s + head_s + (inputs.pp - 1) * stage_hosts_s

    pipeline_s = messages(inputs, inside=(inside > 1) & ~last_slowest) * message_s
    idle_s = bubble_s(
        inputs,
        others_s=np.maximum(0.0, through_s - slowest_s),
        forward_s=layers_there * layer.forward.total_s,
        backward_s=layers_there * layer.backward.total_s,
        weight_s=layers_there * layer.weight_s,
    )
    if simulate:
        # The simulated span replaces the guess; messages that hide behind other waiting are not distinguished from it.
        heads = (head_forward, head_backward)
        parts = pass_parts(inputs, profile, layer=layer, heads=heads, sharded=sharded, message_s=message_s)
        waits_s = step_spans_s(inputs, parts) - micro * slowest_s
        known = ~np.isnan(waits_s)
        pipeline_s = np.where(known, np.maximum(0.0, np.minimum(pipeline_s, waits_s)), pipeline_s)
        idle_s = np.where(known, waits_s - pipeline_s, idle_s)
    idle_s = np.maximum(np.minimum(0.0, idle_s), idle_s - spared_s(inputs, profile, layers_there * layer.weight_s))
    split = {
        cause: micro
        * (
            layers_there * (getattr(layer.forward, f"{cause}_s") + getattr(layer.backward, f"{cause}_s"))
            + head_there * (getattr(head_forward, f"{cause}_s") + getattr(head_backward, f"{cause}_s"))
        )
        for cause in PASSES
    }
    split["host"] = split["host"] + micro * stage_hosts_s * (1 - head_there)
    split["data"] = micro * (layers_there * sharded.layer_s + head_there * sharded.head_s) + sharded.step_s
    split["pipeline"], split["bubble"], split["optimizer"] = pipeline_s, idle_s, sharded.optimizer_s
    so_far = sum(split.values())
    nodes = np.maximum(1.0, inputs.devices / np.minimum(inputs.level_ranks[0], inputs.devices))
    split["other"] = physics.fixed_s + so_far * (physics.jitter * np.log2(nodes) + overfull(inputs, profile, held) - 1)
    return split


def overfull(inputs: Inputs, profile: Profile, held: Stages) -> Column | float:
    """How many times as long a step takes that needs more memory than the device has, where a framework runs it."""
    if np.all(np.asarray(profile.overfull) == 1.0):
        return 1.0
    return np.where(memory(inputs, profile, held=held).total_bytes > inputs.memory_bytes, profile.overfull, 1.0)


def message_time(inputs: Inputs, profile: Profile, physics: Physics) -> Column:
    """One message from a stage to the next."""
    links = path(inputs, profile, physics, ranks=inputs.pp, stride=inputs.pp_stride)
    element_bytes = np.where(inputs.wide, 4.0, 2.0)
    border = inputs.micro_batch * inputs.sequence_length / inputs.cp * inputs.hidden * element_bytes / inputs.tp
    crowd = (
        (inputs.devices >= profile.crowd_devices)
        | (inputs.tp >= profile.crowd_tensor)
        | ((2 * inputs.devices >= profile.crowd_devices) & (inputs.dp >= profile.crowd_replicas) & (inputs.zero >= 1))
    )
    stalls = np.where(crowd, profile.stall_message_s, 0.0)
    return (links.message_s(border) + physics.message_s) * np.asarray(profile.message_ratio) + stalls

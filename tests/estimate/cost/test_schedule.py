"""The closed forms of pipelines say what simulating the schedule gives."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.cluster import cluster
from shoal.estimate.cost import PROFILES, inputs_for
from shoal.estimate.cost.schedule import bubble_s, in_flight, stages, weights_waiting
from shoal.estimate.pipeline.simulate import simulate_term
from shoal.shapes.presets import preset
from shoal.strategy.terms import pp

CASES = [
    ("gpipe", 4, 8, 1),
    ("1f1b", 4, 8, 1),
    ("1f1b", 8, 4, 1),
    ("interleaved", 4, 8, 2),
    ("interleaved", 4, 16, 3),
    ("zero-bubble", 4, 8, 1),
    ("zero-bubble", 4, 2, 1),
    ("zero-bubble", 8, 16, 1),
    ("zero-bubble", 4, 16, 2),
]


def inputs_of(schedule: str, ranks: int, micro: int, chunks: int):  # type: ignore[no-untyped-def]
    return inputs_for(
        preset("gpt:13b"), cluster("a100", devices=8 * ranks), micro, pp=ranks, chunks=chunks, schedule=schedule
    )


@pytest.mark.parametrize(("schedule", "ranks", "micro", "chunks"), CASES)
@pytest.mark.parametrize("input_s", [1.0, 1.4])
def test_bubbles_are_those_of_the_played_schedule(
    schedule: str, ranks: int, micro: int, chunks: int, input_s: float
) -> None:
    timeline = simulate_term(
        pp(ranks, schedule, micro=micro, chunks=chunks), forward_s=1.0, backward_s=1 + input_s, weight_s=1.0
    )
    stage_s = chunks * (2 + input_s)
    found = bubble_s(
        inputs_of(schedule, ranks, micro, chunks),
        others_s=np.array([(ranks - 1) * stage_s]),
        forward_s=np.array([1.0 * chunks]),
        backward_s=np.array([(1 + input_s) * chunks]),
        weight_s=np.array([1.0 * chunks]),
    )
    assert found[0] == pytest.approx(timeline.makespan_s - micro * stage_s)


@pytest.mark.parametrize(("schedule", "ranks", "micro", "chunks"), CASES)
def test_micro_batches_in_flight_are_those_of_the_played_schedule(
    schedule: str, ranks: int, micro: int, chunks: int
) -> None:
    timeline = simulate_term(pp(ranks, schedule, micro=micro, chunks=chunks))
    inputs = inputs_of(schedule, ranks, micro, chunks)
    for position in range(ranks):
        place = np.array([float(position)])
        kept = in_flight(inputs, PROFILES["good"], place) + weights_waiting(inputs, PROFILES["good"], place)
        assert kept[0] == pytest.approx(timeline.in_flight[position] / chunks)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 5])
def test_even_stages_hold_all_layers_between_them(ranks: int) -> None:
    inputs = inputs_for(preset("gpt:13b"), cluster("a100", devices=8 * ranks), 64, pp=ranks)
    held = stages(inputs, PROFILES["good"])
    layers = preset("gpt:13b").layers
    assert held.most[0] == -(-layers // ranks)
    assert held.last[0] <= held.most[0]


def test_stages_by_cost_count_the_head_as_layers() -> None:
    # 16 layers of 67.1 million weights and a head of four such layers: the last of four stages holds the head and one
    # layer.
    from shoal.shapes.shape import Transformer

    shape = Transformer(layers=16, hidden=2048, heads=32, ffn=8192, gated=True, vocab=131_072, sequence=4096)
    held = stages(inputs_for(shape, cluster("h100", devices=8), 64, pp=4, dp=2), PROFILES["nanotron"])
    assert (held.first[0], held.most[0], held.last[0]) == (5, 5, 1)

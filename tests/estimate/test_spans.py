"""The time of a pipeline, in waves, is that of the event simulation whatever each stage takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from shoal.cluster import cluster
from shoal.estimate.cost import PROFILES, inputs_for, price
from shoal.estimate.cost import span as cost_span
from shoal.estimate.cost.inputs import SCHEDULES as NAMES
from shoal.estimate.cost.schedule import layers_of_stages, split_by_cost, stages
from shoal.estimate.cost.span import Passes
from shoal.estimate.pipeline.spans import Pipelines, num_passes, spans_s
from shoal.estimate.simulate import StepCosts, simulate_step
from shoal.shapes.presets import preset
from shoal.strategy.schedule import rank_stages, stage_rank
from shoal.strategy.terms import pp

DRAWN = (Phase.explicit, Phase.generate)
SCHEDULES = ("gpipe", "1f1b", "zero-bubble", "interleaved")


def random_pipelines(schedule: str, *, seed: int, rows: int = 3) -> Pipelines:
    """Stages that have nothing in common, messages from none to longer than passes."""
    draw = np.random.default_rng(seed)
    ranks = int(draw.integers(2, 8))
    chunks = int(draw.integers(2, 5)) if schedule == "interleaved" else int(draw.integers(1, 4))
    chunks = chunks if schedule in ("interleaved", "zero-bubble") else 1
    micro = ranks * int(draw.integers(1, 4)) if schedule == "interleaved" else int(draw.integers(1, 16))
    size = (ranks * chunks, rows)
    backward_s = draw.choice([0.0, 1.0, 2.0], size) + 2 * draw.random(size)
    return Pipelines(
        schedule=schedule,
        ranks=ranks,
        chunks=chunks,
        micro=micro,
        forward_s=0.1 + draw.random(size),
        backward_s=backward_s,
        weight_s=backward_s * draw.random(size),
        message_s=draw.random(rows) * draw.choice([0.0, 0.1, 5.0]),
    )


def simulated_s(of: Pipelines, row: int) -> float:
    return simulate_step(
        StepCosts(
            term=pp(of.ranks, of.schedule, micro=of.micro, chunks=of.chunks),
            forward_s=tuple(of.forward_s[:, row]),
            backward_s=tuple(of.backward_s[:, row]),
            weight_s=tuple(of.weight_s[:, row]),
            message_s=float(of.message_s[row]),
            data_s=0,
            optimizer_s=0,
            fixed_s=0,
            waits=0,
            replicas=1,
            members=1,
            node=1,
        )
    ).step_s


@pytest.mark.long
@given(seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=4), schedules=st.permutations(SCHEDULES))
@settings(max_examples=60, deadline=None, phases=DRAWN)
def test_waves_of_several_schedules_at_once_are_the_play_of_each(seeds: list[int], schedules: list[str]) -> None:
    several = [random_pipelines(name, seed=seed) for name, seed in zip(schedules, seeds, strict=False)]
    for each, found in zip(several, spans_s(several), strict=True):
        assert found == pytest.approx([simulated_s(each, row) for row in range(3)], rel=1e-9)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=300, deadline=None, phases=DRAWN)
def test_waves_hold_for_stages_that_have_nothing_in_common(schedule: str, seed: int) -> None:
    of = random_pipelines(schedule, seed=seed, rows=1)
    assert spans_s([of])[0][0] == pytest.approx(simulated_s(of, 0), rel=1e-9)


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks", "layers"),
    [
        ("interleaved", 4, 4, 21),
        ("interleaved", 8, 2, 24),
        ("zero-bubble", 4, 2, 10),
        ("zero-bubble", 8, 1, 11),
        ("1f1b", 4, 1, 11),
        ("1f1b", 8, 1, 13),
        ("gpipe", 4, 1, 10),
    ],
)
@pytest.mark.parametrize("head", [0.0, 4.0])
def test_long_steps_go_on_at_the_pace_of_their_first_rounds(
    schedule: str, ranks: int, chunks: int, layers: int, head: float
) -> None:
    micro = 1 + cost_span.MOST_PASSES // num_passes(schedule, ranks=ranks, chunks=chunks, micro=1)
    micro = -(-2 * micro // ranks) * ranks
    one = np.ones(1)
    parts = Passes(
        layers=layers * one,
        cost_layers=0 * one,
        forward_s=one,
        backward_s=2.2 * one,
        weight_s=one,
        head_forward_s=head * one,
        head_backward_s=2 * head * one,
        host_s=0.1 * one,
        message_s=0.05 * one,
    )
    forward, backward, weight = parts.stages(schedule, ranks=ranks, chunks=chunks)
    whole = spans_s(
        [
            Pipelines(
                schedule=schedule,
                ranks=ranks,
                chunks=chunks,
                micro=micro,
                forward_s=forward,
                backward_s=backward,
                weight_s=weight,
                message_s=parts.message_s,
            )
        ]
    )[0]
    found = np.full(1, np.nan)
    cost_span._fill(found, parts, {(NAMES.index(schedule), ranks, chunks, micro): np.array([0])})
    assert len(cost_span._micro(schedule, ranks=ranks, chunks=chunks, micro=micro)) == 2
    assert found[0] == pytest.approx(whole[0], rel=0.01)


@pytest.mark.parametrize("profile", ["good", "nanotron"])
@given(
    layers=st.integers(1, 60),
    pp=st.integers(2, 8),
    vocab=st.sampled_from([64, 128_000]),
    kind=st.sampled_from([("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1), ("zero-bubble", 2)]),
)
@settings(max_examples=100, deadline=None, phases=DRAWN)
def test_layers_are_split_once_for_memory_time_and_simulation(
    profile: str, layers: int, pp: int, kind: tuple[str, int], vocab: int
) -> None:
    schedule, chunks = kind
    layers = max(layers, pp * chunks)
    shape = replace(preset("gpt2:medium"), layers=layers, vocab=vocab)
    inputs = inputs_for(shape, cluster("dgx-a100", devices=8), pp, pp=pp, chunks=chunks, schedule=schedule)
    chosen = PROFILES[profile]
    split = layers_of_stages(inputs.layers, split_by_cost(inputs, chosen), pp * chunks)[:, 0]
    assert split.sum() == layers
    assert (split >= 0).all()
    of_ranks = [split[list(rank_stages(rank, pp, chunks, schedule))].sum() for rank in range(pp)]
    home = stage_rank(pp * chunks - 1, pp, chunks, schedule)
    held = stages(inputs, chosen)
    assert (held.first[0], held.last[0]) == (of_ranks[0], of_ranks[home])
    assert held.most[0] == max(layers for rank, layers in enumerate(of_ranks) if rank != home)


def test_without_the_simulation_estimates_stay_near_it() -> None:
    """What ranks hundreds of thousands of strategies before the best of them are simulated. A guess that is too long
    would hide a good plan; of stages that are not even it is too short, and the simulation puts that right."""
    shape = preset("gpt:13b")
    for schedule, chunks, bound in (("interleaved", 4, 0.10), ("interleaved", 3, 0.10), ("zero-bubble", 1, 0.02)):
        for micro in (8, 16, 32):
            inputs = inputs_for(
                shape, cluster("dgx-a100", devices=16), 2 * micro, dp=2, pp=8, schedule=schedule, chunks=chunks
            )
            near, true = price(inputs, simulate=False).step_s[0], price(inputs).step_s[0]
            assert near == pytest.approx(true, rel=bound)
            assert schedule != "interleaved" or near <= true * (1 + 1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None, phases=DRAWN)
def test_no_step_is_shorter_than_its_busiest_rank(schedule: str, seed: int) -> None:
    of = random_pipelines(schedule, seed=seed)
    assert (cost_span._busiest_s(of, of.micro) <= spans_s([of])[0] * (1 + 1e-9)).all()


def test_the_slowest_rank_sets_the_pace_of_a_long_step_however_late() -> None:
    """Here the fifth micro-batch of a rank is not yet held up by the slowest rank, which later ones are."""
    one, ranks, micro = np.ones(1), 8, 1000
    parts = Passes(
        layers=18 * one,
        cost_layers=0 * one,
        forward_s=one,
        backward_s=1.9 * one,
        weight_s=one,
        head_forward_s=0.5 * one,
        head_backward_s=4.9 * one,
        host_s=0 * one,
        message_s=1.7 * one,
    )
    forward, backward, weight = parts.stages("1f1b", ranks=ranks, chunks=1)
    [whole] = spans_s(
        [
            Pipelines(
                schedule="1f1b",
                ranks=ranks,
                chunks=1,
                micro=micro,
                forward_s=forward,
                backward_s=backward,
                weight_s=weight,
                message_s=parts.message_s,
            )
        ]
    )
    found = np.full(1, np.nan)
    cost_span._fill(found, parts, {(NAMES.index("1f1b"), ranks, 1, micro): np.array([0])})
    assert found[0] == pytest.approx(whole[0], rel=0.003)

"""The traffic formulas against byte totals written down independently, from the papers rather than from the code."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.comm.ledger import Entry, Key, Ledger
from shoal.estimate.traffic import Buffer, Group, Norm, ShardTable, predict

MB = 1 << 20


def table(zero: int, ranks: int, *, copies: int = 1, buffers: list[tuple[int, bool]], **changes: object) -> ShardTable:
    sharded = zero > 0
    replicas = Group(axis="dp", ranks=ranks * copies)
    sharding = Group(axis="in" if sharded else "dp", ranks=ranks if sharded else 1)
    outer = Group(axis="out" if sharded else "dp", ranks=copies if sharded else ranks * copies)
    micro = int(changes.get("micro_batches", 1))  # type: ignore[call-overload]
    settings: dict[str, object] = {
        "zero": zero,
        "micro_batches": 1,
        "num_parameters": 0,
        "world": replicas,
        "samples": replicas,
        "norm": sharding,
        "buffers": tuple(
            Buffer(
                padded_bytes=n,
                replicas=replicas,
                sharding=sharding,
                copies=outer,
                reductions=micro if zero >= 2 else 1,
                forward_gathers=micro if zero == 3 else 0,
                backward_gathers=micro if zero == 3 and again else 0,
            )
            for n, again in buffers
        ),
    }
    return ShardTable(**(settings | changes))  # type: ignore[arg-type]


def without_loss(ledger: Ledger) -> Ledger:
    """Without the few numbers that steer a step: loss, count and norm."""
    return Ledger(
        {
            key: entry
            for key, entry in ledger.entries.items()
            if key.phase != "loss" and (key.phase, key.kind) != ("optimizer", "all_reduce")
        }
    )


def entry(ledger: Ledger, axis: str, phase: str, kind: str) -> tuple[int, int]:
    found = ledger.entries.get(Key(axis, phase, kind), Entry())
    return found.calls, found.bytes


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_data_parallelism_sends_twice_the_model_less_one_share(ranks: int) -> None:
    sizes = [12 * MB, 24 * MB]
    ledger = without_loss(predict(table(0, ranks, buffers=[(n, False) for n in sizes])))
    assert ledger.calls == 2
    assert ledger.bytes == 2 * (ranks - 1) * sum(sizes) // ranks


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("zero", [1, 2])
def test_sharding_the_optimiser_costs_no_more_than_an_all_reduce(zero: int, ranks: int) -> None:
    buffers = [(12 * MB, False), (24 * MB, False)]
    whole = without_loss(predict(table(0, ranks, buffers=buffers)))
    assert without_loss(predict(table(zero, ranks, buffers=buffers))).bytes == whole.bytes


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_stage_3_tends_to_one_and_a_half_times_an_all_reduce(ranks: int) -> None:
    # Rajbhandari et al. 2020: the parameters travel twice and the gradients once.
    def ratio(blocks: int) -> float:
        buffers = [(8 * MB, number < blocks - 2) for number in range(blocks)]  # Root and last block are not regathered.
        many = without_loss(predict(table(3, ranks, buffers=buffers)))
        return many.bytes / without_loss(predict(table(0, ranks, buffers=buffers))).bytes

    assert ratio(2) == pytest.approx(1.0)
    assert ratio(200) == pytest.approx(1.5, abs=0.01)
    assert ratio(10) < ratio(100) < 1.5


def test_a_replicated_shard_is_reduced_at_its_own_size_over_the_outer_level() -> None:
    n, inner, outer = 24 * MB, 4, 2
    ledger = predict(table(3, inner, copies=outer, buffers=[(n, True)]))
    assert entry(ledger, "in", "gradient", "reduce_scatter") == (1, n * (inner - 1) // inner)
    assert entry(ledger, "out", "gradient", "all_reduce") == (1, 2 * (n // inner) * (outer - 1) // outer)
    assert entry(ledger, "in", "forward", "all_gather") == entry(ledger, "in", "backward", "all_gather")


@pytest.mark.parametrize(("zero", "scatters", "gathers"), [(1, 1, 1), (2, 5, 1), (3, 5, 5)])
def test_micro_batches_repeat_just_what_each_stage_cannot_keep(zero: int, scatters: int, gathers: int) -> None:
    ledger = predict(table(zero, 2, buffers=[(MB, False)], micro_batches=5))
    assert entry(ledger, "in", "gradient", "reduce_scatter")[0] == scatters
    assert entry(ledger, "in", "forward" if zero == 3 else "optimizer", "all_gather")[0] == gathers


def test_the_norm_costs_one_number_where_there_are_shards_and_nothing_elsewhere() -> None:
    for zero in range(4):
        ledger = predict(table(zero, 4, buffers=[(MB, False)]))
        expected = (0, 0) if zero == 0 else (1, 2 * 8 * 3 // 4)
        assert entry(ledger, "in", "optimizer", "all_reduce") == expected


def test_the_loss_travels_with_one_number_for_each_parameter() -> None:
    ledger = predict(table(0, 2, buffers=[], num_parameters=10))
    assert entry(ledger, "dp", "loss", "all_reduce") == (1, (5 + 10) * 8)


def test_synchronised_batch_norm_sends_two_numbers_a_channel_each_way() -> None:
    ranks, channels, micro = 4, 16, 3
    norms = (Norm(channels=channels, itemsize=4),)
    ledger = predict(table(0, ranks, buffers=[], norms=norms, micro_batches=micro))
    assert entry(ledger, "dp", "forward", "all_gather") == (micro, micro * (2 * channels + 1) * 4 * (ranks - 1))
    sums = 2 * channels * 4
    assert entry(ledger, "dp", "backward", "all_reduce") == (micro, micro * 2 * sums * (ranks - 1) // ranks)
    again = predict(table(0, ranks, buffers=[], norms=(Norm(channels=channels, itemsize=4, recomputed=True),)))
    assert entry(again, "dp", "backward", "all_gather") == (1, (2 * channels + 1) * 4 * (ranks - 1))


@pytest.mark.parametrize("zero", range(4))
def test_a_single_rank_sends_nothing(zero: int) -> None:
    ledger = predict(table(zero, 1, buffers=[(MB, True)], norms=(Norm(channels=8, itemsize=4),)))
    assert ledger.entries == {}


@given(
    zero=st.integers(0, 3),
    ranks=st.integers(1, 9),
    copies=st.integers(1, 4),
    micro=st.integers(1, 4),
    units=st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=6),
)
def test_traffic_adds_up_over_buffers(
    zero: int, ranks: int, copies: int, micro: int, units: list[tuple[int, bool]]
) -> None:
    share = 64 * prod((ranks, copies))
    buffers = [(n * share, again) for n, again in units]
    together = without_loss(predict(table(zero, ranks, copies=copies, buffers=buffers, micro_batches=micro)))
    apart = Ledger()
    for one in buffers:
        apart += without_loss(predict(table(zero, ranks, copies=copies, buffers=[one], micro_batches=micro)))
    assert together.differences(apart) == []
    assert all(value.bytes >= 0 and value.messages >= value.calls for value in together.entries.values())

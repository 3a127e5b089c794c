"""The order of the data depends on (seed, counter) and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.job.errors import JobError
from shoal.job.order import Order, share

orders = st.builds(
    Order,
    seed=st.integers(0, 2**40),
    num_samples=st.integers(1, 40),
    global_batch=st.integers(1, 90),
    last_batch=st.sampled_from(["wrap", "short"]),
)


def walk(order: Order, batches: int, counter: int = 0) -> list[np.ndarray]:
    found = []
    for _ in range(batches):
        found.append(order.indices(counter))
        counter = order.next(counter)
    return found


@given(order=orders)
@settings(max_examples=60, deadline=None)
def test_every_epoch_visits_every_sample_once(order: Order) -> None:
    wanted = 3 * order.num_samples
    batches = walk(order, wanted // min(order.global_batch, order.num_samples) + 3)
    visited = np.concatenate(batches)[:wanted].reshape(3, order.num_samples)
    assert (np.sort(visited, axis=1) == np.arange(order.num_samples)).all()


@given(order=orders, counter=st.integers(0, 10**12))
@settings(max_examples=60, deadline=None)
def test_the_batch_is_a_function_of_seed_and_counter_only(order: Order, counter: int) -> None:
    fresh = Order(order.seed, order.num_samples, order.global_batch, order.last_batch)
    walk(order, 5, counter=counter // 2)  # what was asked before must not matter
    assert np.array_equal(order.indices(counter), fresh.indices(counter))
    assert len(fresh.indices(counter)) == fresh.next(counter) - counter


@given(order=orders, counter=st.integers(0, 500))
@settings(max_examples=60, deadline=None)
def test_wrapped_batches_are_full_and_short_ones_end_with_their_epoch(order: Order, counter: int) -> None:
    size = len(order.indices(counter))
    if order.last_batch == "wrap":
        assert size == order.global_batch
    else:
        left = order.num_samples - counter % order.num_samples
        assert size == min(order.global_batch, left)


def test_the_batch_size_does_not_change_the_sequence_of_samples() -> None:
    small, large = Order(3, 17, 4), Order(3, 17, 50)
    assert np.array_equal(np.concatenate(walk(small, 25))[:50], large.indices(0))


def test_a_batch_larger_than_the_data_runs_over_several_epochs() -> None:
    order = Order(0, 5, 23)
    expected = np.concatenate([order.permutation(epoch) for epoch in range(5)])[:23]
    assert np.array_equal(order.indices(0), expected)


def test_the_permutation_is_the_documented_one() -> None:
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([11, 2])))
    assert np.array_equal(Order(11, 30, 30).indices(60), generator.permutation(30))


def test_epochs_and_seeds_differ() -> None:
    order = Order(0, 100, 100)
    assert not np.array_equal(order.indices(0), order.indices(100))
    assert not np.array_equal(order.indices(0), Order(1, 100, 100).indices(0))


def test_writing_to_a_batch_does_not_disturb_the_order() -> None:
    order = Order(0, 10, 4)
    batch = order.indices(0)
    expected = batch.copy()
    batch[:] = 0
    assert np.array_equal(order.indices(0), expected)


@given(size=st.integers(0, 60), ranks=st.integers(1, 13), micros=st.integers(1, 9))
def test_every_split_recovers_the_global_batch_in_order(size: int, ranks: int, micros: int) -> None:
    batch = np.arange(size) * 7
    pieces = [
        share(batch, rank=rank, ranks=ranks, micro=micro, micros=micros)
        for micro in range(micros)
        for rank in range(ranks)
    ]
    assert np.array_equal(np.concatenate(pieces), batch)


@given(size=st.integers(0, 60), ranks=st.integers(1, 13), micros=st.integers(1, 9))
def test_shares_of_a_micro_batch_differ_by_at_most_one(size: int, ranks: int, micros: int) -> None:
    batch = np.arange(size)
    for micro in range(micros):
        chunk = np.array_split(batch, micros)[micro]
        pieces = [share(batch, rank=rank, ranks=ranks, micro=micro, micros=micros) for rank in range(ranks)]
        for piece, expected in zip(pieces, np.array_split(chunk, ranks), strict=True):
            assert np.array_equal(piece, expected)
        assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


def test_more_ranks_than_samples_leaves_empty_shares() -> None:
    assert [len(share(np.arange(2), rank=rank, ranks=4)) for rank in range(4)] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("rank", "ranks", "micro", "micros"), [(2, 2, 0, 1), (-1, 2, 0, 1), (0, 1, 3, 3), (0, 0, 0, 1)]
)
def test_a_rank_or_micro_batch_out_of_range_is_refused(rank: int, ranks: int, micro: int, micros: int) -> None:
    with pytest.raises(JobError, match="must lie in"):
        share(np.arange(8), rank=rank, ranks=ranks, micro=micro, micros=micros)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 0, 4), "num_samples"),
        ((0, 4, 0), "global_batch"),
        ((-1, 4, 4), "seed"),
        ((0, 4, 4, "drop"), "last_batch"),
    ],
)
def test_an_impossible_order_is_refused_by_name(arguments: tuple, named: str) -> None:
    with pytest.raises(JobError, match=named):
        Order(*arguments)


@pytest.mark.parametrize("counter", [-1, 2.5])
def test_a_counter_that_is_no_position_is_refused(counter: float) -> None:
    with pytest.raises(JobError, match="counter"):
        Order(0, 4, 2).indices(counter)  # type: ignore[arg-type]

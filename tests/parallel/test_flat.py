"""Flat buffers: every element has one place, padding stays zero, shards are even, stretches cover what they should."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.parallel.flat import ALIGN, FlatBuffer, StoredShard

shapes = st.lists(st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple), min_size=1, max_size=8)


def buffer(sizes: list[tuple[int, ...]], options: list[int], *, shards: int = 1, index: int = 0) -> FlatBuffer:
    torch.manual_seed(0)
    entries = [(f"p{n}", nn.Parameter(torch.randn(shape)), options[n]) for n, shape in enumerate(sizes)]
    return FlatBuffer(entries, shards=shards, index=index)


@settings(max_examples=60, deadline=None)
@given(shapes=shapes, data=st.data(), shards=st.integers(1, 9))
def test_every_element_has_one_place_and_shards_are_even(
    shapes: list[tuple[int, ...]], data: st.DataObject, shards: int
) -> None:
    options = data.draw(st.lists(st.integers(0, 2), min_size=len(shapes), max_size=len(shapes)))
    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in shapes]
    built = buffer(shapes, options, shards=shards)
    covered = torch.zeros(built.padded, dtype=torch.int)
    for slot in built.slots:
        covered[slot.start : slot.stop] += 1
        assert slot.start % ALIGN == 0
        assert torch.equal(slot.param.data, values[int(slot.name[1:])])
    assert not built.padded or int(covered.max()) <= 1
    assert int(covered.sum()) == built.numel == sum(v.numel() for v in values)
    assert built.padded % (shards * ALIGN) == 0
    assert float(built.values[covered == 0].abs().sum()) == 0
    parts = [buffer(shapes, options, shards=shards, index=i).shard for i in range(shards)]
    assert [part.start for part in parts] == [i * built.padded // shards for i in range(shards)]
    assert parts[-1].stop == built.padded


@settings(max_examples=60, deadline=None)
@given(shapes=shapes, data=st.data(), shards=st.integers(1, 5))
def test_stretches_of_all_shards_cover_each_parameter_once(
    shapes: list[tuple[int, ...]], data: st.DataObject, shards: int
) -> None:
    options = data.draw(st.lists(st.integers(0, 2), min_size=len(shapes), max_size=len(shapes)))
    apart = frozenset(data.draw(st.sets(st.sampled_from([f"p{n}" for n in range(len(shapes))]))))
    built = buffer(shapes, options, shards=shards)
    covered = torch.zeros(built.padded, dtype=torch.int)
    size = built.padded // shards
    for index in range(shards):
        for start, stop, which in built.runs(index * size, (index + 1) * size, unfused=apart):
            assert index * size <= start < stop <= (index + 1) * size
            covered[start:stop] += 1
            held = [slot for slot in built.slots if max(slot.start, start) < min(slot.stop, stop)]
            assert {slot.options for slot in held} == {which}
            assert len(held) == 1 or not any(slot.name in apart for slot in held)
    assert not built.padded or int(covered.max()) <= 1
    for slot in built.slots:
        assert bool((covered[slot.start : slot.stop] == 1).all())


def test_parameters_are_views_of_the_buffer() -> None:
    built = buffer([(3, 2), (5,)], [0, 1])
    built.values.fill_(2.0)
    assert all(bool((slot.param == 2).all()) for slot in built.slots)
    with torch.no_grad():
        built.slots[1].param.fill_(7.0)
    assert float(built.values[built.slots[1].start]) == 7.0


def test_equal_options_make_one_stretch_and_unequal_ones_several() -> None:
    assert len(buffer([(3,), (4,), (5,)], [0, 0, 0]).runs(0, 48)) == 1
    assert [which for *_, which in buffer([(3,), (4,), (5,)], [1, 0, 1]).runs(0, 48)] == [0, 1]


def test_a_stored_shard_gives_its_memory_back_and_takes_it_again() -> None:
    built = buffer([(100, 10), (7,)], [0, 0], shards=2, index=1)
    before = built.values.clone()
    stored = StoredShard(built)
    assert built.values.untyped_storage().nbytes() == 0
    assert stored.shard.numel() * 2 == built.padded
    assert torch.equal(stored.shard, before[built.shard])
    stored.allocate().copy_(before)
    stored.use()
    assert torch.equal(built.slots[0].param.data, before[: 100 * 10].view(100, 10))


def test_a_parameter_that_is_away_keeps_its_shape_and_poisons_whatever_uses_it() -> None:
    built = buffer([(4, 3)], [0], shards=2)
    StoredShard(built)
    param = built.slots[0].param
    assert param.shape == (4, 3)
    assert param.numel() == 12
    assert bool(torch.isnan(param.square().sum()))
    assert bool(torch.isnan(torch.ones(2, 3) @ param.T).all())

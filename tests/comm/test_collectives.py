"""Every collective against a serial computation, for one to nine ranks; its messages and bytes against the formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm.serial import TYPES, group, numbers, sizes, summed, together, vectors
from shoal.comm.collectives import direct
from shoal.comm.collectives.algorithms import ALL_REDUCE
from shoal.comm.collectives.tree import tree_broadcast, tree_reduce
from shoal.comm.collectives.two_levels import has_two_levels, two_level_all_gather, two_level_reduce_scatter
from shoal.comm.peers import Peers, Steps
from shoal.comm.transfer import OutOfStep
from shoal.comm.vector import OPERATIONS, Vector
from shoal.comm.wire import OnHosts, sent

RANKS = range(1, 10)
SUM = OPERATIONS["sum"]


def reducing(algorithm: str, given: list[torch.Tensor], operation: str = "sum") -> Callable[[Peers], Steps]:
    mine = vectors(given)
    return lambda each: ALL_REDUCE[algorithm].steps(each, mine[each.rank], OPERATIONS[operation])


def counted(peers: list[Peers]) -> tuple[int, int]:
    return sum(each.sent.messages for each in peers), sum(each.sent.bytes for each in peers)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("algorithm", ALL_REDUCE)
def test_all_reduce(algorithm: str, ranks: int) -> None:
    for size in sizes(ranks):
        for dtype in TYPES:
            given = [numbers(rank, size, dtype) for rank in range(ranks)]
            expected = summed(given)
            peers = group(ranks, per_host=3)
            together(peers, "all_reduce", reducing(algorithm, given))
            assert all(torch.equal(result, expected) for result in given)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("algorithm", ALL_REDUCE)
def test_all_ranks_end_with_the_same_bits_in_every_run(algorithm: str, ranks: int) -> None:
    """Of numbers whose sum depends on its order: replicas whose bits differ drift apart."""
    generator = torch.Generator().manual_seed(ranks)
    for size in (1, 37, 1000):
        mine = [torch.randn(size, generator=generator) for _ in range(ranks)]
        runs = []
        for _ in range(2):
            given = [each.clone() for each in mine]
            together(group(ranks, per_host=3), "all_reduce", reducing(algorithm, given))
            assert all(torch.equal(result, given[0]) for result in given)
            runs.append(given[0])
        assert torch.equal(*runs)
        torch.testing.assert_close(runs[0], torch.stack(mine).sum(0))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("per_host", [1, 2, 3, 4, 9])
def test_bytes_and_messages_of_a_hierarchical_all_reduce(ranks: int, per_host: int) -> None:
    """Also on hosts of unequal size, where the last has fewer ranks."""
    for size in sizes(ranks):
        peers = group(ranks, per_host=per_host)
        together(peers, "all_reduce", reducing("hierarchical", [numbers(r, size, torch.float64) for r in range(ranks)]))
        hosts = tuple(map(len, peers[0].hosts))
        formula = sent("all_reduce", payload_bytes=8 * size, ranks=ranks, algorithm=OnHosts("hierarchical", hosts))
        messages, bytes_of_all = counted(peers)
        assert (formula.messages, formula.bytes) == (-(-messages // ranks), bytes_of_all // ranks)
        if len(set(hosts)) == 1:
            # Rings inside and between: each rank sends as many messages as any other.
            assert {each.sent.messages for each in peers} == {formula.messages}
            assert formula.messages == 2 * (hosts[0] - 1) + 2 * (len(hosts) - 1)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("algorithm", [name for name in ALL_REDUCE if not ALL_REDUCE[name].by_hosts])
def test_bytes_and_messages_of_an_all_reduce(algorithm: str, ranks: int) -> None:
    """The sum over ranks, whatever the size: the mean over ranks is the closed formula."""
    steps = ranks.bit_length() - 1
    powers, surplus = 1 << steps, ranks - (1 << steps)
    for size in sizes(ranks):
        n = 8 * size
        total = {
            "ring": (2 * ranks * (ranks - 1), 2 * n * (ranks - 1)),
            "tree": (2 * (ranks - 1), 2 * n * (ranks - 1)),
            "butterfly": (steps * powers + 2 * surplus, n * (steps * powers + 2 * surplus)),
            "rabenseifner": (2 * steps * powers + 2 * surplus, 2 * n * (ranks - 1)),
        }.get(algorithm)
        peers = group(ranks, per_host=2)
        given = [numbers(rank, size, torch.float64) for rank in range(ranks)]
        together(peers, "all_reduce", reducing(algorithm, given))
        messages, bytes_of_all = counted(peers)
        assert total is None or (messages, bytes_of_all) == total
        if ranks > 1:
            formula = sent("all_reduce", payload_bytes=n, ranks=ranks, algorithm=algorithm)
            assert formula.bytes == bytes_of_all // ranks
            assert formula.messages == -(-messages // ranks)


@pytest.mark.parametrize("operation", ["product", "min", "max", "band", "bor", "bxor"])
def test_other_reductions(operation: str) -> None:
    given = [numbers(rank, 50, torch.int64) for rank in range(5)]
    expected = given[0].clone()
    for other in given[1:]:
        OPERATIONS[operation][1](expected, other, out=expected)
    peers = group(5)
    together(peers, "all_reduce", reducing("ring", given, operation))
    assert all(torch.equal(result, expected) for result in given)


@pytest.mark.parametrize("ranks", RANKS)
def test_reduce_scatter(ranks: int) -> None:
    for part in (0, 1, 3, 700):
        for dtype in TYPES:
            given = [numbers(rank, ranks * part, dtype) for rank in range(ranks)]
            kept = [tensor.clone() for tensor in given]
            into = [torch.empty(part, dtype=dtype) for _ in range(ranks)]
            peers = group(ranks)
            together(
                peers,
                "reduce_scatter",
                lambda each, g=given, i=into: direct.direct_reduce_scatter(
                    each, Vector(g[each.rank]).parts(each.size), Vector(i[each.rank]), SUM
                ),
            )
            assert torch.equal(torch.cat(into), summed(kept))
            assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))
            assert counted(peers) == _each_to_each(ranks, into)


@pytest.mark.parametrize("ranks", RANKS)
def test_all_gather(ranks: int) -> None:
    for part in (0, 1, 3, 700):
        given = [numbers(rank, part, torch.float32) for rank in range(ranks)]
        into = [torch.empty(ranks * part) for _ in range(ranks)]
        peers = group(ranks)
        together(
            peers,
            "all_gather",
            lambda each, g=given, i=into: direct.direct_all_gather(
                each, Vector(g[each.rank]), Vector(i[each.rank]).parts(each.size)
            ),
        )
        assert all(torch.equal(result, torch.cat(given)) for result in into)
        assert counted(peers) == _each_to_each(ranks, given)


HOSTS = [(2, 2), (2, 3), (3, 2), (4, 2), (2, 4), (3, 3)]


@pytest.mark.long
@pytest.mark.parametrize(("hosts", "per_host"), HOSTS)
@pytest.mark.parametrize("capacity", [64, 4096])
def test_two_levels_of_reduce_scatter(hosts: int, per_host: int, capacity: int) -> None:
    ranks = hosts * per_host
    for part in (0, 1, 3, 700):
        for dtype in TYPES:
            given = [numbers(rank, ranks * part, dtype) for rank in range(ranks)]
            kept = [tensor.clone() for tensor in given]
            into = [torch.empty(part, dtype=dtype) for _ in range(ranks)]
            peers = group(ranks, per_host=per_host, capacity=capacity)
            between = far_bytes(peers)
            together(
                peers,
                "reduce_scatter",
                lambda each, g=given, i=into: two_level_reduce_scatter(
                    each, Vector(g[each.rank]).parts(each.size), Vector(i[each.rank]), SUM
                ),
            )
            assert torch.equal(torch.cat(into), summed(kept))
            assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))
            assert counted(peers) == _each_to_each(ranks, into)
            assert sum(between) == ranks * (hosts - 1) * into[0].nbytes


@pytest.mark.parametrize(("hosts", "per_host"), HOSTS)
@pytest.mark.parametrize("capacity", [64, 4096])
def test_two_levels_of_all_gather(hosts: int, per_host: int, capacity: int) -> None:
    ranks = hosts * per_host
    for part in (0, 1, 3, 700):
        given = [numbers(rank, part, torch.float32) for rank in range(ranks)]
        into = [torch.empty(ranks * part) for _ in range(ranks)]
        peers = group(ranks, per_host=per_host, capacity=capacity)
        between = far_bytes(peers)
        together(
            peers,
            "all_gather",
            lambda each, g=given, i=into: two_level_all_gather(
                each, Vector(g[each.rank]), Vector(i[each.rank]).parts(each.size)
            ),
        )
        assert all(torch.equal(result, torch.cat(given)) for result in into)
        assert counted(peers) == _each_to_each(ranks, given)
        # Each to each, every rank of a host would send to every rank of the others.
        assert sum(between) == ranks * (hosts - 1) * given[0].nbytes


def far_bytes(peers: list[Peers]) -> list[int]:
    """The bytes of every message between hosts, from now on."""
    found: list[int] = []
    for each in peers:
        host = next(host for host in each.hosts if each.rank in host)

        def send(to: int, data: Vector, plain: Any = each.send, host: Any = host) -> Any:
            if to not in host:
                found.append(data.nbytes)
            return plain(to, data)

        each.send = send  # type: ignore[method-assign]
    return found


def test_two_levels_need_hosts_of_equally_many_ranks() -> None:
    assert has_two_levels([[0, 1], [2, 3]])
    assert not has_two_levels([[0, 1, 2, 3]])
    assert not has_two_levels([[0], [1]])
    assert not has_two_levels([[0, 1], [2]])


def _each_to_each(ranks: int, parts: list[torch.Tensor]) -> tuple[int, int]:
    return ranks * (ranks - 1), (ranks - 1) * sum(part.numel() * part.element_size() for part in parts)


@pytest.mark.parametrize("ranks", RANKS)
def test_all_to_all_of_uneven_parts(ranks: int) -> None:
    counts = [[(3 * a + 5 * b) % 11 for b in range(ranks)] for a in range(ranks)]
    given = [[numbers(a * ranks + b, counts[a][b], torch.int64) for b in range(ranks)] for a in range(ranks)]
    into = [[torch.empty(counts[a][b], dtype=torch.int64) for a in range(ranks)] for b in range(ranks)]
    peers = group(ranks)
    together(
        peers,
        "all_to_all",
        lambda each: direct.direct_all_to_all(each, vectors(given[each.rank]), vectors(into[each.rank])),
    )
    assert all(torch.equal(into[b][a], given[a][b]) for a in range(ranks) for b in range(ranks))
    between = sum(counts[a][b] for a in range(ranks) for b in range(ranks) if a != b)
    assert counted(peers) == (ranks * (ranks - 1), 8 * between)


@pytest.mark.parametrize("ranks", RANKS)
def test_from_and_to_a_root(ranks: int) -> None:
    for root in range(ranks):
        given = [numbers(rank, 300, torch.float64) for rank in range(ranks)]
        expected, first = summed(given), given[root].clone()
        parts = [[torch.empty(300, dtype=torch.float64) for _ in range(ranks)] for _ in range(ranks)]
        together(
            group(ranks),
            "gather",
            lambda each, g=given, p=parts, r=root: direct.gather(each, Vector(g[each.rank]), vectors(p[r]), root=r),
        )
        assert all(torch.equal(a, b) for a, b in zip(parts[root], given, strict=True))
        back = [torch.empty(300, dtype=torch.float64) for _ in range(ranks)]
        together(
            group(ranks),
            "scatter",
            lambda each, b=back, p=parts, r=root: direct.scatter(each, vectors(p[r]), Vector(b[each.rank]), root=r),
        )
        assert all(torch.equal(a, b) for a, b in zip(back, given, strict=True))
        peers = group(ranks)
        together(peers, "broadcast", lambda each, b=back, r=root: tree_broadcast(each, Vector(b[each.rank]), root=r))
        assert all(torch.equal(result, first) for result in back)
        assert counted(peers) == (ranks - 1, (ranks - 1) * 2400)
        peers = group(ranks)
        together(peers, "reduce", lambda each, g=given, r=root: tree_reduce(each, Vector(g[each.rank]), SUM, root=r))
        assert torch.equal(given[root], expected)
        assert counted(peers) == (ranks - 1, (ranks - 1) * 2400)


@pytest.mark.parametrize("ranks", RANKS)
def test_nobody_leaves_a_barrier_before_all_have_entered(ranks: int) -> None:
    peers = group(ranks)
    for each in peers:
        each.begin("barrier")
    nothing = Vector(torch.empty(0))
    waiting = [direct.barrier(each, nothing) for each in peers]
    for _ in range(100):
        assert all(next(steps, None) is not None for steps in waiting[:-1]) or ranks == 1
    together(group(ranks), "barrier", lambda each: direct.barrier(each, nothing))


def test_ranks_that_call_different_collectives_are_told_so() -> None:
    peers = group(2)
    tensors = [torch.zeros(4), torch.zeros(8)]
    peers[0].begin("all_reduce")
    peers[1].begin("all_gather")
    steps = ALL_REDUCE["butterfly"].steps
    first, second = (steps(each, Vector(t), SUM) for each, t in zip(peers, tensors, strict=True))
    next(second)
    with pytest.raises(OutOfStep, match=r"sent 32 bytes of all_gather.*expects 16 bytes of all_reduce"):
        next(first)


@settings(max_examples=150)
@given(data=st.data())
def test_any_all_reduce(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 9))
    size = data.draw(st.integers(0, 3000))
    algorithm = data.draw(st.sampled_from(sorted(ALL_REDUCE)))
    peers = group(ranks, per_host=data.draw(st.integers(1, ranks)), capacity=1 << data.draw(st.integers(5, 12)))
    for _ in range(data.draw(st.integers(1, 3))):  # One after the other over the same links.
        given = [numbers(rank, size, torch.float32) for rank in range(ranks)]
        expected = summed(given)
        together(peers, "all_reduce", reducing(algorithm, given))
        assert all(torch.equal(result, expected) for result in given)


@settings(max_examples=60)
@given(data=st.data())
def test_two_levels_on_ranks_dealt_to_hosts_in_any_order(data: st.DataObject) -> None:
    hosts, per_host = data.draw(st.sampled_from(HOSTS))
    dealt = data.draw(st.permutations(range(hosts * per_host)))
    placed = [dealt[first : first + per_host] for first in range(0, len(dealt), per_host)]
    peers = group(len(dealt), capacity=1 << data.draw(st.integers(5, 12)))
    for each in peers:
        each.hosts = tuple(map(tuple, placed))
    # Parts of different sizes, as a list of tensors may have.
    sizes_of = data.draw(st.lists(st.integers(0, 300), min_size=len(dealt), max_size=len(dealt)))
    given = [[numbers(a * 10 + b, size, torch.int64) for b, size in enumerate(sizes_of)] for a in range(len(dealt))]
    into = [torch.empty(size, dtype=torch.int64) for size in sizes_of]
    whole = [[torch.empty(size, dtype=torch.int64) for size in sizes_of] for _ in dealt]
    together(
        peers,
        "reduce_scatter",
        lambda each: two_level_reduce_scatter(each, vectors(given[each.rank]), Vector(into[each.rank]), SUM),
    )
    together(
        peers,
        "all_gather",
        lambda each: two_level_all_gather(each, Vector(into[each.rank]), vectors(whole[each.rank])),
    )
    expected = [summed([row[part] for row in given]) for part in range(len(dealt))]
    assert all(torch.equal(a, b) for rows in whole for a, b in zip(rows, expected, strict=True))

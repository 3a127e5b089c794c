"""Graphs of gossip: the weights that they make, and how far a message comes."""

from __future__ import annotations

import pytest

from shoal.strategy import parse
from shoal.strategy.graphs import GRAPHS, neighbours, rounds_to_all, sides, targets, two_colours

ROUNDS = range(12)


def weights(graph: str, replicas: int, round: int, *, directed: bool) -> list[list[float]]:
    """What replica i takes of j, where each splits its model equally among itself and those it sends to."""
    sending = targets(graph, replicas, round=round, directed=directed)
    return [[(i == j or i in sending[j]) / (1 + len(sending[j])) for j in range(replicas)] for i in range(replicas)]


def torus_or_any(graph: str, replicas: int) -> bool:
    return graph != "torus" or sides(replicas)[0] > 1


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("replicas", range(2, 10))
def test_weights_of_synchronous_gossip_are_doubly_stochastic(graph: str, replicas: int) -> None:
    if not torus_or_any(graph, replicas):
        pytest.skip("a prime number has no torus")
    for round in ROUNDS:
        matrix = weights(graph, replicas, round, directed=False)
        assert all(sum(row) == pytest.approx(1, abs=1e-15) for row in matrix)
        assert all(sum(column) == pytest.approx(1, abs=1e-15) for column in zip(*matrix, strict=True))
        assert all(entry >= 0 for row in matrix for entry in row)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("replicas", range(2, 10))
def test_push_sum_gives_away_what_it_has_and_the_simulation_has_the_same_matrix(graph: str, replicas: int) -> None:
    if not torus_or_any(graph, replicas):
        pytest.skip("a prime number has no torus")
    for mode in ("sync", "push-sum"):
        term = parse(f'dp({replicas}, sync=gossip("{graph}", "{mode}"))').dp_levels[0].sync
        for round in ROUNDS:
            matrix = weights(graph, replicas, round, directed=mode == "push-sum")
            assert all(sum(column) == pytest.approx(1, abs=1e-15) for column in zip(*matrix, strict=True))
            assert term._matrix(replicas, round) == matrix


def test_random_push_sum_is_not_doubly_stochastic_so_that_its_weights_matter() -> None:
    matrix = weights("random", 5, 0, directed=True)
    assert max(abs(sum(row) - 1) for row in matrix) > 0.1


def test_graphs_are_what_their_names_say() -> None:
    assert targets("ring", 5) == [[1, 4], [0, 2], [1, 3], [2, 4], [0, 3]]
    assert targets("ring", 5, directed=True) == [[1], [2], [3], [4], [0]]
    assert targets("exponential", 8, directed=True)[0] == [1, 2, 4]
    assert [targets("one-peer", 8, round=round)[6] for round in range(4)] == [[7], [0], [2], [7]]
    assert targets("torus", 6)[0] == [1, 2, 3]
    assert targets("complete", 3) == [[1, 2], [0, 2], [0, 1]]
    pairs = targets("random", 6, round=3)
    assert all(pairs[pairs[one][0]] == [one] for one in range(6))
    assert pairs != targets("random", 6, round=4)
    assert pairs != targets("random", 6, round=3, seed=1)
    assert sum(not each for each in targets("random", 7)) == 1


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("replicas", range(2, 10))
def test_two_colours_are_a_colouring_or_there_is_none(graph: str, replicas: int) -> None:
    """Against a search over all colourings."""
    if not torus_or_any(graph, replicas):
        pytest.skip("a prime number has no torus")
    joined = neighbours(graph, replicas)
    colourings = ([(number >> one) & 1 for one in range(replicas)] for number in range(1 << replicas))
    fitting = [
        each for each in colourings if all(each[one] != each[other] for one in range(replicas) for other in joined[one])
    ]
    found = two_colours(graph, replicas)
    assert found in fitting if fitting else found is None


@pytest.mark.parametrize(("graph", "replicas", "rounds"), [("complete", 5, 1), ("one-peer", 8, 4), ("ring", 5, 3)])
def test_a_message_reaches_all_also_where_one_replica_is_silent(graph: str, replicas: int, rounds: int) -> None:
    found = rounds_to_all(graph, replicas, origin=1, round=3) - 3 + 1
    assert found == rounds


def test_a_directed_ring_passes_a_message_all_the_way_round() -> None:
    assert rounds_to_all("ring", 5, origin=1, round=3, directed=True) - 3 + 1 == 4

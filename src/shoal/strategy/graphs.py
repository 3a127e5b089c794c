"""Graphs of gossip: which replicas a replica sends its model to, round by round.

Every replica splits its model equally among itself and those it sends to. In all graphs of synchronous gossip a replica
also receives from as many as it sends to, so the weights of a round are doubly stochastic and keep the mean; push-sum
needs the first half only. All replicas compute the same graph from the round and a seed: nothing is agreed on the wire.
"""

from __future__ import annotations

from random import Random

GRAPHS = ("ring", "torus", "exponential", "one-peer", "complete", "random")


MANY = 32
"""Above as many replicas `rounds_to_all` takes twice the rounds, where it would try each replica as the silent one."""


def targets(graph: str, replicas: int, *, round: int = 0, seed: int = 0, directed: bool = False) -> list[list[int]]:
    """For each replica, the others that it sends to in a round.

    Args:
        graph: "ring", "torus" and "complete" are as their names say; "exponential" joins replicas whose numbers differ
            by 1, 2, 4, ...; "one-peer" goes through these differences, one a round (Ying et al. 2021); in "random" each
            round draws pairs, of an odd number one is left out.
        round: Counted from 0; only the last two depend on it.
        directed: One way only: to the next of a ring, to the right and down on a torus, by positive differences; in
            "random" each draws a replica to send to, so that some receive several models and some none.
    """
    if replicas == 1:
        return [[]]
    if graph == "random":
        return _drawn(replicas, Random(f"{seed} {round}"), directed=directed)
    if graph == "torus":
        return _torus(replicas, directed=directed)
    if graph == "complete":
        return [[other for other in range(replicas) if other != one] for one in range(replicas)]
    powers = [1 << power for power in range((replicas - 1).bit_length())]
    steps = {"ring": [1], "exponential": powers, "one-peer": [powers[round % len(powers)]]}[graph]
    if not directed and graph != "one-peer":
        steps = [*steps, *(-step for step in steps)]
    return [sorted({(one + step) % replicas for step in steps} - {one}) for one in range(replicas)]


def _drawn(replicas: int, random: Random, *, directed: bool) -> list[list[int]]:
    if directed:
        return [[(one + 1 + random.randrange(replicas - 1)) % replicas] for one in range(replicas)]
    order = list(range(replicas))
    random.shuffle(order)
    found: list[list[int]] = [[] for _ in range(replicas)]
    for one, other in zip(order[::2], order[1::2], strict=False):
        found[one], found[other] = [other], [one]
    return found


def _torus(replicas: int, *, directed: bool) -> list[list[int]]:
    rows = sides(replicas)[0]
    columns = replicas // rows
    found = []
    for one in range(replicas):
        row, column = divmod(one, columns)
        down, right = (row + 1) % rows * columns + column, row * columns + (column + 1) % columns
        up, left = (row - 1) % rows * columns + column, row * columns + (column - 1) % columns
        found.append(sorted({down, right, *(() if directed else (up, left))} - {one}))
    return found


def sides(replicas: int) -> tuple[int, int]:
    """The sides of a torus, as equal as the number allows; the first is 1 where it is prime."""
    rows = next(rows for rows in range(int(replicas**0.5), 0, -1) if replicas % rows == 0)
    return rows, replicas // rows


def neighbours(graph: str, replicas: int) -> list[list[int]]:
    """For each replica, those that it exchanges with in some round, in either direction."""
    union = {"one-peer": "exponential", "random": "complete"}.get(graph, graph)
    return targets(union, replicas)


def two_colours(graph: str, replicas: int) -> list[int] | None:
    """0 or 1 for each replica, so that neighbours differ; None where the graph is not bipartite. The first is 1."""
    joined = neighbours(graph, replicas)
    colours: list[int | None] = [None] * replicas
    colours[0], waiting = 1, [0]
    while waiting:
        one = waiting.pop()
        for other in joined[one]:
            mine = colours[one]
            assert mine is not None
            if colours[other] is None:
                colours[other] = 1 - mine
                waiting.append(other)
            elif colours[other] == mine:
                return None
    return [colour or 0 for colour in colours]


def rounds_to_all(graph: str, replicas: int, *, origin: int, round: int, seed: int = 0, directed: bool = False) -> int:
    """The first round after whose exchange all replicas know what one knew before round `round`, if each passes on what
    it knows; also where any one of the others does not."""

    def reached(silent: int | None) -> int:
        known, at = {origin}, round
        while len(known | {silent}) < replicas + (silent is None):
            if at - round > 8 * replicas:
                return round  # A directed ring is cut by a silent replica.
            sending = targets(graph, replicas, round=at, seed=seed, directed=directed)
            known |= {to for one in known - {silent} for to in sending[one]}
            at += 1
        return at - 1

    if not 2 < replicas <= MANY:
        return reached(None) + (reached(None) - round if replicas > MANY else 0)
    return max(reached(silent) for silent in (None, *(other for other in range(replicas) if other != origin)))

"""What goes wrong in a simulated cluster: slow ranks, slow or failing links, and slow-downs at random from a seed.

Ranks that do the same form one class. Undisturbed replicas are one class; each replica with something of its own is
another; under random slow-downs every replica is one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.estimate.simulate.costs import StepCosts


class BadDisturbance(ValueError):
    """Something that cannot go wrong in this cluster, in one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """One rank that computes more slowly. Its stage of its replica keeps its pace."""

    rank: int
    factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """The links of the replica that a rank belongs to have only a part of their bandwidth left.

    Its messages take that much longer, and so does every ring that passes through it: all gradients of its island.
    """

    rank: int
    left: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbance:
    """All that goes wrong."""

    stragglers: tuple[Straggler, ...] = ()
    links: tuple[Links, ...] = ()
    random: tuple[tuple[float, float], ...] = ()
    """(chance, factor): in every step each rank computes so much longer with this chance."""
    noise: float = 0.0
    """Each rank's step takes 1 + noise |z| times as long, z normal, drawn for each step."""
    seed: int = 0

    @property
    def varies(self) -> bool:
        """Whether every step is another."""
        return bool(self.noise or self.random)


CALM = Disturbance()


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """How much longer things take: rows are classes of replicas, columns ranks along the pipeline."""

    compute: NDArray[np.float64]
    message: NDArray[np.float64]
    """For each class."""
    data: NDArray[np.float64]
    """For each island."""
    counts: NDArray[np.int64]
    """Replicas in each class."""
    inside: NDArray[np.bool_]
    """Islands x classes: which classes have replicas in which island."""


def place_of(rank: int, costs: StepCosts) -> tuple[int, int]:
    """(replica, rank along the pipeline) of a rank, numbered stage by stage, replica by replica, member by member."""
    if not 0 <= rank < costs.ranks:
        raise BadDisturbance(f"rank {rank}: the strategy has ranks 0 to {costs.ranks - 1}")
    stage, rest = divmod(rank, costs.replicas * costs.members)
    return rest // costs.members, stage


def factors(costs: StepCosts, disturbance: Disturbance, *, step: int) -> Factors:
    """Of one step."""
    for each in disturbance.stragglers:
        if not 1 <= each.factor < float("inf"):
            raise BadDisturbance(f"a straggler {each.factor:g} times slower; expected a factor of at least 1")
    for link in disturbance.links:
        if not 0 < link.left <= 1:
            raise BadDisturbance(
                f"links with {link.left:g} of their bandwidth; expected a part above 0 and up to 1 (with none left the "
                "run stops: see goodput)"
            )
    marked = [*(each.rank for each in disturbance.stragglers), *(each.rank for each in disturbance.links)]
    special = sorted({place_of(rank, costs)[0] for rank in marked})
    if disturbance.varies:
        special = list(range(costs.replicas))
    rest = costs.replicas - len(special)
    classes = len(special) + (rest > 0)
    compute, message = np.ones((classes, costs.term.n)), np.ones(classes)
    counts = np.array([1] * len(special) + ([rest] if rest else []), dtype=np.int64)
    if disturbance.noise:
        if not 0 <= disturbance.noise < 10:
            raise BadDisturbance(f"noise is {disturbance.noise:g}; expected a part of a step, such as 0.02")
        draw = np.random.default_rng([disturbance.seed, step])
        # Members wait for each other at every layer: the slowest of them counts.
        slowest = np.abs(draw.standard_normal((classes, costs.term.n, costs.members))).max(axis=2)
        compute *= 1 + disturbance.noise * slowest
    draw = np.random.default_rng([disturbance.seed, step, 1])
    for chance, factor in disturbance.random:
        struck = (draw.random((classes, costs.term.n, costs.members)) < chance).any(axis=2)
        compute *= np.where(struck, factor, 1.0)
    number = {replica: place for place, replica in enumerate(special)}
    for straggler in disturbance.stragglers:
        replica, stage = place_of(straggler.rank, costs)
        compute[number[replica], stage] *= straggler.factor
    of_island = costs.replicas // costs.islands
    data = np.ones(costs.islands)
    inside = np.ones((costs.islands, classes), dtype=bool)
    for place, replica in enumerate(special):
        inside[:, place] = np.arange(costs.islands) == replica // of_island
    for link in disturbance.links:
        replica, _ = place_of(link.rank, costs)
        message[number[replica]] = max(message[number[replica]], 1 / link.left)
        data[replica // of_island] = max(data[replica // of_island], 1 / link.left)
    return Factors(compute=compute, message=message, data=data, counts=counts, inside=inside)

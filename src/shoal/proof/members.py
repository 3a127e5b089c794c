"""`verify` of an ensemble: each member is proven against its own plain serial run, and no two members are the same.

A member trains in a world of its own, by what is inside the ensemble and from a seed of its own. So its proof is that
of such a run; what an ensemble adds is which seed a member has, and that members differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

from shoal.strategy import Strategy, contract, ensemble
from shoal.strategy.members import member_seed, member_strategy

if TYPE_CHECKING:
    from shoal.proof.certify import Certificate

SAME_RUN = 1e-9
"""Two members whose losses are nowhere further apart than this, relatively, are one run made twice."""


def verify_members(strategy: Strategy, prove: Callable[[Strategy, int | None], Certificate]) -> Certificate:
    """The certificate of all members. `prove` gives that of one strategy from one seed; None: the job's own."""
    term, inner = strategy.term(ensemble), member_strategy(strategy)
    assert term is not None
    first = prove(inner, None)
    found = [first, *(prove(inner, member_seed(first.seed, member)) for member in range(1, term.n))]
    worst = max(range(term.n), key=lambda member: (found[member].passed is False, found[member].max_rel_diff))
    same = [
        f"members {one} and {other} are the same run: seed {found[one].seed} and seed {found[other].seed}"
        for one, other in combinations(range(term.n), 2)
        if alike(found[one].losses, found[other].losses)
    ]
    seeds = ", ".join(str(each.seed) for each in found)
    notes = [
        f"each of the {term.n} members was compared with its own plain serial run, from the seeds {seeds}; members "
        "send each other nothing",
        f"as one model the ensemble is {contract(strategy)}: {contract(strategy).band}",
        *same,
        *found[worst].notes,
    ]
    if term.distill:
        notes.append("the student was not compared: it learns from what the members have become")
    return replace(
        found[worst],
        strategy=str(strategy),
        world=strategy.world,
        passed=all(each.passed for each in found) and not same,
        worst="; ".join(same) or f"{found[worst].worst}, of member {worst}",
        ledger_matches=all(each.ledger_matches for each in found),
        provable=all(each.provable for each in found),
        notes=notes,
    )


def alike(one: list[float], other: list[float]) -> bool:
    """Whether two runs have the same losses."""
    return all(abs(a - b) <= SAME_RUN * max(abs(a), abs(b)) for a, b in zip(one, other, strict=True))

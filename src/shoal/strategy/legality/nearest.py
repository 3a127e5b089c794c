"""The search for the nearest legal strategies: mend one breach after the other, and keep what ends up legal.

Each rule proposes what would mend its own breach. A proposal may break another rule, whose proposals are
tried next, a few steps deep; so every answer has passed all rules, and none is further away than needed.
Where very much is wrong, a second search follows whatever leaves the fewest breaches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count
from math import log2

from shoal.strategy.expression import Strategy
from shoal.strategy.legality.rule import Breach, Case
from shoal.strategy.legality.worlds import strategies_for_world
from shoal.strategy.terms.term import Term

MOST_ANSWERS = 3
MOST_STEPS = 4
"""Breaches mended one after the other in the search for the nearest."""
WIDTH = 20
"""Proposals followed from each step to the next."""
MOST_CHECKS = 200
"""Strategies checked in each search, so that a refusal comes at once whatever was asked."""

Breaches = Callable[[Case], Iterator[Breach]]


def nearest_legal(case: Case, breach: Breach, breaches: Breaches) -> tuple[Strategy, ...]:
    """Up to three legal strategies near a refused one, found from one of its breaches."""
    seen = {case.strategy}
    frontier = _fresh(breach, seen)
    checks = 0
    for _ in range(MOST_STEPS):
        legal: list[Strategy] = []
        broken: list[Breach] = []
        for candidate in sorted(frontier, key=lambda strategy: distance(case.strategy, strategy)):
            if checks == MOST_CHECKS:
                break
            checks += 1
            left = next(breaches(Case(candidate, case.facts, case.world)), None)
            if left is None:
                legal.append(candidate)
            else:
                broken.append(left)
        if legal:
            return _in_reading_order(legal[:MOST_ANSWERS])
        frontier = [strategy for near in broken[:WIDTH] for strategy in _fresh(near, seen)]
    return ()


def any_legal(case: Case, breaches: Breaches) -> tuple[Strategy, ...]:
    """Up to three legal strategies for a case in which much is wrong, by always mending the least broken."""
    seen = {case.strategy}
    answers: list[Strategy] = []
    ticket = count()  # Decides between equals, so that breaches themselves are never compared.
    heap: list[tuple[int, float, int, list[Breach]]] = [(0, 0.0, next(ticket), list(breaches(case)))]
    while heap and len(seen) <= MOST_CHECKS and not answers:
        for breach in heappop(heap)[3]:
            for candidate in _fresh(breach, seen):
                left = list(breaches(Case(candidate, case.facts, case.world)))
                if left:
                    heappush(heap, (len(left), distance(case.strategy, candidate), next(ticket), left))
                else:
                    answers.append(candidate)
    if not answers:  # Nothing like it is legal; plain data parallelism may be.
        for plain in (Strategy(), *strategies_for_world(Strategy(), case.world or 1)):
            if next(breaches(Case(plain, case.facts, case.world)), None) is None:
                answers.append(plain)
    return _in_reading_order(sorted(answers, key=lambda answer: distance(case.strategy, answer))[:MOST_ANSWERS])


def _fresh(breach: Breach, seen: set[Strategy]) -> list[Strategy]:
    """The proposals for one breach that have not been looked at yet."""
    proposals = []
    for strategy in breach.fixes():
        if strategy is not None and strategy not in seen:
            seen.add(strategy)
            proposals.append(strategy)
    return proposals


def _in_reading_order(answers: list[Strategy]) -> tuple[Strategy, ...]:
    """Answers that differ in sizes only are listed by size; others stay nearest first."""
    if len({tuple(_frame(term) for term in answer.terms) for answer in answers}) == 1:
        answers = sorted(answers, key=lambda answer: [axis.size for axis in answer.axes])
    return tuple(answers)


def _frame(term: Term) -> tuple[object, ...]:
    return (type(term), *(value for name, value in term.values().items() if name != "n"))


def distance(one: Strategy, other: Strategy) -> float:
    """How different two strategies are: doublings of a number (and of the world), plus one for each other
    change.
    """
    named_one, named_other = _named(one), _named(other)
    total = abs(log2(one.world / other.world)) / 2
    for name in named_one.keys() | named_other.keys():
        here, there = named_one.get(name), named_other.get(name)
        if here is None or there is None:
            total += 2.0
            continue
        for argument, value in here.values().items():
            changed = there.values()[argument]
            if value == changed or (argument == "via" and here.values()["sync"] != there.values()["sync"]):
                continue
            numbers = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 and changed > 0
            total += abs(log2(changed / value)) if numbers and argument != "zero" else 1.0
    return total + (list(named_one) != list(named_other))


def _named(strategy: Strategy) -> dict[str, Term]:
    """Terms by a name that distinguishes levels of dp and kinds of offload."""
    named: dict[str, Term] = {}
    for term in strategy.terms:
        name = type(term).__name__
        same = sum(key.split(".")[0] == name for key in named)
        named[f"{name}.{same}"] = term
    return named

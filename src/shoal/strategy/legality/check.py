"""Decides before a process starts whether a strategy can run; and if not, why, and which similar ones can.

Every refusal names the term, the reason with the numbers of this model and machine, and the nearest legal
strategies, each of which has passed the same rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shoal.strategy.expression import Strategy, as_strategy
from shoal.strategy.facts import ModelFacts
from shoal.strategy.legality.nearest import any_legal, nearest_legal
from shoal.strategy.legality.rule import Breach, Case, Rule
from shoal.strategy.legality.rules import RULES
from shoal.strategy.terms import dp
from shoal.strategy.terms.term import Term

UNKNOWN = ModelFacts()


class Refusal(NamedTuple):
    """One reason why a strategy is not legal."""

    term: Term | Strategy
    """The term at fault, or the full strategy where no single term is."""
    rule: str
    """The name of the rule in the table."""
    reason: str
    nearest: tuple[Strategy, ...]
    """Up to three legal strategies that differ least."""

    def __str__(self) -> str:
        near = f"; nearest legal: {', '.join(str(strategy) for strategy in self.nearest)}" if self.nearest else ""
        return f"{self.term}: {self.reason}{near}"


class IllegalStrategy(ValueError):
    """A strategy that cannot be run here; its text lists every refusal."""

    def __init__(self, strategy: Strategy, refusals: tuple[Refusal, ...]) -> None:
        super().__init__(strategy, refusals)
        self.strategy = strategy
        self.refusals = refusals

    def __str__(self) -> str:
        return "\n".join(str(refusal) for refusal in self.refusals)


def check(
    strategy: Strategy | Term, *, world: int | None = None, facts: ModelFacts | None = None
) -> tuple[Refusal, ...]:
    """Every reason to refuse the strategy; none means that it is legal.

    Without `world` and `facts` only the interaction of its terms is judged.
    """
    case = _case(strategy, world, facts)
    refusals: list[Refusal] = []
    far: tuple[Strategy, ...] | None = None
    for rule, breach in list(_named_breaches(case)):
        nearest = nearest_legal(case, breach, _breaches)
        if not nearest:
            far = any_legal(case, _breaches) if far is None else far
        refusals.append(Refusal(breach.term, rule.name, breach.reason, nearest or far or ()))
    return tuple(refusals)


def is_legal(strategy: Strategy | Term, *, world: int | None = None, facts: ModelFacts | None = None) -> bool:
    """Whether the strategy breaks no rule; faster than `check`, as it searches no alternatives."""
    return next(_breaches(_case(strategy, world, facts)), None) is None


def require_legal(strategy: Strategy | Term, *, world: int | None = None, facts: ModelFacts | None = None) -> Strategy:
    """The strategy itself if it is legal, else an IllegalStrategy that says why not."""
    refusals = check(strategy, world=world, facts=facts)
    if refusals:
        raise IllegalStrategy(as_strategy(strategy), refusals)
    return as_strategy(strategy)


def _case(strategy: Strategy | Term, world: int | None, facts: ModelFacts | None) -> Case:
    if world is not None and (isinstance(world, bool) or not isinstance(world, int) or world < 1):
        raise ValueError(f"world is {world!r}; expected the number of ranks, a whole number of at least 1")
    return Case(as_strategy(strategy), facts or UNKNOWN, world)


def _named_breaches(case: Case) -> Iterator[tuple[Rule, Breach]]:
    present = _classes(case.strategy)
    for rule in RULES:
        if present.issuperset(rule.terms):
            for breach in rule.breaches(case):
                yield rule, breach


def _breaches(case: Case) -> Iterator[Breach]:
    return (breach for _, breach in _named_breaches(case))


def _classes(strategy: Strategy) -> set[type[Term]]:
    """Every class of term in a strategy, arguments of dp and families included."""
    found: set[type[Term]] = set()
    for term in strategy.terms:
        found.update(type(term).__mro__)
        if isinstance(term, dp):
            for part in (term.sync, term.via, term.compress):
                found.update(type(part).__mro__)
    return found

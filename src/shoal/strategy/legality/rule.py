"""What a rule of legality is: the terms it concerns, the reason for it, where a strategy breaks it, and what
to try instead.

A rule is a function that looks at one term in its strategy and answers with a Breach or None; the decorator
of its table adds name and reason. Fixes are only proposals: the search for the nearest legal strategies
checks each of them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from shoal.common.numbers import divisors
from shoal.strategy.expression import Strategy
from shoal.strategy.facts import ModelFacts
from shoal.strategy.terms import dp
from shoal.strategy.terms.arguments import TermError
from shoal.strategy.terms.term import Term


class Case(NamedTuple):
    """A strategy with what is known about where and what it is to train."""

    strategy: Strategy
    facts: ModelFacts
    world: int | None = None

    def places(self, cls: type[Any]) -> Iterator[tuple[int, Any]]:
        """Every term of a class, with its index."""
        return ((index, term) for index, term in enumerate(self.strategy.terms) if isinstance(term, cls))

    def levels(self) -> list[tuple[int, dp]]:
        """The levels of dp, outer to inner, with their indices."""
        return list(self.places(dp))

    # What follows proposes changed strategies. A change that cannot be built (a second tp, too large a
    # number) is no proposal: None.

    def put(self, index: int, *terms: Term) -> Strategy | None:
        """The strategy with the term at an index exchanged for others, or left out."""
        return self.built(*self.strategy.terms[:index], *terms, *self.strategy.terms[index + 1 :])

    def changed(self, index: int, **changes: Any) -> Strategy | None:
        """The strategy with some arguments of one term changed."""
        with suppress(TermError):
            return self.put(index, self.strategy.terms[index].replace(**changes))
        return None

    def resized(self, index: int, sizes: Iterable[int], argument: str = "n") -> Iterator[Strategy | None]:
        """The strategy with one number of one term set to each of the values given."""
        return (self.changed(index, **{argument: size}) for size in sizes)

    def moved(self, index: int, to: int) -> Strategy | None:
        """The strategy with one axis at another place."""
        terms = list(self.strategy.terms)
        terms.insert(to, terms.pop(index))
        return self.built(*terms)

    def built(self, *terms: Term) -> Strategy | None:
        """The strategy of some terms, if they make one."""
        with suppress(TermError):
            return Strategy(*terms)
        return None


class Breach(NamedTuple):
    """One place where a strategy breaks a rule."""

    term: Term | Strategy
    reason: str
    """Why, with the numbers of this case: the words after "tp(3): "."""
    fixes: Callable[[], Iterable[Strategy | None]] = tuple
    """Strategies that would not break the rule here; computed on demand."""


Finder = Callable[[Case, int, Any], Breach | None]
"""Looks at one term, given by its index and itself; returns how it breaks the rule, if it does."""


class Rule(NamedTuple):
    """One row of the table."""

    name: str
    at: type[Term] | None
    """The kind of term that the rule looks at, one after the other; None for a rule about the strategy as a
    whole.
    """
    terms: tuple[type[Term], ...]
    """The terms concerned: a strategy without one of them cannot break the rule."""
    why: str
    """The reason in general, one sentence."""
    find: Finder

    def breaches(self, case: Case) -> Iterator[Breach]:
        """Every place where the case breaks the rule."""
        if self.at is None:
            places: Iterable[tuple[int, Any]] = [(0, case.strategy)]
        else:
            places = case.places(self.at)
        for index, term in places:
            breach = self.find(case, index, term)
            if breach is not None:
                yield breach


class RuleTable:
    """Rows of rules, filled by decorating their functions; the function's name is the rule's."""

    def __init__(self) -> None:
        self.rows: list[Rule] = []

    def __call__(self, at: type[Term] | None, *others: type[Term], why: str) -> Callable[[Finder], Finder]:
        def enter(find: Finder) -> Finder:
            terms = others if at is None else (at, *others)
            self.rows.append(Rule(find.__name__.replace("_", "-"), at, terms, why, find))
            return find

        return enter


def around(total: int, number: int) -> list[int]:
    """The divisors of a total next below and next above a number."""
    all_of_them = divisors(total)
    below = [divisor for divisor in all_of_them if divisor < number][-1:]
    return below + [divisor for divisor in all_of_them if divisor > number][:1]

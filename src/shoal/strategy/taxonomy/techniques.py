"""The table of techniques: every term with its family, its contract and where it runs well. Generated from
the terms themselves.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.strategy.contract import contract
from shoal.strategy.expression import Strategy
from shoal.strategy.terms import REGISTRY, AxisTerm, CompressTerm, ModifierTerm, pp
from shoal.strategy.terms.term import Term
from shoal.strategy.text import parse


class Technique(NamedTuple):
    """One row of the table."""

    name: str
    family: str
    title: str
    example: str
    """A strategy that uses it."""
    contract: str
    where: str


def techniques() -> tuple[Technique, ...]:
    """Every term, and every schedule of a pipeline, as they stand in the closed list."""
    rows = []
    for name, cls in REGISTRY.items():
        strategy = _example(cls)
        rows.append(Technique(name, cls.family, cls.title, str(strategy), _contract(strategy), cls.where))
        if cls is pp:
            unflushed = Strategy(pp(2, "pipedream"))
            rows.append(
                Technique(
                    'pp "pipedream"',
                    "axis",
                    "pipeline without flush, stashed weights",
                    str(unflushed),
                    _contract(unflushed),
                    cls.where,
                )
            )
    return tuple(rows)


def _example(cls: type[Term]) -> Strategy:
    """The term in the smallest strategy it can stand in."""
    text = cls.example()
    if issubclass(cls, (AxisTerm, ModifierTerm)):
        return parse(text)
    if issubclass(cls, CompressTerm) and cls.between_groups:
        return parse(f"dp(2, compress={text}) * dp(2)")
    return parse(f"dp(2, {cls.family}={text})")


def _contract(strategy: Strategy) -> str:
    """The kind of contract; how late a bounded one may be depends on the arguments."""
    return contract(strategy).kind

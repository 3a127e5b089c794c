"""The table of techniques: every term with its family, its contract and where it runs well. Generated from
the terms themselves.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.strategy.contract import contract
from shoal.strategy.expression import Strategy
from shoal.strategy.terms import REGISTRY, AxisTerm, CompressTerm, ModifierTerm, allreduce, dp, pp
from shoal.strategy.terms.term import Term
from shoal.strategy.terms.via import ALL_REDUCE
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
    detail: str = ""
    """Of a compression: the bytes it makes of n elements of s bytes, and what becomes of its error."""


def techniques(family: str | None = None) -> tuple[Technique, ...]:
    """Every term, the pipeline without flush, and every all-reduce algorithm; of all families or of one."""
    rows = []
    for name in REGISTRY if family is None else REGISTRY.of(family):
        cls = REGISTRY[name]
        rows.append(_row(name, cls.title, _example(cls), cls))
        if cls is pp:
            unflushed = Strategy(pp(2, "pipedream"))
            rows.append(_row('pp "pipedream"', "pipeline without flush, stashed weights", unflushed, cls))
        if cls is allreduce:
            for algorithm, found in ALL_REDUCE.items():
                strategy = Strategy(dp(4, via=allreduce(algorithm)))
                rows.append(_row(f'allreduce "{algorithm}"', f"all-reduce {found.words}", strategy, cls))
    return tuple(rows)


def _row(name: str, title: str, strategy: Strategy, cls: type[Term]) -> Technique:
    detail = ""
    if issubclass(cls, CompressTerm) and cls.sends:
        error = {"feedback": "residual"}.get(cls.loss, cls.loss)
        detail = f"{cls.sends}; error: {error}"
    return Technique(name, cls.family, title, str(strategy), _contract(strategy), cls.where, detail)


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

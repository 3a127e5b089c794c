"""A strategy: a product of terms. The order of its axes is placement, slowest links first; the order of its
modifiers is nothing.

It is a value: frozen, hashable, equal to any other strategy that says the same, and its text reads back to
it.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple, TypeVar

from shoal.strategy.terms import (
    REGISTRY,
    AxisTerm,
    ModifierTerm,
    Term,
    accumulate,
    cp,
    dp,
    ensemble,
    ep,
    pp,
    ps,
    spatial,
    tp,
)
from shoal.strategy.terms.arguments import TermError

MOST_LEVELS = 8
"""Levels of dp in one strategy. A network has three or four kinds of link; more levels than this is a slip.
"""

SERIAL = "serial"
"""The text of the strategy without terms: one process, nothing cut."""

AnyTerm = TypeVar("AnyTerm", bound=Term)

CUTS = (pp, tp, cp, ep, spatial)


class Axis(NamedTuple):
    """One axis of the mesh of ranks."""

    name: str
    """The term's name; levels of dp are numbered dp0, dp1, ... from the outermost when there are several."""
    size: int
    term: AxisTerm


def _regions(term: AxisTerm) -> tuple[AxisTerm, ...]:
    """A level with servers in two levels, written out: its regions, and the replicas of each. One that cannot be split
    so stays, for legality to refuse."""
    if not isinstance(term, dp) or not isinstance(term.via, ps) or term.via.levels == 1 or term.n % term.via.levels:
        return (term,)
    regions = term.via.levels
    outer = term.replace(n=regions, via=term.via.replace(levels=1))
    return (outer, dp(term.n // regions)) if term.n > regions else (outer,)


class Strategy:
    """How to train: axes in the order given, then modifiers in the order of their names' declaration."""

    __slots__ = ("__weakref__", "_hash", "terms")

    terms: tuple[Term, ...]

    def __init__(self, *terms: Term) -> None:
        axes: list[Term] = []
        modifiers: list[Term] = []
        for index, term in enumerate(terms):
            _refuse_misplaced(term, index)
            _refuse_repeated(term, index, terms[:index])
            if isinstance(term, AxisTerm):
                axes += _regions(term)
            else:
                modifiers.append(term)
        order = list(REGISTRY)
        modifiers.sort(key=lambda term: (order.index(type(term).__name__), str(term)))
        object.__setattr__(self, "terms", (*axes, *modifiers))
        object.__setattr__(self, "_hash", hash(self.terms))

    def __mul__(self, other: Term | Strategy) -> Strategy:
        if isinstance(other, Strategy):
            return Strategy(*self.terms, *other.terms)
        if isinstance(other, Term) or (isinstance(other, type) and issubclass(other, Term)):
            return Strategy(*self.terms, other)
        return NotImplemented

    def __str__(self) -> str:
        return " * ".join(str(term) for term in self.terms) or SERIAL

    def __repr__(self) -> str:
        return f"Strategy({', '.join(str(term) for term in self.terms)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strategy) and self.terms == other.terms

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("strategies are frozen; build a changed one from .terms")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("strategies are frozen")

    def __reduce__(self) -> tuple[Any, ...]:
        return Strategy, self.terms

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of the mesh, slowest links first; the last one varies fastest from rank to rank."""
        several = len(self.dp_levels) > 1
        found: list[Axis] = []
        level = 0
        for term in self.terms:
            if isinstance(term, AxisTerm):
                name = type(term).__name__
                if several and isinstance(term, dp):
                    name, level = f"dp{level}", level + 1
                found.append(Axis(name, term.n, term))
        return tuple(found)

    @property
    def dp_levels(self) -> tuple[dp, ...]:
        """The levels of data parallelism, outer to inner."""
        return tuple(term for term in self.terms if isinstance(term, dp))

    @property
    def cutting_axes(self) -> tuple[str, ...]:
        """The names of the axes by which the model is cut: pp, tp, cp, ep and spatial of more than one rank."""
        return tuple(axis.name for axis in self.axes if isinstance(axis.term, CUTS) and axis.size > 1)

    @property
    def modifiers(self) -> tuple[ModifierTerm, ...]:
        return tuple(term for term in self.terms if isinstance(term, ModifierTerm))

    @property
    def workers(self) -> int:
        """The ranks of the mesh: the product of the sizes of all axes."""
        return prod(term.n for term in self.terms if isinstance(term, AxisTerm))

    @property
    def servers(self) -> int:
        """Ranks that only serve parameters: for each level with servers of its own, per stage and per group
        outside the level.
        """
        total, outside = 0, 1
        pipeline = self.term(pp)
        for term in self.terms:
            if isinstance(term, dp) and isinstance(term.via, ps) and not term.via.colocated:
                total += term.via.shards * outside * (pipeline.n if pipeline else 1)
            if isinstance(term, (dp, ensemble)):
                outside *= term.n
        return total

    @property
    def world(self) -> int:
        """All ranks that the strategy needs: workers and dedicated servers."""
        return self.workers + self.servers

    @property
    def data_parallel(self) -> int:
        """The product of the sizes of all levels of dp."""
        return prod(level.n for level in self.dp_levels)

    @property
    def replicas(self) -> int:
        """The number of parts into which a global batch is split: dp, and ep and tp(batch=True), whose ranks take
        different samples too.
        """
        experts, tensor = self.term(ep), self.term(tp)
        return self.data_parallel * (experts.n if experts else 1) * (tensor.n if tensor and tensor.batch else 1)

    @property
    def micro_batches(self) -> int:
        """The micro-batches that one replica computes in a step."""
        pipeline, accumulation = self.term(pp), self.term(accumulate)
        if accumulation is not None:
            return accumulation.k
        return pipeline.micro if pipeline is not None else 1

    def term(self, cls: type[AnyTerm]) -> AnyTerm | None:
        """The first term of a class (the outermost level, for dp), or None."""
        return next((term for term in self.terms if isinstance(term, cls)), None)

    def all_of(self, cls: type[AnyTerm]) -> tuple[AnyTerm, ...]:
        """Every term of a class, in order: levels of dp, kinds of offload."""
        return tuple(term for term in self.terms if isinstance(term, cls))

    def replace(self, old: Term, new: Term | None) -> Strategy:
        """The strategy with one term exchanged for another, or left out."""
        at = next(index for index, term in enumerate(self.terms) if term is old)
        return Strategy(*self.terms[:at], *(() if new is None else (new,)), *self.terms[at + 1 :])


def as_strategy(value: Strategy | Term) -> Strategy:
    """A single term is a strategy of one factor."""
    if isinstance(value, Strategy):
        return value
    if isinstance(value, Term):
        return Strategy(value)
    raise TypeError(f"expected a Strategy or a term, not {type(value).__name__}; read text with parse(text)")


def _refuse_misplaced(term: object, index: int) -> None:
    """Only axes and modifiers multiply."""
    if isinstance(term, type) and issubclass(term, Term):
        name, example = term.__name__, term.example()
        raise TermError(f"{name} stands without its arguments", index=index, suggestion=example)
    if not isinstance(term, Term):
        raise TermError(f"{term!r:.60} is not a term; expected one such as dp(2)", index=index)
    if not isinstance(term, (AxisTerm, ModifierTerm)):
        name = type(term).__name__
        raise TermError(
            f"{name} does not multiply: it is an argument of dp",
            index=index,
            suggestion=f"dp(2, {term.family}={term})",
        )


def _refuse_repeated(term: Term, index: int, before: tuple[Term, ...]) -> None:
    """Only dp repeats, and a modifier that says something different each time."""
    name = type(term).__name__
    same = [other for other in before if type(other) is type(term)]
    if isinstance(term, dp):
        if len(same) == MOST_LEVELS:
            raise TermError(f"more than {MOST_LEVELS} levels of dp", index=index)
    elif isinstance(term, ModifierTerm) and term.repeats:
        if any(_first(term) == _first(other) for other in same):
            raise TermError(f"{name}({_first(term)!r}) stands twice; once is enough".replace("'", '"'), index=index)
    elif same:
        raise TermError(
            f"{name} stands twice; of all axes only dp may repeat"
            if isinstance(term, AxisTerm)
            else f"{name} stands twice; a modifier stands once",
            index=index,
        )


def _first(term: Term) -> object:
    """The first argument of a modifier that repeats: what it says something about."""
    return next(iter(term.values().values()))

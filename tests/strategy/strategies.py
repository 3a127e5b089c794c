"""Hypothesis generators for terms and strategies, driven by the registry: a new term needs no change here."""

from __future__ import annotations

from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from shoal.strategy import REGISTRY, Strategy, Term, check, dp, offload
from shoal.strategy.terms.arguments import Argument, Choice, Flag, Integer, Nested, Real


def argument_values(argument: Argument) -> st.SearchStrategy[Any]:
    """Any value that an argument accepts, small ones more often than large ones."""
    if isinstance(argument, Integer):
        small = st.integers(argument.low, min(argument.high, argument.low + 12))
        return small | st.sampled_from([argument.low, argument.high]) | st.integers(argument.low, argument.high)
    if isinstance(argument, Real):
        return st.floats(argument.above, argument.high, exclude_min=True, allow_nan=False, allow_infinity=False)
    if isinstance(argument, Choice):
        return st.sampled_from(argument.choices)
    if isinstance(argument, Flag):
        return st.booleans()
    if isinstance(argument, Nested):
        return terms(argument.family)
    raise TypeError(f"no generator for {type(argument).__name__}")


@st.composite
def terms_of(draw: st.DrawFn, cls: type[Term]) -> Term:
    """Any term of a class, with each optional argument given or left out."""
    given = {
        name: draw(argument_values(argument))
        for name, argument in cls.arguments.items()
        if argument.required or draw(st.booleans())
    }
    return cls(**given)


def terms(family: str) -> st.SearchStrategy[Term]:
    """Any term of a family."""
    classes = [cls for cls in REGISTRY.values() if cls.family == family]
    return st.sampled_from(classes).flatmap(terms_of)


@st.composite
def strategies(draw: st.DrawFn, max_levels: int = 3) -> Strategy:
    """Any strategy that can be written, legal or not, over all terms and arguments."""
    others = [cls for cls in REGISTRY.values() if cls.family == "axis" and cls is not dp]
    axes = draw(st.lists(st.sampled_from(others), unique=True, max_size=4))
    classes = draw(st.permutations([*axes, *[dp] * draw(st.integers(0, max_levels))]))
    modifiers = [cls for cls in REGISTRY.values() if cls.family == "modifier" and cls is not offload]
    classes += draw(st.lists(st.sampled_from(modifiers), unique=True))
    product = [draw(terms_of(cls)) for cls in classes]
    product += draw(st.lists(terms_of(offload), unique_by=lambda term: term.what, max_size=3))
    return Strategy(*product)


@st.composite
def small_strategies(draw: st.DrawFn, max_size: int = 8) -> Strategy:
    """Strategies whose axes are small, as one would run them."""
    strategy = draw(strategies())
    small = [
        term.replace(n=draw(st.integers(1, max_size))) if term.family == "axis" else term for term in strategy.terms
    ]
    return Strategy(*small)


@st.composite
def legal_strategies(draw: st.DrawFn, max_size: int = 8) -> Strategy:
    """Strategies whose terms go together; illegal ones are exchanged for the nearest legal one."""
    strategy = draw(small_strategies(max_size))
    refusals = check(strategy)
    if not refusals:
        return strategy
    assume(refusals[0].nearest)
    return refusals[0].nearest[0]

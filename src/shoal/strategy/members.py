"""Members of an ensemble: what each of them trains by, and with which seed."""

from __future__ import annotations

from shoal.strategy.expression import Strategy
from shoal.strategy.terms.axes import ensemble


def member_strategy(strategy: Strategy) -> Strategy:
    """What one member trains by: the terms inside the ensemble."""
    return Strategy(*(term for term in strategy.terms if not isinstance(term, ensemble)))


def member_seed(seed: int, member: int) -> int:
    """The seed of a member's start, order of data and dropout; the first has the job's. A student follows the last."""
    return seed + member

"""The algebra of training strategies: terms, their product, its text, its legality, its contract and its place in the field.

Pure Python. It imports nothing else of Shoal and no framework, so that questions about a strategy are answered at once.
"""

from __future__ import annotations

from shoal.strategy.arguments import TermError
from shoal.strategy.expression import Axis, Strategy, as_strategy
from shoal.strategy.facts import ModelFacts
from shoal.strategy.terms import *  # noqa: F403
from shoal.strategy.terms import __all__ as _terms
from shoal.strategy.text import StrategyError, parse

serial = Strategy()
"""The strategy without terms: one process, nothing cut."""

__all__ = ["Axis", "ModelFacts", "Strategy", "StrategyError", "TermError", "as_strategy", "parse", "serial", *_terms]

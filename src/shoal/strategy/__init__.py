"""The algebra of training strategies: terms, their product, its text, its legality, its contract and its
place in the field.

Pure Python. It imports nothing else of Shoal and no framework, so that questions about a strategy are
answered at once.
"""

from __future__ import annotations

from typing import Any

from shoal.strategy.contract import Contract, contract
from shoal.strategy.explanation import explanation, in_words
from shoal.strategy.expression import Axis, Strategy, as_strategy
from shoal.strategy.facts import ModelFacts
from shoal.strategy.legality.check import IllegalStrategy, Refusal, check, is_legal, require_legal
from shoal.strategy.legality.rules import RULES
from shoal.strategy.place_in_text import StrategyError
from shoal.strategy.taxonomy.place import SPECTRUM, TaxonomyPlace, place
from shoal.strategy.taxonomy.systems import SYSTEMS, Likeness, System, systems_like
from shoal.strategy.taxonomy.techniques import Technique, techniques
from shoal.strategy.terms import *  # noqa: F403
from shoal.strategy.terms import REGISTRY
from shoal.strategy.terms import __all__ as _terms
from shoal.strategy.terms.arguments import TermError
from shoal.strategy.text import parse

serial = Strategy()
"""The strategy without terms: one process, nothing cut."""

__all__ = [
    "RULES",
    "SPECTRUM",
    "SYSTEMS",
    "Axis",
    "Contract",
    "IllegalStrategy",
    "Likeness",
    "ModelFacts",
    "Refusal",
    "Strategy",
    "StrategyError",
    "System",
    "TaxonomyPlace",
    "Technique",
    "TermError",
    "as_strategy",
    "check",
    "contract",
    "explanation",
    "in_words",
    "is_legal",
    "parse",
    "place",
    "require_legal",
    "serial",
    "systems_like",
    "techniques",
    *_terms,
]


def __getattr__(name: str) -> Any:
    """A term that is a file of its own (`shoal/technique`)."""
    if name in REGISTRY:
        return REGISTRY[name]
    raise AttributeError(f"module 'shoal.strategy' has no attribute {name!r}")

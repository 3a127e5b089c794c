"""A strategy in plain words: one sentence or two for each term, in the order in which they are written."""

from __future__ import annotations

from shoal.strategy.expression import Strategy, as_strategy
from shoal.strategy.terms import dp
from shoal.strategy.terms.numerals import capital
from shoal.strategy.terms.term import Term


def in_words(strategy: Strategy | Term) -> tuple[tuple[str, str], ...]:
    """Each term as text, and what it does."""
    lines = []
    inside = False
    for term in as_strategy(strategy).terms:
        words = capital(term.words())
        if isinstance(term, dp):
            # An inner level splits what one replica of the outer level has received.
            words = f"Inside each replica: {words[:1].lower()}{words[1:]}" if inside else words
            inside = True
        lines.append((str(term), words if words.endswith(".") else words + "."))
    return tuple(lines) or (("serial", "One process trains alone; nothing is cut, and nothing is sent."),)

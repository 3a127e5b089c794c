"""All that is known of a strategy without a model or a machine, as one plain dictionary: what `explain`
prints.
"""

from __future__ import annotations

from typing import Any

from shoal.strategy.contract import contract
from shoal.strategy.expression import Strategy, as_strategy
from shoal.strategy.facts import ModelFacts
from shoal.strategy.legality.check import check
from shoal.strategy.mesh_picture import mesh_picture
from shoal.strategy.taxonomy.place import SPECTRUM, place, spectrum_position
from shoal.strategy.taxonomy.systems import systems_like
from shoal.strategy.terms import dp
from shoal.strategy.terms.numerals import capital
from shoal.strategy.terms.term import Term


def explanation(
    strategy: Strategy | Term, *, world: int | None = None, facts: ModelFacts | None = None
) -> dict[str, Any]:
    """Terms in words, mesh, contract, taxonomy, legality and known systems; nothing in it but plain JSON
    values.
    """
    strategy = as_strategy(strategy)
    promise = contract(strategy, facts)
    placement = place(strategy)
    refusals = check(strategy, world=world, facts=facts)
    return {
        "strategy": str(strategy),
        "terms": [{"term": term, "words": words} for term, words in in_words(strategy)],
        "mesh": {
            "axes": [{"name": axis.name, "size": axis.size} for axis in strategy.axes],
            "order": "slowest links first; the last axis varies fastest from rank to rank",
            "workers": strategy.workers,
            "servers": strategy.servers,
            "world": strategy.world,
            "picture": list(mesh_picture(strategy)),
        },
        "contract": {
            "name": str(promise),
            "kind": promise.kind,
            "staleness": promise.staleness,
            "band": promise.band,
            "reasons": list(promise.reasons),
        },
        "taxonomy": {
            "parallelism": placement.parallelism,
            "optimisation": placement.optimisation,
            "scheduling": placement.scheduling,
            "communication": placement.communication,
        },
        "spectrum": {
            "position": placement.spectrum,
            "index": spectrum_position(strategy),
            "of": list(SPECTRUM),
        },
        "comparison": placement.comparison,
        "legal": not refusals,
        "refusals": [
            {
                "term": str(refusal.term),
                "rule": refusal.rule,
                "reason": refusal.reason,
                "nearest": [str(near) for near in refusal.nearest],
            }
            for refusal in refusals
        ],
        "systems": [
            {
                "name": like.system.name,
                "year": like.system.year,
                "source": like.system.source,
                "strategy": like.system.text,
                "same": like.same,
                "note": like.system.note,
            }
            for like in systems_like(strategy)
        ],
    }


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

"""The table of rules: every reason for which a strategy is refused, in one place.

Rows come from seven files by subject. Each has a name, the terms it concerns, the reason, and knows where a
strategy breaks it and what to try instead.
"""

from __future__ import annotations

from shoal.strategy.legality import batch, graphs, levels, loss, model, paths, pipeline, rounds
from shoal.strategy.legality.rule import Rule

RULES: tuple[Rule, ...] = (
    *levels.rule.rows,
    *graphs.rule.rows,
    *rounds.rule.rows,
    *paths.rule.rows,
    *pipeline.rule.rows,
    *model.rule.rows,
    *batch.rule.rows,
    *loss.rule.rows,
)

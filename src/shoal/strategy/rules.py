"""The table of rules: every reason for which a strategy is refused, in one place.

Rows come from five files by subject. Each has a name, the terms it concerns, the reason, and knows where a
strategy breaks it and what to try instead.
"""

from __future__ import annotations

from shoal.strategy import rules_levels, rules_loss, rules_model, rules_paths, rules_pipeline
from shoal.strategy.rule import Rule

RULES: tuple[Rule, ...] = (
    *rules_levels.rule.rows,
    *rules_paths.rule.rows,
    *rules_pipeline.rule.rows,
    *rules_model.rule.rows,
    *rules_loss.rule.rows,
)

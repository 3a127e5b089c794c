"""Choosing a strategy: enumerate all that are legal, estimate them in one pass, rank them, report what changes do.

plan = make_plan(question_for(preset("gpt:13b"), cluster("dgx-a100", devices=64), global_batch=512))
plan.strategy(plan.best), plan.estimate(plan.best), changes(plan)
"""

from shoal.planning.counterfactual import Change, changes, what_would_fit
from shoal.planning.rank import Plan, Question, families, make_plan, pareto, question_for

__all__ = ["Change", "Plan", "Question", "changes", "families", "make_plan", "pareto", "question_for", "what_would_fit"]

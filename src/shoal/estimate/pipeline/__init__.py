"""Pipeline schedules: what each rank does in which order, how long that takes."""

from shoal.estimate.pipeline.play import (
    Box,
    Played,
    ScheduleDeadlock,
    bubble_formula,
    bubble_formula_text,
    play,
    play_term,
)
from shoal.strategy.schedule import Action, actions, last_backward, rank_stages, stage_rank, steady

__all__ = [
    "Action", "Box", "Played", "ScheduleDeadlock", "actions", "bubble_formula", "bubble_formula_text", "last_backward",
    "play", "play_term", "rank_stages", "stage_rank", "steady",
]  # fmt: skip

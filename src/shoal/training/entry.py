"""What ranks are started with. The process that starts them names these functions without loading torch."""

from __future__ import annotations

from typing import Any

from shoal.training.options import TrainOptions

MODULES = ("shoal.training.check", "shoal.training.loop")
"""What they import, for `warm_up`."""


def check_run(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """In one process, before ranks start: refuses what cannot be trained, and reports what will be."""
    from shoal.training.check import check

    return check(TrainOptions.from_json(arguments), channel)


def train_run(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """On every rank: a job under a strategy, from its start or from a checkpoint, to its end."""
    from shoal.training.loop import train

    return train(TrainOptions.from_json(arguments), channel)


def judge_members(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """In one process, after the members of an ensemble are trained: what they reach alone and together."""
    from shoal.launch.join import join, leave
    from shoal.runtime.options import JobOptions
    from shoal.training.together import judge

    join()
    found = judge(JobOptions.from_json(arguments["job"]), arguments["members"], arguments["student"])
    leave()
    return found

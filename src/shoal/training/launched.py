"""Training in a process that someone else has started as a rank: a worker of Ray, or of any other program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from shoal.common.log import log_message
from shoal.launch.channel import standalone_channel
from shoal.launch.join import join
from shoal.strategy import parse, require_legal
from shoal.training.check import check
from shoal.training.local import checkpoints_every
from shoal.training.loop import train
from shoal.training.options import TrainOptions
from shoal.training.resumed import CannotTrain, require_go_on


def train_as_rank(*, hang_after_s: float = 300.0, **options: Any) -> dict[str, Any]:
    """Trains as one rank; all ranks call it alike.

    Args:
        hang_after_s: Seconds without any progress after which the process ends.
        options: The fields of `TrainOptions`: `job`, `strategy`, `folder`, `go_on=True`, `steps`, ...

    Returns:
        What `shoal train --json` prints, on every rank.

    Raises:
        CannotTrain: The ranks that were started are not those of the strategy.
    """
    given = TrainOptions.from_json(options)
    strategy = parse("serial" if given.strategy is None else given.strategy)
    require_legal(strategy)
    if given.go_on:
        require_go_on(given)
    me = join(backend=given.backend)
    if me.world != strategy.world:
        raise CannotTrain(f"{me.world} ranks were started, and {strategy} needs {strategy.world}")
    torch.set_num_threads(1)
    checked = check(replace(given, resume=None, gate=False), None)
    channel = standalone_channel(on_message=log_message, hang_after_s=hang_after_s)
    channel.rank, channel.world = me.rank, me.world
    return train(replace(given, checkpoint_every=checkpoints_every(given, checked["steps"])), channel)

"""What the tests of rounds with a quorum run on real ranks: faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from distributed.gossip_targets import prove_async
from shoal.parallel.sync.quorum import Merging
from shoal.runtime.step import StepRunner


def one_version_behind(arguments: dict[str, Any], channel: Any) -> Any:
    """Islands are given the anchor before the present one."""
    right, before = Merging.pull, dict[int, tuple[int, list[torch.Tensor]]]()

    def pull(self: Merging, fragment: int, version: int) -> Any:
        message = right(self, fragment, version)
        if message is not None:
            number, anchor = before.get(fragment, (0, message.tensors))
            if number != int(message.numbers[0]):
                before[fragment] = int(message.numbers[0]), [tensor.clone() for tensor in message.tensors]
            for tensor, old in zip(message.tensors, anchor, strict=True):
                tensor.copy_(old)
        return message

    Merging.pull = pull  # type: ignore[method-assign]
    return prove_async(arguments, channel)


def old_learning_rate(arguments: dict[str, Any], channel: Any) -> Any:
    """An island that was away goes on with the learning rate that it had, of as many steps as it has made itself."""
    right, made = StepRunner.step, [0]

    def step(self: StepRunner, number: int, counter: int) -> Any:
        job, self.job = self.job, replace(self.job, schedule=lambda _: job.schedule(made[0]))
        try:
            return right(self, number, counter)
        finally:
            self.job = job
            made[0] += 1

    StepRunner.step = step  # type: ignore[method-assign]
    return prove_async(arguments, channel)

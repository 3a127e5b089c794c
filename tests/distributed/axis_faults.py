"""Wrong pipelines, rings and ties, planted on purpose: each function breaks the engine in its rank and runs the proof.

They send what an honest run sends, so that the numbers alone must give them away. Those of tensor and expert
parallelism are in tensor_faults.py and expert_faults.py.
"""

from __future__ import annotations

from typing import Any

import torch

from distributed.attention_faults import attend_to_one_future_chunk, forget_one_causal_mask
from shoal.parallel.bucket import Bucket, Started
from shoal.parallel.data import GradientReduction
from shoal.parallel.pipeline.executor import Pipeline
from shoal.proof.entry import parallel_run

DROPPED = 1
"""The micro-batch whose gradient is lost."""


def untied_stages(arguments: dict[str, Any], channel: Any) -> Any:
    """A weight that two stages share: each keeps its own part of the gradient, and throws away the sum."""
    reduce, arrived = GradientReduction.reduce, GradientReduction.arrived
    kept: dict[int, torch.Tensor] = {}

    def remember(self: GradientReduction, bucket: Bucket) -> Started:
        if bucket.family.stages:
            kept[id(bucket)] = bucket.complete().clone()
        return reduce(self, bucket)

    def put_back(self: GradientReduction, bucket: Bucket, started: Started) -> None:
        arrived(self, bucket, started)
        if bucket.family.stages:
            assert bucket.full is not None
            bucket.full.copy_(kept[id(bucket)])

    GradientReduction.reduce, GradientReduction.arrived = remember, put_back
    return parallel_run(arguments, channel)


def drops_a_micro_batch(arguments: dict[str, Any], channel: Any) -> Any:
    """The first stage sends no gradient into its buckets for one of the micro-batches."""
    backward, receive = Pipeline.backward, Bucket.receive

    def drop(self: Bucket, slot: int, gradient: torch.Tensor) -> None:
        self.missing -= 1

    def faulty(self: Pipeline, action: Any, *given: Any) -> None:
        lost = action.micro == DROPPED and action.stage == 0
        Bucket.receive = drop if lost else receive
        try:
            backward(self, action, *given)
        finally:
            Bucket.receive = receive

    Pipeline.backward = faulty
    return parallel_run(arguments, channel)


def forgets_a_mask(arguments: dict[str, Any], channel: Any) -> Any:
    """The last rank of the ring attends to the future within its own chunk."""
    forget_one_causal_mask(index=channel.world - 1)
    return parallel_run(arguments, channel)


def attends_to_the_future(arguments: dict[str, Any], channel: Any) -> Any:
    """The last rank of the ring attends to a chunk that lies behind its own."""
    attend_to_one_future_chunk(index=channel.world - 1)
    return parallel_run(arguments, channel)

"""Frameworks without an adapter that runs here, each with the reason: they are listed in every report that asks for
them, instead of being dropped.
"""

from __future__ import annotations

from shoal.comparison.adapter import Adapter, RankPlace, Trainee
from shoal.job import Job


class NotHere(Adapter):
    def __init__(self, title: str, package: str, why: str) -> None:
        self.title, self.packages, self.why = title, (package,), why

    def missing(self) -> str:
        return self.why

    def build(self, job: Job, place: RankPlace) -> Trainee:
        raise NotImplementedError(self.why)


ADAPTERS = {
    "horovod": NotHere("Horovod", "horovod", "its last release (0.28.1) does not build against PyTorch 2.13"),
    "megatron-core": NotHere(
        "Megatron-core", "megatron.core", "its parallel layers and its distributed optimiser need CUDA"
    ),
    "torchtitan": NotHere("torchtitan", "torchtitan", "its trainer needs an accelerator, and trains its own models"),
    "torchft": NotHere(
        "torchft", "torchft", "it needs a lighthouse server beside the ranks, for which there is no adapter yet"
    ),
    "hivemind": NotHere("hivemind", "hivemind", "its peers find each other over libp2p; there is no adapter yet"),
    "axonn": NotHere("AxoNN", "axonn", "it needs CUDA and MPI"),
}

"""Frameworks without an adapter that runs here, each with the reason: they are listed in every report that asks for
them, instead of being dropped.
"""

from __future__ import annotations

from shoal.compare.adapter import Adapter, Place, Trainee
from shoal.job import Job


class Elsewhere(Adapter):
    def __init__(self, title: str, package: str, why: str) -> None:
        self.title, self.packages, self.why = title, (package,), why

    def missing(self) -> str:
        return self.why

    def build(self, job: Job, place: Place) -> Trainee:
        raise NotImplementedError(self.why)


ADAPTERS = {
    "horovod": Elsewhere("Horovod", "horovod", "its last release (0.28.1) does not build against PyTorch 2.13"),
    "megatron-core": Elsewhere(
        "Megatron-core", "megatron.core", "its parallel layers and its distributed optimiser need CUDA"
    ),
    "torchtitan": Elsewhere("torchtitan", "torchtitan", "its trainer needs an accelerator, and trains its own models"),
    "torchft": Elsewhere(
        "torchft", "torchft", "it needs a lighthouse server beside the ranks, for which there is no adapter yet"
    ),
    "hivemind": Elsewhere("hivemind", "hivemind", "its peers find each other over libp2p; there is no adapter yet"),
    "axonn": Elsewhere("AxoNN", "axonn", "it needs CUDA and MPI"),
}

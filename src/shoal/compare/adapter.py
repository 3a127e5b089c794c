"""What an adapter of a framework is: it builds the job as that framework would train it, and makes steps.

An adapter does the training and nothing else. The protocol around it (`rank.py`) measures time, evaluates, hashes
parameters and watches what is read, so that no framework reports on itself. One adapter is one file of `adapters/`,
or of another package that names it under the entry point `shoal.frameworks`.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.job import Batch, Job, share


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A rank's place in the world of a contestant."""

    rank: int
    world: int
    group: Any
    """All ranks, over Gloo; it is also the default group."""


class Trainee(ABC):
    """A job that a framework is ready to train, on one rank."""

    def __init__(self, job: Job, place: Place) -> None:
        self.job, self.place = job, place
        self.order = job.order()

    @abstractmethod
    def step(self, counter: int, lr_factor: float) -> None:
        """Trains on the global batch that starts at a sample counter, with learning rates times a factor."""

    @abstractmethod
    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter in full, by the name that it has in the job's model. All ranks call it alike."""

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's buffers."""
        return iter(())

    def close(self) -> None:  # noqa: B027 (most frameworks hold nothing)
        """Gives back what the framework holds outside of this object."""


class Adapter(ABC):
    """How one framework trains any job."""

    title: str
    """The framework and the technique, for people."""
    packages: tuple[str, ...] = ()
    """Modules that it imports besides torch."""
    same_as: str = ""
    """Shoal's strategy that does the same on `{n}` ranks."""
    exact = True
    """Whether it should follow the serial run step by step, up to rounding."""
    single = False
    """Whether it runs on one rank only."""

    def missing(self) -> str:
        """Why it cannot run on this machine; nothing if it can."""
        absent = [name for name in self.packages if importlib.util.find_spec(name) is None]
        return f"{', '.join(absent)} is not installed (make compare installs the peers)" if absent else ""

    def refuses(self, job: Job, world: int) -> str:
        """Why it cannot train this job on this many ranks; nothing if it can."""
        return ""

    @abstractmethod
    def build(self, job: Job, place: Place) -> Trainee:
        """The job, ready to train. All ranks call it alike."""


class Replica(Trainee):
    """Data parallelism in any framework: this rank's share of the batch through `forward`, backward, clipping, update.

    Frameworks average gradients over ranks, so each rank divides its sum of losses by its part of the global count.
    """

    def __init__(
        self, job: Job, place: Place, model: nn.Module, forward: nn.Module, optimizer: Any, *, micro: int = 1
    ) -> None:
        """`model`: the job's own. `forward`: what the framework made of it."""
        super().__init__(job, place)
        self.model, self.forward, self.optimizer, self.micro = model, forward, optimizer, micro
        self.rates = [group["lr"] for group in optimizer.param_groups] if has_rates(optimizer) else []
        self.even = job.global_batch % place.world == 0

    def step(self, counter: int, lr_factor: float) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=False):
            group["lr"] = rate * lr_factor
        indices = self.order.indices(counter)
        batch = self.job.train.batch(share(indices, rank=self.place.rank, ranks=self.place.world))
        self.zero()
        total, count = self.job.loss_of(self.job.run_model(self.forward, batch), batch)
        self.backward(total / self.mean_count(count, batch))
        self.clip()
        self.update()

    def mean_count(self, count: Any, batch: Batch) -> Any:
        """What the sum of losses is divided by: the mean of the counts of all ranks. A count that is the same number
        for every sample needs no message."""
        samples = len(next(iter(batch.values())))
        if self.even and isinstance(count, int) and samples and count % samples == 0:
            return count
        counts = torch.as_tensor(count, dtype=torch.float64).reshape(1).clone()
        dist.all_reduce(counts, group=self.place.group)
        return counts[0] / self.place.world

    def zero(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip(self) -> None:
        if self.job.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.job.clip)

    def update(self) -> None:
        self.optimizer.step()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        return full_parameters(self.model)

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        return self.model.named_buffers()


def has_rates(optimizer: Any) -> bool:
    return all("lr" in group for group in optimizer.param_groups)


def full_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a model with the job's own names; those that are DTensors are gathered one by one."""
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        yield name, value.full_tensor() if hasattr(value, "full_tensor") else value


def optimizer_of(job: Job, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """The job's optimiser over some parameters, with the options that the job gives each."""
    groups: list[dict[str, Any]] = []
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        options = job.options(name, parameter)
        group = next((group for group in groups if group["options"] == options), None)
        if group is None:
            groups.append(group := {"params": [], "options": options})
        group["params"].append(parameter)
    return job.optimizer([{"params": group["params"], **group["options"]} for group in groups])

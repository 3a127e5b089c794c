"""One network that holds all candidates, which share its weights: every choice of `trial.module` is a mixture of them
all, and a search learns its proportions along with the weights (DARTS: Liu, Simonyan & Yang 2019, first order).

It is a job like any other. In each step half of the samples give the gradient of the weights, with the proportions
fixed, and the other half that of the proportions, with the weights fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.job.errors import JobError

if TYPE_CHECKING:
    from shoal.job.job import Batch, Data, Job

ARCHITECTURE = "architecture"
"""Last part of the names of parameters that are proportions."""
HELD = "_held"
"""End of the names of entries that the proportions learn from."""
REACH = 5.0
"""How far a logit can move in all steps: Adam's steps are as long as the rate."""


class MixedChoice(nn.Module):
    """Candidates for one place, mixed in proportions that are learned."""

    def __init__(self, name: str, choices: Mapping[str, Callable[[], nn.Module]]) -> None:
        super().__init__()
        self.name, self.names = name, tuple(choices)
        self.candidates = nn.ModuleList(build() for build in choices.values())
        self.architecture = nn.Parameter(torch.zeros(len(self.names)))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        shares = self.architecture.softmax(0)
        found = [share * candidate(*args, **kwargs) for share, candidate in zip(shares, self.candidates, strict=True)]
        if len({each.shape for each in found}) > 1:
            shapes = ", ".join(f"{name} {list(each.shape)}" for name, each in zip(self.names, found, strict=True))
            raise JobError(f"the choices of {self.name!r} cannot be mixed: they return {shapes}; let them agree")
        total = found[0]
        for each in found[1:]:
            total = total + each
        return total


def proportions(model: nn.Module) -> dict[str, dict[str, float]]:
    """What a network of mixtures has learned: name -> candidate -> its share."""
    return {
        module.name: dict(zip(module.names, module.architecture.detach().softmax(0).tolist(), strict=True))
        for module in model.modules()
        if isinstance(module, MixedChoice)
    }


class Both(NamedTuple):
    """Outputs on the samples for the weights, and on those for the proportions."""

    own: Any
    held: Any


class OneShotNet(nn.Module):
    """A network of mixtures. In training it takes its inputs twice, for the weights and for the proportions."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        half = len(args) // 2
        own = args[:half], {name: value for name, value in kwargs.items() if not name.endswith(HELD)}
        if not self.training:
            return self.net(*own[0], **own[1])
        held = args[half:], {name[: -len(HELD)]: value for name, value in kwargs.items() if name.endswith(HELD)}
        return Both(self._with_fixed(True, *own), self._with_fixed(False, *held))

    def _with_fixed(self, architecture: bool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The output, without a gradient of the proportions, or of the weights."""
        fixed = {
            name: value.detach() for name, value in self.net.named_parameters() if is_architecture(name) == architecture
        }
        return functional_call(self.net, fixed, tuple(args), dict(kwargs))


def is_architecture(name: str) -> bool:
    """Whether a parameter of this name holds proportions."""
    return name.rpartition(".")[2] == ARCHITECTURE


class Halves:
    """Pairs of samples: one for the weights, one for the proportions."""

    def __init__(self, data: Data) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data) // 2

    def batch(self, indices: np.ndarray) -> Batch:
        first = 2 * np.asarray(indices, dtype=np.int64)
        held = {f"{name}{HELD}": value for name, value in self.data.batch(first + 1).items()}
        return {**self.data.batch(first), **held}


class Repeated:
    """Validation data with the entries that a network in training would take as well."""

    def __init__(self, data: Data) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: np.ndarray) -> Batch:
        found = self.data.batch(indices)
        return {**found, **{f"{name}{HELD}": value for name, value in found.items()}}


class WithArchitecture(torch.optim.Optimizer):
    """The job's optimiser, with Adam for proportions."""

    def __init__(self, groups: Any, *, weights: Callable[[Any], torch.optim.Optimizer], rate: float) -> None:
        super().__init__(groups, {ARCHITECTURE: False})
        shares = [group for group in self.param_groups if group[ARCHITECTURE]]
        rest = [group for group in self.param_groups if not group[ARCHITECTURE]]
        # The groups are the same objects, so that a schedule of this optimiser's rates reaches the inner ones.
        self.inner = [weights(rest)] if rest else []
        if shares:
            self.inner.append(torch.optim.Adam(shares, lr=rate, betas=(0.5, 0.999), weight_decay=1e-3))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for inner in self.inner:
            inner.step()


def one_shot(job: Job) -> Job:
    """The job that trains a network of mixtures; `job.model` builds them."""
    if job.loss_over != "samples":
        raise JobError(f"job {job.name!r}: a one-shot search needs a loss over samples, not over the {job.loss_over}")
    inputs: Any
    if isinstance(job.inputs, Mapping):
        inputs = {**job.inputs, **{f"{name}{HELD}": f"{entry}{HELD}" for name, entry in job.inputs.items()}}
    else:
        inputs = (*job.inputs, *(f"{entry}{HELD}" for entry in job.inputs))

    def options(name: str, parameter: Tensor) -> dict[str, Any]:
        if is_architecture(name):
            return {ARCHITECTURE: True}
        return job.options(name.removeprefix("net."), parameter)

    def loss(output: Any, batch: Batch) -> Any:
        if not isinstance(output, Both):
            return job.loss(output, batch)
        total, count = job.loss(output.own, batch)
        held = {name[: -len(HELD)]: value for name, value in batch.items() if name.endswith(HELD)}
        return total + job.loss(output.held, held)[0], count

    def optimizer(groups: Any) -> torch.optim.Optimizer:
        return WithArchitecture(groups, weights=job.optimizer, rate=REACH / max(1, job.steps))

    return replace(
        job,
        name=f"{job.name}:one-shot",
        model=lambda: OneShotNet(job.model()),
        train=Halves(job.train),
        validation=None if job.validation is None else Repeated(job.validation),
        inputs=inputs,
        loss=loss,
        options=options,
        optimizer=optimizer,
        layout=None,
        target=None,
        callbacks=(),
    )

"""`Job`: what to train, and not how. Model, data, loss, optimiser, batch and target are fields of one frozen
object that any strategy can run. The loss is a sum and a count rather than a mean, because a mean of means is
wrong when a batch is split unevenly among ranks and micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from shoal.job.buffers import BufferMode, wrong_declaration
from shoal.job.callbacks import wrong_callbacks
from shoal.job.errors import JobError
from shoal.job.groups import Options, no_options
from shoal.job.hints import LayoutHints, WithBlocks
from shoal.job.large_batch import Growth, ScaleRule, rate_factor, wrong_scale
from shoal.job.order import LastBatch, Order
from shoal.job.schedule import constant

if TYPE_CHECKING:
    from shoal.strategy.facts import ModelFacts

Batch = dict[str, Tensor]
"""Named tensors; the first dimension of each is the samples."""

LossOver = Literal["samples", "batch", "micro-batch"]

SumAndCount = tuple[Tensor, Tensor | int]
"""A sum over samples or tokens, and how many were counted."""


@runtime_checkable
class Data(Protocol):
    """Samples by index. `batch` must be a pure function of the indices, of which there may be none."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> Batch: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The validation value at which training stops."""

    metric: str
    value: float
    better: Literal["lower", "higher"] = "lower"

    def __post_init__(self) -> None:
        if self.better not in ("lower", "higher"):
            raise JobError(f"better is {self.better!r} in Target({self.metric!r}), but must be 'lower' or 'higher'")

    def reached(self, value: float) -> bool:
        """Whether a measured value is as good as the target; never true of NaN."""
        return value <= self.value if self.better == "lower" else value >= self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What to train."""

    name: str
    model: Callable[[], nn.Module]
    """Builds the model on the CPU in float32; the caller has seeded torch."""
    train: Data
    loss: Callable[[Any, Batch], SumAndCount]
    """(model output, batch) -> (SUM of losses, number of tokens or samples counted). Never a mean."""
    inputs: tuple[str, ...] | dict[str, str] = ("x",)
    """Which batch entries the model takes: by position, or {argument name: entry}."""
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    """Takes parameter groups [{"params": [...], **options}]."""
    options: Options = no_options
    """(parameter name, parameter) -> its own optimiser options, for example {"weight_decay": 0.0}."""
    schedule: Callable[[int], float] = constant
    """Step, from 0 -> factor on every group's base learning rate. Stateless."""
    scale_rule: ScaleRule = "none"
    """How the learning rate grows with the batch: "linear", or "sqrt" of global_batch / base_batch."""
    base_batch: int | None = None
    """The batch that the learning rate was tuned for. None: global_batch."""
    warmup: int = 0
    """Steps in which a scaled rate is reached, linearly from the unscaled one."""
    ema: float | None = None
    """Decay of a moving average of the weights, such as 0.999: evaluated besides the weights, saved, and exported by
    `--ema`.
    """
    clip: float | None = None
    """Largest global norm of the gradient; None: no clipping."""
    global_batch: int
    growth: Growth = ()
    """((sample counter, global batch from there on), ...): batches that grow instead of a rate that decays."""
    steps: int
    validation: Data | None = None
    metrics: Callable[[Any, Batch], dict[str, SumAndCount]] | None = None
    """(model output, batch) -> {name: (sum, count)}; the validation value is the total sum over the total
    count. None: the loss.
    """
    derived: dict[str, Callable[[dict[str, float]], float]] = field(default_factory=dict)
    """Further values computed from the metrics, for example perplexity = exp(loss)."""
    evaluate_every: int = 0
    """Steps between evaluations; 0 evaluates at the end only."""
    target: Target | None = None
    loss_over: LossOver = "samples"
    """What the loss is computed over. "samples": each sample on its own, so batches may be split anywhere. "batch":
    the global batch (contrastive losses), so ranks gather the model's outputs. "micro-batch": each part that a rank
    computes at once is a batch of its own.
    """
    batch_norm: Literal["sync", "local"] = "sync"
    buffers: BufferMode | Mapping[str, BufferMode] | None = None
    """What replicas do with buffers that a forward updates from its own samples (running means, codebooks, counts):
    "average", "sum", "broadcast" or "local" for all of them, or {pattern of names: one of these}.
    """
    last_batch: LastBatch = "wrap"
    """The batch at an epoch's end: filled from the next epoch, or short."""
    callbacks: Sequence[Any] = ()
    """Objects with on_step, on_evaluate or on_checkpoint, called on rank 0 (`shoal.Callback`)."""
    seed: int = 0
    facts: ModelFacts | None = None
    """What legality needs to know of the model. Missing fields are inferred from the module."""
    layout: LayoutHints | None = None
    """How the model may be partitioned, where inference should not decide."""

    def __post_init__(self) -> None:
        for what, value, least in (
            ("global_batch", self.global_batch, 1),
            ("steps", self.steps, 0),
            ("evaluate_every", self.evaluate_every, 0),
            ("seed", self.seed, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
                self._refuse(f"{what} is {value!r}, but must be a whole number of at least {least}")
        if wrong := wrong_scale(self.scale_rule, self.base_batch, self.warmup, self.growth):
            self._refuse(wrong)
        if not self.name:
            self._refuse("name is empty; give the job a name")
        if isinstance(self.optimizer, torch.optim.Optimizer):
            kind = type(self.optimizer).__name__
            self._refuse(
                f"optimizer is an optimiser ({kind}), but must be a function that builds it from parameter groups: "
                f"write optimizer=lambda groups: {kind}(groups, ...)"
            )
        for what in ("model", "loss", "optimizer", "options", "schedule"):
            if not callable(value := getattr(self, what)):
                short = f"a {type(value).__name__}" if len(repr(value)) > 60 or "\n" in repr(value) else repr(value)
                self._refuse(f"{what} is {short}, but must be a function (or another callable)")
        if isinstance(self.model, nn.Module):
            self._refuse("model is a module, but must be a function that builds it: write model=lambda: MyModel(...)")
        if isinstance(self.inputs, str):
            self._refuse(
                f"inputs is the text {self.inputs!r}, but must be a tuple of batch entries: write ({self.inputs!r},)"
            )
        if self.clip is not None and not (isinstance(self.clip, Real) and self.clip > 0):
            self._refuse(f"clip is {self.clip!r}, but must be greater than 0 (or None for no clipping)")
        if self.ema is not None and not (isinstance(self.ema, (int, float)) and 0 <= self.ema < 1):
            self._refuse(f"ema is {self.ema!r}, but must be a decay of at least 0 and below 1, such as 0.999")
        if self.batch_norm not in ("sync", "local"):
            self._refuse(f"batch_norm is {self.batch_norm!r}, but must be 'sync' or 'local'")
        if wrong_buffers := wrong_declaration(self.buffers):
            self._refuse(wrong_buffers)
        if wrong_calls := wrong_callbacks(self.callbacks):
            self._refuse(wrong_calls)
        if self.loss_over not in get_args(LossOver):
            self._refuse(f"loss_over is {self.loss_over!r}, but must be 'samples', 'batch' or 'micro-batch'")
        if self.last_batch not in ("wrap", "short"):
            self._refuse(f"last_batch is {self.last_batch!r}, but must be 'wrap' or 'short'")
        if self.layout is not None and not isinstance(self.layout, LayoutHints):
            self._refuse(f"layout is {self.layout!r}, but must be LayoutHints(...) (or None: all of it is inferred)")
        patterns = self.layout.blocks if self.layout is not None else None
        if patterns is not None:
            object.__setattr__(self, "model", WithBlocks(self.model, patterns))
        elif isinstance(self.model, WithBlocks):
            object.__setattr__(self, "model", self.model.build)
        for what, data in (("train", self.train), ("validation", self.validation)):
            if data is None and what == "validation":
                continue
            if not isinstance(data, Data):
                self._refuse(
                    f"{what} is a {type(data).__name__}, but must have __len__() and batch(indices): "
                    "wrap tensors in TensorData(x=..., y=...), a torch dataset in DatasetData(dataset)"
                )
            if len(data) == 0:
                self._refuse(f"{what} holds no samples")

    def _refuse(self, reason: str) -> NoReturn:
        raise JobError(f"job {self.name!r}: {reason}")

    def run_model(self, model: nn.Module, batch: Batch) -> Any:
        """The model's output on the batch entries that `inputs` names."""
        wanted = self.inputs.values() if isinstance(self.inputs, Mapping) else self.inputs
        missing = [entry for entry in wanted if entry not in batch]
        if missing:
            self._refuse(f"inputs names the batch entry {missing[0]!r}, but a batch holds {sorted(batch)}")
        if isinstance(self.inputs, Mapping):
            return model(**{argument: batch[entry] for argument, entry in self.inputs.items()})
        return model(*(batch[entry] for entry in self.inputs))

    def loss_of(self, output: Any, batch: Batch) -> SumAndCount:
        """The loss as a sum and a count; raises a JobError for anything else."""
        found = self.loss(output, batch)
        if type(found) is not tuple or len(found) != 2 or not isinstance(found[0], Tensor):
            self._refuse_pair("loss", found)
        total, count = found
        for what, value in (("sum", total), ("count", count)):
            if not _is_number(value):
                self._refuse(
                    f"loss returns {_briefly(value)} as its {what}, but must return one number there: add it up over "
                    "the batch"
                )
        return (total.reshape(()) if total.dim() else total), count

    def order(self) -> Order:
        """The order in which training visits its samples."""
        return Order(self.seed, len(self.train), self.global_batch, self.last_batch, self.growth)

    def lr_factor(self, step: int) -> float:
        """What base learning rates are multiplied by at a step (from 0): the schedule, and the rule for large
        batches."""
        base = self.global_batch if self.base_batch is None else self.base_batch
        scale = rate_factor(self.scale_rule, batch=self.global_batch, base=base, warmup=self.warmup, step=step)
        return self.schedule(step) * scale

    def measure(self, output: Any, batch: Batch) -> dict[str, SumAndCount]:
        """The sums and counts that validation adds up: the metrics, or the loss where the job names none."""
        if self.metrics is None:
            return {"loss": self.loss_of(output, batch)}
        found = self.metrics(output, batch)
        if not isinstance(found, Mapping):
            self._refuse(f"metrics returned {_briefly(found)}, but must return a dictionary {{name: (sum, count)}}")
        for name, row in found.items():
            if not isinstance(row, (tuple, list)) or len(row) != 2 or not all(map(_is_number, row)):
                self._refuse_pair(f"metric {name!r}", row)
        return dict(found)

    def _refuse_pair(self, what: str, found: Any) -> NoReturn:
        self._refuse(
            f"{what} is {_briefly(found)}, but must be a pair (sum, count): the sum over samples or tokens, and how "
            "many were summed. Both are added up over ranks and validation batches; a mean would be wrong"
        )

    def summarise(self, totals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """Validation values from total sums and counts, derived ones included. Nothing counted gives NaN."""
        values = {name: total / count if count else math.nan for name, (total, count) in totals.items()}
        for name, derive in self.derived.items():
            values[name] = derive(dict(values))
        return values


def _is_number(value: Any) -> bool:
    """Whether it is one real number: of Python, NumPy or PyTorch."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real) or (isinstance(value, np.ndarray | np.generic) and value.size == 1)


def _briefly(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}" if value.dim() else f"the number {value.item():.6g} (a tensor)"
    return f"{value!r}" if isinstance(value, (int, float)) else f"a {type(value).__name__}"

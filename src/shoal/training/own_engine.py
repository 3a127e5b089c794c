"""What `shoal.engine` returns: a model under a strategy, for a loop of one's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from shoal.checkpoint.buffers import persistent_buffers
from shoal.comm.json_exchange import exchange
from shoal.job.buffers import BufferMode
from shoal.launch.join import Rank, leave
from shoal.parallel.engine import Engine
from shoal.parallel.placement import Replicas
from shoal.parallel.result import StepResult
from shoal.runtime.setup import precision_of
from shoal.strategy import Strategy
from shoal.training.own_batches import OwnBatches
from shoal.training.own_checks import UNCHECKED, LossOf, ReplicaState, check_split, doubtful_counts, mean_loss
from shoal.training.own_state import load_own, save_own


class OwnLoop:
    """A model under a strategy, for a loop of one's own."""

    def __init__(
        self,
        running: Engine,
        strategy: Strategy,
        *,
        declared: Mapping[str, BufferMode],
        place: Rank,
        batches: OwnBatches | None = None,
    ) -> None:
        self.rank, self.world = place.rank, place.world
        self._batches = batches
        self.running = running
        """The engine itself."""
        self.model = running.model
        self.micro_batches = strategy.micro_batches
        """Calls of `backward` that make up a step: the k of accumulate(k)."""
        self._done = 0
        self._stepping = False
        self._precision = precision_of(strategy)
        self._half = self._precision is not None
        self._undo: list[Callable[[], Any]] = []
        everyone = running.placement.world
        self._state = ReplicaState(self.model, everyone, declared=declared) if everyone.size > 1 else None
        self._steps = 0
        self._checked = everyone.size * self.micro_batches == 1
        """Whether the loss need not be checked any more."""
        self._samples, self._counts = 0, list[Any]()
        """Of this step: samples that the model was called on, and the counts of the micro-batches."""
        self._begun = False
        if batches is None:
            self._watch_forwards()
        guard = self.optimizer.register_step_pre_hook(self._require_own_step)
        self._undo.append(guard.remove)
        if self._half and batches is None:
            self._autocast_forward()
        if not running.owner.keeps_full:
            self._refuse_sharded_state()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimiser over this rank's slices, for learning-rate schedulers: `step` takes the groups' `lr` as it
        finds it."""
        return self.running.optimizer.optimizer

    @property
    def replicas(self) -> Replicas:
        """The ranks that train copies of the model."""
        return self.running.replicas

    def share(self, samples: int) -> slice:
        """This rank's part of a batch with this number of samples."""
        return self.running.share(samples)

    def backward(self, loss_sum: torch.Tensor, count: torch.Tensor | float, *, last: bool | None = None) -> None:
        """Gradients of one micro-batch, given the SUM of its losses and how many there are.

        Args:
            loss_sum: The sum of the losses.
            count: The number of samples or tokens in that sum.
            last: Whether this is the step's last micro-batch. By default every call of the strategy's accumulate(k)
                is counted, and the k-th is the last.
        """
        if self._batches is not None:
            raise RuntimeError(
                "this engine was given example= and loss=, and calls the model itself: use engine.train_batch(batch) "
                "in place of backward() and step()"
            )
        if last is not None and self.micro_batches > 1:
            raise ValueError(
                f"last={last} was given, but accumulate({self.micro_batches}) already says which micro-batch is the "
                "last; leave one of them out"
            )
        if loss_sum.numel() != 1:
            raise ValueError(
                f"backward() was given a loss of shape {list(loss_sum.shape)}; pass the sum of the losses, a single "
                "number, and how many there are"
            )
        if last is None:
            last = self._done + 1 >= self.micro_batches
        self.running.backward(loss_sum, count, last=last)
        self._counts.append(count)
        self._done += 1

    def train_batch(self, batch: Mapping[str, torch.Tensor], lr_factor: float = 1.0) -> StepResult:
        """One step on a global batch: forward, backward, update, under any axes. All ranks give the same batch; each
        computes its part of it.

        Args:
            batch: {name: tensor} with the entries of `example`, samples first.
            lr_factor: A factor on the base learning rates; leave it out where a scheduler sets them.
        """
        batches = self._given("train_batch")
        self._stepping = True
        try:
            return batches.train(batch, lr_factor)
        finally:
            self._stepping = False

    def evaluate_batch(self, batch: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """The metrics of a batch, or the loss, without a step; the same on every rank. All ranks call it alike."""
        return self._given("evaluate_batch").evaluate(batch)

    def _given(self, what: str) -> OwnBatches:
        if self._batches is None:
            raise RuntimeError(
                f"engine.{what}() calls the model itself; give shoal.engine(..., example=batch, loss=function), where "
                "function(output, batch) is (sum, count)"
            )
        return self._batches

    def evaluate(self, loss_of: LossOf, *batch: Any) -> float:
        """The mean loss of a batch that every rank gives alike, each computing its part; forward only, also under
        zero=3. All ranks call it alike, with `loss_of` as in `check`."""
        if self._batches is not None:
            raise RuntimeError("this engine calls the model itself: use engine.evaluate_batch(batch)")
        return mean_loss(self.running, loss_of, batch)

    def save(self, folder: str | Path, *, step: int, progress: dict[str, Any] | None = None, keep: int = 2) -> Path:
        """Writes a checkpoint: weights, buffers, optimiser state, loss scale. All ranks call it alike.

        Args:
            folder: Where checkpoints are kept; all ranks see it.
            step: The step that the checkpoint is named after.
            progress: What the loop needs to go on, of text, numbers, lists and dicts: an epoch, a scheduler's state.
            keep: The newest checkpoints that are kept.
        """
        self.running.owner.settle()
        return save_own(self.running, folder, step=step, progress=progress, keep=keep)

    def load(self, path: str | Path) -> tuple[int, dict[str, Any]]:
        """Restores a checkpoint, or the newest intact one of a folder, whichever strategy wrote it: (step, progress).
        All ranks call it alike. Schedulers keep their optimiser."""
        step, progress = load_own(self.running, path)
        if self._batches is not None:
            self._batches.steps = step
        return step, progress

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        # After an error other ranks do not come to the end of the block, and must not be waited for.
        if kind is None:
            self.close()
            leave()

    def check(self, loss_of: LossOf, *batch: Any) -> None:
        """Checks that a batch may be split: its loss and its count must be the sums of those of its parts.

        Computes forwards only, and leaves no trace in the model. All ranks call it, once, before the loop:

            engine.check(lambda x, y: (cross_entropy(model(x), y, reduction="sum"), len(x)), x, y)

        Args:
            loss_of: Takes a batch, gives what `backward` takes: the sum of its losses and how many there are.
            batch: Tensors with the samples first; other things are passed on as they are.

        Raises:
            SamplesCoupled: The loss is a mean, the count is wrong, or samples depend on each other.
        """
        half, self._half = self._half, False
        try:
            check_split(self.model, loss_of, batch)
        finally:
            self._half, self._begun, self._samples = half, False, 0
            self.running.owner.release()
        self._checked = True

    def step(self, lr_factor: float = 1.0, *, again: Callable[[], None] | None = None) -> StepResult | None:
        """Clips and updates after the step's last micro-batch; before it, does nothing and gives None.

        Args:
            lr_factor: A factor on the base learning rates; leave it out where a scheduler sets them.
            again: Runs forward and `backward` once more, for an optimiser that needs a closure (LBFGS).
        """
        if self._batches is not None:
            raise RuntimeError("engine.train_batch(batch) has made the step already; leave engine.step() out")
        if 0 < self._done < self.micro_batches:
            return None
        self._before_update()
        self._stepping = True
        try:
            return self.running.step(lr_factor, again=again)
        finally:
            self._stepping, self._done = False, 0
            self._samples, self._counts, self._begun = 0, [], False

    def _before_update(self) -> None:
        """What can be checked of a step, and how much this rank's changes of buffers weigh."""
        self._steps += 1
        if self.running.buffers is not None:
            self._begin()  # Where no forward was made there is no change, but others wait for this rank.
            self.running.buffers.weight = float(sum(map(float, self._counts)))
        if self._state is not None and self._steps & (self._steps - 1) == 0:
            self._warn(self._state.compare(self._steps))
        if self._steps == 1 and not self._checked:
            self._warn(UNCHECKED)
        if self._steps == 1 and self.replicas.everyone.size * self.micro_batches > 1 and self._counts:
            rows = exchange({"samples": self._samples, "counts": [float(count) for count in self._counts]})
            self._warn(doubtful_counts(rows))

    def _warn(self, text: str) -> None:
        if text and self.running.placement.world.index == 0:
            warnings.warn(text, stacklevel=4)

    def _watch_forwards(self) -> None:
        """Before the step's first forward, buffers are noted: in the model, or in the modules that hold them."""

        def root(module: nn.Module, args: Any, kwargs: Any) -> None:
            first = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), None)
            if module.training and torch.is_grad_enabled() and first is not None and first.dim():
                self._samples += len(first)

        self._undo.append(self.model.register_forward_pre_hook(root, with_kwargs=True).remove)
        if self.running.buffers is None:
            return
        paths = {name.rpartition(".")[0] for name in (*self.running.buffers.averaged, *self.running.buffers.copies)}
        for path in {"", *paths}:
            hook = self.model.get_submodule(path).register_forward_pre_hook(self._begin)
            self._undo.append(hook.remove)

    def _begin(self, module: nn.Module | None = None, args: Any = ()) -> None:
        if self.running.buffers is not None and not self._begun and (module is None or module.training):
            self._begun = True
            self.running.buffers.begin(0.0)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The model's full weights and buffers, as copies on every rank. All ranks call it alike."""
        self._require_uncut("state_dict()")
        owner = self.running.owner
        if owner.keeps_full:
            return {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        found = dict.fromkeys(name for name, _ in self.model.named_parameters(remove_duplicate=False))
        found |= dict.fromkeys(persistent_buffers(self.model))
        names: dict[int, list[str]] = {}
        for name, param in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
        with torch.no_grad():
            for param, values in owner.full_values():
                found |= dict.fromkeys(names[id(param)], values.clone())  # type: ignore[arg-type]
        for name, param in self.model.named_parameters(remove_duplicate=False):
            if found[name] is None:  # Frozen: every rank has it.
                found[name] = param.detach().clone()  # type: ignore[assignment]
        for name, buffer in persistent_buffers(self.model).items():
            found[name] = buffer.clone()  # type: ignore[assignment]
        return found  # type: ignore[return-value]

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Makes full weights and buffers the model's. All ranks call it alike."""
        self._require_uncut("load_state_dict(state)")
        own = {**dict(self.model.named_parameters()), **persistent_buffers(self.model)}
        absent = [name for name in own if name not in state]
        if absent:
            raise ValueError(f"the state has no {absent[0]}; give all of the model's parameters and buffers")
        slots = {slot.name for bucket in self.running.buckets for slot in bucket.buffer.slots}
        for name, tensor in own.items():
            if tuple(state[name].shape) != tuple(tensor.shape):
                raise ValueError(f"{name} has shape {list(state[name].shape)}, the model's {list(tensor.shape)}")
        with torch.no_grad():
            for name, tensor in own.items():
                if name not in slots:
                    tensor.copy_(state[name])
        self.running.owner.load_parameters(lambda name, start, stop: state[name].reshape(-1)[start:stop])

    def _require_uncut(self, what: str) -> None:
        cut = self.running.cut
        if cut.cuts or cut.absent:
            raise RuntimeError(
                f"engine.{what}: pp, tp and ep leave each rank a part of the model. engine.save(folder, step=n) writes "
                "the full one, which engine.load reads under any strategy, and shoal.load_weights(path) in one process"
            )

    def close(self) -> None:
        """Gives the model back, with full parameters on every rank. All ranks call it alike."""
        for undo in self._undo:
            undo()
        self.running.close()

    def _require_own_step(self, *_: Any) -> None:
        if not self._stepping:
            raise RuntimeError(
                "optimizer.step() was called on the engine's optimiser, which has no gradients of its own; call "
                "engine.step()"
            )

    def _autocast_forward(self) -> None:
        """The model computes in 16 bits and gives float32, so that a loss computed outside is not rounded."""
        forward, model, device = self.model.forward, self.model, self.running.device.type

        def autocast(*args: Any, **kwargs: Any) -> Any:
            # The cache would keep a copy of every weight for the forward, also of blocks that ZeRO-3 gave back.
            with torch.autocast(device, self._precision, enabled=self._half, cache_enabled=False):
                output = forward(*args, **kwargs)
            return tree_map(lambda leaf: leaf.float() if _is_half(leaf) else leaf, output)

        model.forward = autocast
        self._undo.append(lambda: vars(model).pop("forward", None))

    def _refuse_sharded_state(self) -> None:
        def saving(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            raise RuntimeError(
                "with zero=3 each rank holds a shard of the parameters, and state_dict() of the model would hold NaN; "
                "call engine.state_dict() on every rank: it gathers full weights"
            )

        def loading(*_: Any) -> None:
            raise RuntimeError(
                "with zero=3 each rank holds a shard of the parameters, which load_state_dict() of the model would not "
                "reach; call engine.load_state_dict(state) on every rank"
            )

        for module in self.model.modules():
            self._undo.append(module.register_state_dict_pre_hook(saving).remove)
            self._undo.append(module.register_load_state_dict_pre_hook(loading).remove)


def _is_half(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bfloat16, torch.float16)

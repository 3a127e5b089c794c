"""One forward of a job, recorded operation by operation, without running it.

The model is built of fake tensors (shapes without memory) and called once on a few samples, loss included. The result
is a flat list of operations on values: what each reads, what it writes, in which module. Everything that Shoal infers
about a model (where and how it can be cut) is derived from this list. A model whose code branches on values (a mixture
of experts that tests which expert was chosen) cannot run on fakes; it runs on real tensors.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from shoal.job import Job
from shoal.job.facts import build_without_memory
from shoal.job.gradient_hooks import keep_hooks
from shoal.job.own_code import built, naming_the_line
from shoal.layout.recorded import Op, Ref, Trace, TracedAttention, TracedCall, Value, ValueRead
from shoal.layout.tensor.sized_calls import SizedCalls

READS_VALUES = (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.is_nonzero)
SAMPLES = 2
"""Batch size of a trace: enough to distinguish a batch from a single sample."""
LARGEST_CONSTANT = 1 << 17
"""Largest constant tensor that is identified by its values."""


class CannotTrace(ValueError):
    """The model cannot be called on a sample of its own data."""


class OpRecorder(TorchDispatchMode):
    """Records every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.calls: list[TracedCall] = []
        self.open: list[TracedCall] = []
        self.value_reads: list[ValueRead] = []
        self.constants: dict[int, str] = {}
        self._known: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []

    def value_of(self, tensor: torch.Tensor, source: str = "constant", name: str = "") -> int:
        known = self._known.get(id(tensor))
        return known if known is not None else self._new(tensor, source, name, producer=-1, learned=False)

    def known(self, tensor: torch.Tensor) -> int | None:
        return self._known.get(id(tensor))

    def running(self) -> tuple[int, str] | None:
        """Number and path of the innermost call of a module."""
        return (self.open[-1].number, self.open[-1].path) if self.open else None

    def _new(self, tensor: torch.Tensor, source: str, name: str, *, producer: int, learned: bool) -> int:
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            where = self.open[-1].path if self.open else ""
            raise CannotTrace(
                f"the model calls {f'modules in {where}' if where else 'its modules'} inside torch.func (vmap, grad or "
                "the like), where the operations on a tensor cannot be followed, so tp, cp, pp and ep cannot cut it; "
                "call them outside of it, or use dp"
            )
        number = len(self.values)
        shape = tuple(int(size) for size in tensor.shape)
        strides = tuple(int(step) for step in tensor.stride()) if tensor.layout is torch.strided else ()
        storage = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0
        self.values.append(Value(number, shape, tensor.dtype, source, name, producer, learned, strides, storage))
        self._known[id(tensor)] = number
        if source == "constant":
            self.constants[number] = _digest(tensor)
        self._alive.append(tensor)  # An id is unique only while its tensor is alive.
        return number

    def enter_state(self, model: nn.Module) -> tuple[dict[str, int], dict[str, int]]:
        parameters, buffers = {}, {}
        for name, param in model.named_parameters():
            parameters[name] = self._new(param, "parameter", name, producer=-1, learned=True)
        for name, buffer in model.named_buffers():
            buffers[name] = self._new(buffer, "buffer", name, producer=-1, learned=False)
        return parameters, buffers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = tuple(self.value_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        as_called = tree_map(lambda leaf: self._ref(leaf), (args, kwargs))
        result = func(*args, **kwargs)
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            if getattr(func, "overloadpacket", None) in READS_VALUES:
                learned = any(self.values[value].learned for value in inputs)
                where = self.open[-1].path if self.open else ""
                self.value_reads.append(ValueRead(len(self.ops), where, learned, inputs))
            return result  # A query about a tensor, such as its device.
        learned = any(self.values[value].learned for value in inputs)
        number = len(self.ops)
        outputs = tuple(
            self._new(leaf, "op", "", producer=number, learned=learned)
            for leaf in tree_leaves(result)
            if isinstance(leaf, torch.Tensor)
        )
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        module = self.open[-1].path if self.open else ""
        self.ops.append(Op(number, name, func, tuple(as_called[0]), dict(as_called[1]), inputs, outputs, module))
        return result

    def _ref(self, leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return tuple(map(self._ref, leaf))
        return Ref(self.value_of(leaf)) if isinstance(leaf, torch.Tensor) else leaf

    def as_refs(self, tree: Any) -> Any:
        return tree_map(self._ref, tree, is_leaf=lambda leaf: isinstance(leaf, PackedSequence))

    def flat(self, tree: Any) -> list[int | None]:
        return [self.value_of(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in tree_leaves(tree)]

    def enter(self, path: str, args: Any, kwargs: Any) -> None:
        # A PackedSequence checks what it is made of: it is kept as a plain tuple.
        inputs = tree_map(self._ref, (args, kwargs), is_leaf=lambda leaf: isinstance(leaf, PackedSequence))
        call = TracedCall(path, len(self.ops), self.flat((args, kwargs)), inputs=inputs)
        call.number = len(self.calls)
        self.calls.append(call)
        self.open.append(call)

    def leave(self, module: nn.Module, output: Any) -> None:
        call = self.open.pop()
        call.stop, call.results = len(self.ops), self.flat(output)
        leaves = enumerate(tree_leaves(output))
        call.learning = frozenset(n for n, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
        call.bare = isinstance(output, torch.Tensor)

    def note_reached(self, loss: Any) -> None:
        """Marks the values that receive a gradient from the loss, if it has one."""
        if not isinstance(loss, torch.Tensor) or loss.grad_fn is None:
            return
        reached, ahead = {loss.grad_fn}, [loss.grad_fn]
        while ahead:
            behind = {node for node, _ in ahead.pop().next_functions if node is not None} - reached
            reached |= behind
            ahead += behind
        for value, tensor in zip(self.values, self._alive, strict=True):
            value.reached = not tensor.requires_grad or tensor.is_leaf or tensor.grad_fn in reached


def _digest(tensor: torch.Tensor) -> str:
    """Digest of a constant's values, if it has any; fakes of small constants keep them."""
    real = getattr(tensor, "constant", None) if isinstance(tensor, FakeTensor) else tensor
    if real is None or real.is_meta or real.layout is not torch.strided or real.numel() > LARGEST_CONSTANT:
        return ""
    with torch._C._DisableTorchDispatch():
        values = real.detach().cpu().contiguous().reshape(-1)
        data = values.view(torch.uint8).numpy().tobytes() if len(values) else b""
    return hashlib.sha256(data).hexdigest()


class _AttentionCalls(TorchFunctionMode):
    """Records each call of attention; below this level it may be one operation or a dozen."""

    def __init__(self, recorder: OpRecorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.found: list[TracedAttention] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        first = len(self.recorder.ops)
        output = func(*args, **kwargs)
        value, mask = self.recorder.value_of, given.get("attn_mask")
        self.found.append(
            TracedAttention(
                first,
                len(self.recorder.ops),
                value(given["query"]),
                value(given["key"]),
                value(given["value"]),
                None if mask is None else value(mask),
                bool(given.get("is_causal")),
                value(output),
                self.recorder.open[-1].path if self.recorder.open else "",
            )
        )
        return output


class _SeesCalls(Protocol):
    def enter(self, path: str, args: Any, kwargs: Any) -> None: ...

    def leave(self, module: nn.Module, output: Any) -> None: ...


@contextmanager
def reporting_calls(model: nn.Module, to: _SeesCalls, *, before_own_hooks: bool) -> Iterator[None]:
    """Reports every module call. `before_own_hooks`: with the arguments before the model's own pre-hooks."""
    hooks = []
    for path, module in model.named_modules():
        if type(module).forward is nn.Module.forward:
            continue  # Containers are not called.

        def before(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            to.enter(path, args, kwargs)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            to.leave(module, output)

        hooks.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=before_own_hooks))
        hooks.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def trace(job: Job, *, samples: int = SAMPLES, model: nn.Module | None = None) -> Trace:
    """Records a forward of the job's model, on fake tensors if the model allows it."""
    indices = np.arange(min(samples, len(job.train)))
    with naming_the_line(job, "train.batch(indices)"):
        batch = job.train.batch(indices)
    with torch.random.fork_rng(devices=[]), _quiet_fakes():
        torch.manual_seed(job.seed)
        if model is None:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            try:
                fakes = faked(build_without_memory(job), mode)
                with mode:
                    return _record(job, fakes, {k: mode.from_tensor(v) for k, v in batch.items()}, len(indices), True)
            except Exception:
                model = built(job)
        try:
            with naming_the_line(job, "a forward on samples of its data", batch):
                return _record(job, model, batch, len(indices), _is_fake(model))
        except Exception as error:
            raise CannotTrace(str(error)) from error


@contextmanager
def _quiet_fakes() -> Iterator[None]:
    """Suppresses PyTorch's log of failures on fakes: the model then runs on real tensors."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def faked(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """The same model with fake parameters and buffers; tied ones stay tied."""
    made: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> Any:
        if id(tensor) not in made:
            with mode:
                like = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            is_param = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(like, requires_grad=tensor.requires_grad) if is_param else like
            keep_hooks(tensor, made[id(tensor)])
        return made[id(tensor)]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = fake(tensor)
    return model


def _is_fake(model: nn.Module) -> bool:
    return any(isinstance(param, FakeTensor) for param in model.parameters())


def _record(job: Job, model: nn.Module, batch: dict[str, torch.Tensor], samples: int, fake: bool) -> Trace:
    recorder = OpRecorder()
    parameters, buffers = recorder.enter_state(model)
    for name, entry in batch.items():
        recorder.value_of(entry, "batch", name)
    model.train()
    with ExitStack() as stack:
        stack.enter_context(reporting_calls(model, recorder, before_own_hooks=True))
        stack.enter_context(recorder)
        attention = stack.enter_context(_AttentionCalls(recorder))
        sized = stack.enter_context(SizedCalls(recorder.running, recorder.known))
        output = job.run_model(model, batch)
        model_stop = len(recorder.ops)
        behind = {name: recorder.value_of(buffer) for name, buffer in model.named_buffers()}
        loss, _ = job.loss_of(output, batch)
    recorder.note_reached(loss)
    return Trace(
        model=model,
        fake=fake,
        samples=samples,
        values=recorder.values,
        ops=recorder.ops,
        calls=recorder.calls,
        parameters=parameters,
        buffers=buffers,
        output=recorder.flat(output),
        result=recorder.as_refs(output),
        loss=recorder.value_of(loss) if isinstance(loss, torch.Tensor) else None,
        model_stop=model_stop,
        attention=attention.found,
        value_reads=recorder.value_reads,
        sized_calls=sized.found,
        constants=recorder.constants,
        buffers_behind=behind,
    )


def modules_by_path(model: nn.Module) -> dict[str, nn.Module]:
    return dict(model.named_modules())

"""Fills the records of `forward.py` from one serial forward of the job's own model.

No engine and no rank takes part. The model is built of fake tensors (shapes without memory); a model whose code
branches on values runs on real ones. So the traffic of a strategy is predicted before the run, independently of
anything the engine reports about itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from shoal.job import Job
from shoal.job.buffers import buffer_modes
from shoal.job.facts import build_without_memory
from shoal.layout.blocks import blocks, units
from shoal.layout.forward import (
    AttentionSeen,
    ExpertShape,
    Flow,
    Forward,
    JobShapes,
    LossSeen,
    ModuleCall,
    NormSeen,
    ParameterShape,
    PieceShape,
    SequenceShape,
    WireShape,
)
from shoal.layout.layout import Layout
from shoal.layout.spatial.foresee import Forecast, reached_by
from shoal.layout.spatial.grid import FULL, Grid
from shoal.layout.tensor.tokens import stream_blocks
from shoal.layout.trace import CannotTrace, faked, reporting_calls
from shoal.layout.wires import Wire

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""Types among a module's results that cannot contain a tensor."""
TYPICAL = 13
"""Batch size of the forward that is scaled to other batch sizes: a prime that is unlikely to divide model sizes."""


class _Watch:
    """Collects the events of a forward."""

    def __init__(self) -> None:
        self.now = 0
        self.calls: list[ModuleCall] = []
        self.attention: list[AttentionSeen] = []
        self.losses: list[LossSeen] = []
        self.norms: list[NormSeen] = []
        self.norm_ends: list[Any] = []
        """Where backward would come to each."""
        self.saved: list[int] = []
        self.open: list[tuple[str, int, tuple[Flow | None, ...]]] = []
        self._known: dict[tuple[int, int], int] = {}
        self._alive: list[torch.Tensor] = []
        self.forecast: Forecast | None = None

    def tick(self) -> int:
        self.now += 1
        return self.now

    def flow(self, tensor: torch.Tensor) -> Flow:
        key = (id(tensor), 0 if tensor.is_inference() else tensor._version)
        if key not in self._known:
            self._known[key] = len(self._known)
            self._alive.append(tensor)  # An id is unique only while its tensor is alive.
        return Flow(
            self._known[key],
            tuple(int(size) for size in tensor.shape),
            tensor.element_size(),
            tensor.is_floating_point(),
            torch.is_grad_enabled() and tensor.requires_grad,
            FULL if self.forecast is None else self.forecast.part(tensor),
        )

    def flows(self, tree: Any) -> tuple[Flow | None, ...]:
        return tuple(self.flow(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in tree_leaves(tree))

    def enter(self, path: str, args: Any, kwargs: Any) -> None:
        self.open.append((path, self.tick(), self.flows((args, kwargs))))

    def leave(self, module: nn.Module, output: Any) -> None:
        path, start, arguments = self.open.pop()
        opaque = any(not isinstance(leaf, (torch.Tensor, *PLAIN)) for leaf in tree_leaves(output))
        fused = isinstance(module, nn.MultiheadAttention)
        self.calls.append(ModuleCall(path, start, self.tick(), arguments, self.flows(output), opaque, fused))

    def settle(self, loss: Any) -> None:
        """Once the loss is known: backward comes only to what it depends on."""
        reached = reached_by(loss)
        for number, (norm, end) in enumerate(zip(self.norms, self.norm_ends, strict=True)):
            if reached and end not in reached:
                self.norms[number] = replace(norm, learns=False)
        if self.forecast is not None:
            self.forecast.settle(loss)

    @property
    def module(self) -> str:
        return self.open[-1][0] if self.open else ""

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.saved.append(self.tick())
        return tensor


class _Functions(TorchFunctionMode):
    """Sees calls of attention, cross entropy and batch norm."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, watch = kwargs or {}, self.watch
        if func is F.scaled_dot_product_attention:
            q, k, v = _named(("query", "key", "value"), args, kwargs)
            watch.attention.append(
                AttentionSeen(watch.tick(), watch.module, watch.flow(q), watch.flow(k), watch.flow(v))
            )
        elif func is F.cross_entropy:
            given, target = _named(("input", "target"), args, kwargs)
            smoothing = args[7] if len(args) > 7 else kwargs.get("label_smoothing", 0.0)
            seen = LossSeen(watch.tick(), watch.flow(target), max(4, given.element_size()), 3 if smoothing else 2)
            watch.losses.append(seen)
        elif getattr(func, "__name__", "") == "batch_norm":
            own = ("running_mean", "running_var", "weight", "bias")  # F.batch_norm's order, and torch.batch_norm's.
            names = own if func is F.batch_norm else (*own[2:], *own[:2])
            given, *around, training = _named(("input", *names, "training"), args, kwargs)
            if training:
                width = torch.promote_types(given.dtype, torch.float32).itemsize
                learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (given, *around))
                of_planes = watch.forecast is not None and watch.forecast.in_norm
                watch.norms.append(NormSeen(watch.module, int(given.shape[1]), width, learns, of_planes))
                result = func(*args, **kwargs)
                watch.norm_ends.append(result.grad_fn)
                return result
        return func(*args, **kwargs)


def _named(names: tuple[str, ...], args: Any, kwargs: Any) -> tuple[Any, ...]:
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return tuple(given.get(name) for name in names)


def observe(
    job: Job,
    batch: Mapping[str, torch.Tensor] | None = None,
    *,
    dtype: torch.dtype | None = None,
    autocast: bool = False,
    real: bool = False,
    around: Callable[[], Any] = nullcontext,
    planes: tuple[int, int] = (1, 1),
) -> Forward:
    """The forward of a batch (by default a few of the job's samples), on fake tensors if the model allows it. `dtype`:
    casts the model first. `real`: never on fakes (libraries call attention differently while they are traced).
    `around`: the context that the model runs in. `planes`: ranks that cut planes, along the height and the width."""
    if batch is None:
        batch = job.train.batch(np.arange(min(TYPICAL, len(job.train))))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        mode = FakeTensorMode(allow_non_fake_inputs=True)

        def on_real(**options: bool) -> Forward:
            model = _as_type(job.model(), dtype, nullcontext())
            with around():
                return _observed(job, model, {k: v.cpu() for k, v in batch.items()}, autocast, planes, **options)

        if not real:
            with suppress(Exception):
                model = _as_type(faked(build_without_memory(job), mode), dtype, mode)
                with mode, around():
                    fakes = {k: mode.from_tensor(v.cpu()) for k, v in batch.items()}
                    return _observed(job, model, fakes, autocast, planes)
        try:
            try:
                return on_real()
            except RuntimeError as error:
                if "saved tensor hooks" not in str(error):
                    raise
                return on_real(saving=False)  # torch.func allows no hooks, so nothing of it is recomputed either.
        except Exception as error:
            raise CannotTrace(f"job {job.name!r}: the model raised on a batch of its data: {error}") from error


@contextmanager
def _norms_of_one_sample() -> Iterator[None]:
    """Lets batch norm accept one sample: a rank's part of a batch may be that small, and ranks share statistics."""
    check = F._verify_batch_size
    F._verify_batch_size = lambda size: None
    try:
        yield
    finally:
        F._verify_batch_size = check


def _as_type(model: nn.Module, dtype: torch.dtype | None, mode: Any) -> nn.Module:
    if dtype is None:
        return model

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex():
            return tensor.to(dtype.to_complex())
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    with mode:
        return model._apply(converted)


def _observed(
    job: Job,
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    autocast: bool,
    planes: tuple[int, int],
    *,
    saving: bool = True,
) -> Forward:
    watch = _Watch()
    if planes != (1, 1):
        watch.forecast = Forecast(Grid(planes), watch.tick, lambda: watch.module)
    model.train()
    precision = torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if autocast else nullcontext()
    with ExitStack() as stack:
        stack.enter_context(reporting_calls(model, watch, before_own_hooks=False))
        stack.enter_context(_Functions(watch))
        if saving:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(watch.pack, lambda kept: kept))
        stack.enter_context(precision)
        stack.enter_context(_norms_of_one_sample())
        if watch.forecast is not None:
            stack.enter_context(watch.forecast)
        output = job.run_model(model, batch)
        if watch.forecast is not None and job.loss_over == "batch":
            output = tree_map(watch.forecast.in_full, output)
        outputs = watch.flows(output)
        if job.loss_over != "batch":  # A loss over the global batch reads the gathered outputs instead.
            loss, _ = job.loss_of(output, batch)
            watch.settle(loss)
    return Forward(
        samples=len(next(iter(batch.values()))),
        calls=tuple(sorted(watch.calls, key=lambda call: call.start)),
        attention=tuple(watch.attention),
        losses=tuple(watch.losses),
        norms=tuple(watch.norms),
        saved=tuple(watch.saved),
        outputs=outputs,
        autocast_itemsize=2 if autocast else 0,
        planes=() if watch.forecast is None else tuple(watch.forecast.events),
    )


def _wire_shape(number: int, wire: Wire) -> WireShape:
    """Where to find a value that crosses the cut before a piece: among its arguments, or the results of a piece."""
    if wire.arguments:
        return WireShape(number, 0, wire.arguments[0], True, wire.learns)
    return WireShape(*wire.results[0], False, wire.learns)


def job_shapes(
    job: Job,
    layout: Layout,
    *,
    stages: tuple[int, ...] = (),
    dtype: torch.dtype | None = None,
    full_parameters: bool = False,
) -> JobShapes:
    """The plain form of a job's parameters and layout, for pipelines of these numbers of stages. `full_parameters`: the
    job's optimiser needs them."""
    model = build_without_memory(job)
    chain = layout.chain
    pieces = (
        ()
        if chain is None
        else tuple(
            PieceShape(
                path=link.path,
                parameters=link.parameters,
                wires=tuple(_wire_shape(number, wire) for wire in link.wires),
            )
            for number, link in enumerate(chain.links)
        )
    )
    context = layout.context
    floats = {name: b for name, b in model.named_buffers() if b.is_floating_point() or b.is_complex()}
    return JobShapes(
        parameters=tuple(_parameters(job, model, dtype)),
        blocks=tuple(path for path, _ in blocks(model)),
        written={} if chain is None else {name: (each.piece, each.own) for name, each in chain.written.items()},
        pieces=pieces,
        stages={num: tuple(layout.stages(num)) for num in stages},
        tensor=layout.tensor,
        stream=stream_blocks(model, layout.tensor) if layout.tensor is not None else (),
        sequence=None
        if context is None
        else SequenceShape(
            length=context.length,
            blocks=context.blocks,
            gathers=context.batch is None,
            views=tuple(context.holders),
            whole_from=context.whole_from,
        ),
        experts=tuple(
            ExpertShape(
                path=layer.path,
                owner=layer.owner,
                count=layer.count,
                stacked=layer.form == "stacked",
                parameters=layer.parameter_names,
                width=layer.width,
                result_width=layer.result_width,
                members=layer.members,
            )
            for layer in (layout.experts.layers if layout.experts is not None else ())
        ),
        synchronised_norms=job.batch_norm == "sync",
        loss_over_batch=job.loss_over == "batch",
        full_parameters=full_parameters,
        buffers=_buffers(job, model),
        floats={name: tuple(b.shape) for name, b in floats.items()},
        complex_floats=any(b.is_complex() for b in floats.values()),
    )


def _parameters(job: Job, model: nn.Module, dtype: torch.dtype | None) -> Iterator[ParameterShape]:
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    paths = [path for path, _ in blocks(model)]
    block_of = {
        name: paths.index(unit.name) if unit.name in paths else -1 for unit in units(model) for name, _ in unit.params
    }
    known: list[Any] = []
    for name, param in model.named_parameters():
        options = job.options(name, param)
        if options not in known:
            known.append(options)
        kept = param.dtype
        if dtype is not None and (kept.is_floating_point or kept.is_complex):
            kept = dtype.to_complex() if kept.is_complex else dtype
        yield ParameterShape(
            names=tuple(names[id(param)]),
            shape=tuple(param.shape),
            itemsize=kept.itemsize,
            dtype=str(kept),
            options=known.index(options),
            block=block_of.get(name, -1),
            trains=param.requires_grad,
        )


def _buffers(job: Job, model: nn.Module) -> dict[str, tuple[int, str]]:
    modes = buffer_modes(job.buffers, model)
    return {
        name: (buffer.numel() * (2 if buffer.is_complex() else 1), modes[name])
        for name, buffer in model.named_buffers()
        if name in modes and buffer.numel()
    }

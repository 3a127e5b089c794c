"""Any model as operators: one forward of a job on fake tensors, each of its operations by its formula (`aten.py`).

What depends on no parameter (masks, positions, the count of targets) is left out, as are numbers that say only which
expert or token: they cost next to nothing. A call of attention is one operator, whatever it is made of, and so is a
log-softmax with the sum over targets behind it.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shoal.analysis.aten import FREE, operator_of
from shoal.analysis.network import Network, NetworkBuilder
from shoal.analysis.operator import Operator
from shoal.analysis.products import AttentionProduct
from shoal.analysis.reductions import Loss, Softmax
from shoal.job import Job, TensorData
from shoal.layout.chain import chain
from shoal.layout.experts.listed import like_members
from shoal.layout.experts.stacked import stacked_count
from shoal.layout.recorded import Op, Trace, Value
from shoal.layout.recorded import TracedAttention as AttentionCall
from shoal.layout.trace import trace


def traced_network(job: Job, *, batch: int | None = None) -> Network:
    """One training step of a job. `batch` is the job's own unless given."""
    if batch is not None and not 1 <= batch <= len(job.train):
        raise ValueError(f"batch {batch}: {job.name} has {len(job.train):,} samples to train on; give 1 to as many")
    return network_of_trace(trace(job, samples=job.global_batch if batch is None else batch), name=job.name)


def module_network(module: nn.Module, *inputs: torch.Tensor) -> Network:
    """A module without a job: forward and backward on these inputs, whose first dimension is the samples, without a
    loss. The module is left as it was.
    """
    names = tuple(f"input{number}" for number in range(len(inputs)))
    job = Job(
        name=type(module).__name__,
        model=lambda: deepcopy(module),
        inputs=names,
        train=TensorData(**dict(zip(names, inputs, strict=True))),
        loss=lambda output, batch: (_first(output).sum(), 1),
        optimizer=partial(torch.optim.SGD, lr=0.0),
        global_batch=len(inputs[0]),
        steps=1,
    )
    recorded = trace(job, samples=len(inputs[0]))
    return network_of_trace(replace(recorded, ops=recorded.ops[: recorded.model_stop]), name=job.name)


def _first(output: Any) -> torch.Tensor:
    return next(leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))


def network_of_trace(recorded: Trace, *, name: str) -> Network:
    """The operations of a recorded forward, loss included, that depend on a parameter."""
    return _Walk(recorded, name).network()


class _Walk:
    """Goes through the operations in order, and remembers which layers made each value."""

    def __init__(self, recorded: Trace, name: str) -> None:
        self.trace = recorded
        self.builder = NetworkBuilder(name=name, batch=recorded.samples, block="")
        self.made_by: dict[int, tuple[int, ...]] = {}
        self.attention = {call.first: call for call in recorded.attention if call.stop > call.first}
        self.pieces = tuple(link.path for link in chain(recorded).links)
        self.experts = _experts(recorded)
        self.containers = {path for path, module in recorded.model.named_modules() if any(module.children())}
        self.views: dict[int, int] = {}
        """A view of a parameter -> the parameter."""
        self.left = {number: recorded.values[number].numel for number in recorded.parameters.values()}
        """Numbers of each parameter that no operator has claimed yet."""

    def network(self) -> Network:
        number = 0
        while number < len(self.trace.ops):
            call = self.attention.get(number)
            if call is not None:
                self._attend(call)
                number = call.stop
            else:
                self._read(self.trace.ops[number])
                number += 1
        notes = [] if self.trace.fake else ["the model looks at values, so it was run on real samples"]
        used = sum(layer.operator.parameters for layer in self.builder.layers)
        every = sum(self.value(number).numel for number in self.left)
        if used != every:
            notes.append(f"{every - used:,} of {every:,} parameters take no part in any operator above")
        return self.builder.network(*notes)

    def value(self, number: int) -> Value:
        return self.trace.values[number]

    def parameter(self, number: int) -> int | None:
        """The parameter that a value is, or is a view of."""
        number = self.views.get(number, number)
        return number if number in self.left else None

    def claim(self, number: int, elements: int) -> int:
        """Tied weights belong to their first reader; of stacked experts each claims its part."""
        weight = self.parameter(number)
        if weight is None:
            return 0
        taken = min(elements, self.left[weight])
        self.left[weight] -= taken
        return taken

    def _attend(self, call: AttentionCall) -> None:
        query, key, value = (self.value(number).shape for number in (call.query, call.key, call.value))
        operator = AttentionProduct(
            samples=prod(query[:-3]),
            heads=query[-3] if len(query) > 2 else 1,
            kv_heads=key[-3] if len(key) > 2 else 1,
            queries=query[-2],
            keys=key[-2],
            head_dim=query[-1],
            value_dim=value[-1],
            causal=call.causal,
        )
        makers = self._makers((call.query, call.key, call.value))
        self._add(call.module, operator, makers, (call.output,), called="attention")

    def _read(self, op: Op) -> None:
        outputs = [self.value(number) for number in op.outputs]
        if not any(output.learned for output in outputs):
            return
        if op.name in FREE or not any(output.dtype.is_floating_point for output in outputs):
            self._pass_on(op)
        elif not (op.name == "nll_loss_forward" and self._close_loss(op)):
            block = "loss" if op.number >= self.trace.model_stop else ""
            operator, makers = operator_of(self, op), self._makers(op.inputs)
            self._add(op.module, operator, makers, op.outputs, block=block, called=op.name)

    def _pass_on(self, op: Op) -> None:
        makers = self._makers(op.inputs)
        weight = self.parameter(op.inputs[0]) if op.inputs else None
        for number in op.outputs:
            self.made_by[number] = makers
            if weight is not None:
                self.views[number] = weight

    def _makers(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(layer for number in numbers for layer in self.made_by.get(number, ())))

    def _add(
        self,
        module: str,
        operator: Operator,
        makers: tuple[int, ...],
        outputs: tuple[int, ...],
        *,
        block: str = "",
        called: str = "",
    ) -> None:
        piece = next((path for path in self.pieces if module == path or module.startswith(f"{path}.")), "")
        # What runs between two pieces (a residual, an activation) belongs to the one before it.
        self.builder.block = block or piece or self.builder.block or (self.pieces[0] if self.pieces else "model")
        experts = next((count for path, count in self.experts.items() if f"{module}.".startswith(f"{path}.")), 0)
        name = module or (block if block else self.builder.block)
        if called and not block and name in self.containers:
            # What a module's own code does between its parts has the operation's name, not the module's.
            name = f"{name}.{called.rstrip('_')}"
        layer = self.builder.add(name, operator, *makers, experts=experts)
        self.made_by.update(dict.fromkeys(outputs, (layer,)))

    def _close_loss(self, op: Op) -> bool:
        """The log-softmax just before it becomes the loss."""
        last = len(self.builder.layers) - 1
        softmax = self.builder.layers[last].operator if last >= 0 else None
        if not isinstance(softmax, Softmax) or self._makers(op.inputs) != (last,):
            return False
        before = self.builder.layers.pop()
        loss = Loss(rows=softmax.rows, width=softmax.width)
        self._add(op.module, loss, before.inputs, op.outputs, block="loss")
        return True


def _experts(recorded: Trace) -> dict[str, int]:
    """Paths of modules that hold experts, and how many: lists that are called so, and stacks of matrices that are
    called with tokens, choices and weights.
    """
    found = {}
    for path, module in recorded.model.named_modules():
        members = like_members(module)
        if members and "expert" in path.rpartition(".")[2].lower():
            found[path] = len(members)
        count = stacked_count(module)
        tensors = (sum(given is not None for given in call.arguments) for call in recorded.calls_of(path))
        if count and any(number >= 3 for number in tensors):
            found[path] = count
    return found

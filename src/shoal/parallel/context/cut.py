"""Context parallelism: the ranks of cp hold the same samples and different positions of each.

The model's code in front of the blocks runs on whole sequences, so positions, rotary tables and masks come out right;
at the first block the stream is cut, and with it what blocks are given for each position. Attention reaches across the
cuts (`attention.py`), the rest of a block need not. Behind the last block the loss is computed on each rank's own
positions, or, if it needs the whole sequence, on the gathered stream, by everyone alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Members
from shoal.parallel.collectives import gather
from shoal.parallel.context.attention import BY_METHOD, positions
from shoal.parallel.recompute import recomputing
from shoal.workload.attention import AttentionCall
from shoal.workload.context import ContextPlan

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class SequenceCut:
    """A model whose sequence is cut; made once, its hooks stay."""

    def __init__(
        self, model: nn.Module, plan: ContextPlan, members: Members, method: str, *, local: Sequence[str]
    ) -> None:
        """`local`: the blocks that this rank runs."""
        self.plan, self.members, self.method = plan, members, method
        self.gathers = plan.batch is None
        self.calls: list[AttentionCall] = []
        """Attention since the last `take`."""
        self.gathered: list[tuple[int, bool]] = []
        """(bytes, whether a gradient comes back) of streams gathered behind the last block, since the last `take`."""
        self._cut: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for path in local:
            block = model.get_submodule(path)
            block.register_forward_pre_hook(partial(self._before, path), with_kwargs=True)
            if self.gathers and path == plan.blocks[-1]:
                block.register_forward_hook(self._after)
        model.forward = partial(self._forward, model.forward)  # type: ignore[method-assign]

    def balanced(self, length: int) -> bool:
        """A causal ring pairs early with late positions. Where that does not come out even, parts are contiguous."""
        return self.method == "ring" and self.plan.causal and length % (2 * self.members.size) == 0

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        n, index = self.members.size, self.members.index
        return positions(length, n, index, balanced=self.balanced(length), device=device)

    def own(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's positions of a tensor."""
        return x.index_select(dim, self.positions(x.shape[dim], x.device))

    def batch(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The batch as the loss reads it: of what it reads position by position, this rank's own."""
        cut = self.plan.batch or {}
        return {name: self.own(entry, cut[name]) if name in cut else entry for name, entry in batch.items()}

    def _forward(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with _Attention(self):
                return forward(*args, **kwargs)
        finally:
            self._cut.clear()

    def _before(self, path: str, block: nn.Module, args: Any, kwargs: Any) -> Any:
        plan = self.plan
        leaves, shape = tree_flatten((args, kwargs))
        stream = leaves[plan.stream]
        if path == plan.blocks[0]:
            leaves[plan.stream] = self.own(stream, plan.dim)
        for leaf, dim in plan.extras.get(path, {}).items():
            leaves[leaf] = self._extra(leaves[leaf], dim)
        if self.method == "ring":
            for leaf in plan.masks.get(path, ()):
                leaves[leaf] = self._extra(leaves[leaf], -2)
        return tree_unflatten(leaves, shape)

    def _extra(self, x: Any, dim: int) -> Any:
        """The rank's positions of something that several blocks are given, cut once."""
        if not isinstance(x, torch.Tensor) or x.shape[dim] == 1:
            return x
        if id(x) not in self._cut:
            self._cut[id(x)] = (x, self.own(x, dim % x.dim()))
        return self._cut[id(x)][1]

    def _after(self, block: nn.Module, args: Any, output: Any) -> Any:
        done = False

        def whole(x: Any) -> Any:
            nonlocal done
            if done or not isinstance(x, torch.Tensor) or x.dim() != 3:
                return x
            done = True
            return self._gather(x)

        return tree_map(whole, output)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        dim, n = self.plan.dim, self.members.size
        length = x.shape[dim] * n
        self.gathered.append((x.numel() * x.element_size() * n, x.requires_grad and torch.is_grad_enabled()))
        together = gather(x, self.members, dim)
        balanced = self.balanced(length)
        order = torch.cat([positions(length, n, i, balanced=balanced, device=x.device) for i in range(n)])
        return together.index_select(dim, order.argsort())

    def attend(self, args: Any, kwargs: Any) -> torch.Tensor:
        given = {**dict(zip(NAMES, args, strict=False)), **kwargs}
        q, k, v = (given.pop(name) for name in NAMES[:3])
        self.calls.append(
            AttentionCall(
                batch=q.shape[0], heads=q.shape[1], kv_heads=k.shape[1], length=q.shape[-2], head_dim=q.shape[-1],
                value_dim=v.shape[-1], itemsize=q.element_size(), trained=torch.is_grad_enabled() and q.requires_grad,
                again=recomputing(), evaluating=BOOK.phase == "evaluate",
            )
        )  # fmt: skip
        if k.shape[1] == 1 and q.shape[1] > 1:
            given["enable_gqa"] = True  # One head of keys for all: plain attention broadcasts it.
        length = q.shape[-2] * self.members.size
        return BY_METHOD[self.method](q, k, v, self.members, balanced=self.balanced(length), **given)

    def take(self) -> tuple[list[AttentionCall], list[tuple[int, bool]]]:
        """What crossed the ranks since the last take."""
        taken = self.calls, self.gathered
        self.calls, self.gathered = [], []
        return taken


class _Attention(TorchFunctionMode):
    """Puts attention across ranks in the place of attention."""

    def __init__(self, cut: SequenceCut) -> None:
        super().__init__()
        self.cut = cut

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self.cut.attend(args, kwargs or {})
        return func(*args, **(kwargs or {}))

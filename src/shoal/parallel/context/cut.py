"""Context parallelism: the ranks of cp hold the same samples and different positions of each.

The model's code in front of the blocks runs on full sequences, so positions, rotary tables and masks come out right;
at the first block the stream is cut, and with it what blocks are given for each position. Attention reaches across the
cuts (`attention.py`), the rest of a block need not. Behind the last block the loss is computed on each rank's own
positions, or, if it needs the full sequence, on the gathered stream, by everyone alike.
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
from shoal.layout.attention import AttentionCall
from shoal.layout.context.plan import ContextPlan, Holder, Places
from shoal.layout.crossings import Crossing
from shoal.layout.cuts import Cut
from shoal.layout.global_view import factors
from shoal.parallel.collectives import gather
from shoal.parallel.context.attention import BY_METHOD, positions
from shoal.parallel.context.attention_call import as_autocast
from shoal.parallel.context.global_view import GlobalView
from shoal.parallel.recompute import recomputing

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
        self.gathered: list[Crossing] = []
        """What was gathered since the last `take`: keys and values of attention written by hand, the stream behind the
        last block."""
        self.gathered_in_views: list[Crossing] = []
        """Those of them that attention written by hand has gathered: its own code decides about these."""
        self.calls_in_views: list[AttentionCall] = []
        """Those of `calls` that modules which write attention out themselves have made."""
        self._programs: dict[Any, Any] = {}
        self._attending = False
        self._cut: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._entered = False
        for path in () if plan.in_root else local:
            block = model.get_submodule(path)
            block.register_forward_pre_hook(partial(self._before, path), with_kwargs=True)
            if self.gathers and path == plan.blocks[-1]:
                block.register_forward_hook(self._after)
        for path, holder in plan.holders.items():
            if path and any(path == block or path.startswith(f"{block}.") for block in local):
                module = model.get_submodule(path)
                module.forward = partial(self._hold, path, holder, module.forward)  # type: ignore[method-assign]
        if plan.in_root:
            model.forward = partial(self._hold_root, plan.holders[""], model.forward)  # type: ignore[method-assign]
            if plan.blocks[0]:
                model.get_submodule(plan.blocks[0]).register_forward_pre_hook(self._enter, with_kwargs=True)
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
            self._entered = False

    def _hold(self, path: str, holder: Holder, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """A module that holds attention written by hand runs as if it had the full sequence."""
        view = GlobalView(self, self.plan.length, self._programs)
        leaves = tree_flatten((args, kwargs))[0]
        for leaf, place in holder.arguments.items():
            if leaf < len(leaves) and isinstance(leaves[leaf], torch.Tensor):
                view.mark(leaves[leaf], self._as_cut(leaves[leaf], place))
        with view:
            output = forward(*args, **kwargs)
        results, shape = tree_flatten(output)
        for leaf, place in holder.results.items():
            x = results[leaf] if leaf < len(results) else None
            if isinstance(x, torch.Tensor) and x not in view.cuts:
                results[leaf] = self._as_part(x, place)
        return tree_unflatten(results, shape)

    def _hold_root(self, holder: Holder, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """The model as a whole runs as if it had the full sequence, from where its arguments or a block's are cut."""
        view = GlobalView(self, self.plan.length, self._programs)
        leaves, shape = tree_flatten((args, kwargs))
        for leaf, (dim, _) in holder.arguments.items():
            leaves[leaf] = self.own(leaves[leaf], dim)
            view.mark(leaves[leaf], Cut(dim, (self.plan.length,)))
        args, kwargs = tree_unflatten(leaves, shape)
        with view:
            output = forward(*args, **kwargs)
        results, shape = tree_flatten(output)
        if self.gathers:
            results = [view.full(x) for x in results]
        for leaf, place in holder.results.items():
            if results[leaf] not in view.cuts:
                results[leaf] = self._as_part(results[leaf], place)
        return tree_unflatten(results, shape)

    def _enter(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Cuts the stream where the first block is called."""
        if self._entered:
            return None
        self._entered = True
        leaves, shape = tree_flatten((args, kwargs))
        part = leaves[self.plan.stream] = self.own(leaves[self.plan.stream], self.plan.dim)
        GlobalView.active[-1].mark(part, Cut(self.plan.dim, (self.plan.length,)))
        return tree_unflatten(leaves, shape)

    def _as_cut(self, x: torch.Tensor, place: Places) -> Cut:
        """How a part is cut, as the full tensor shows it."""
        dim, inner = place
        length = self.plan.length
        own = length // self.members.size * inner
        # With sequence=True the ranks of tp have cut it once more; what they gather is this rank's part again.
        outer = max(1, x.shape[dim] // own)
        return Cut(dim, (length * inner,) * outer)

    def _as_part(self, x: torch.Tensor, place: Places) -> torch.Tensor:
        """A result that the module made for all positions, where one for this rank's own is expected."""
        dim, inner = place
        each = self.plan.length * inner
        outer, left = divmod(x.shape[dim], each)
        return x if left or not outer else self.slice_along(x, Cut(dim, (each,) * outer), self.plan.length)

    def slice_along(self, x: torch.Tensor, cut: Cut, length: int) -> torch.Tensor:
        """This rank's positions of a tensor that has all of them along a dimension (outer, positions, inner)."""
        outer, inner = factors(cut, length)
        if outer == inner == 1:
            return self._own_view(x, cut.dim)
        wide = x.unflatten(cut.dim, (outer, length, inner))
        return self._own_view(wide, cut.dim + 1).flatten(cut.dim, cut.dim + 2)

    def _own_view(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        if self.balanced(x.shape[dim]):
            return self.own(x, dim)
        size = x.shape[dim] // self.members.size
        return x.narrow(dim, self.members.index * size, size)

    def gather_along(self, x: torch.Tensor, cut: Cut, length: int) -> torch.Tensor:
        """All positions of a tensor of which each rank holds its own."""
        outer, inner = factors(cut, length)
        if outer == inner == 1:
            return self._gather(x, cut.dim)
        wide = x.unflatten(cut.dim, (outer, -1, inner))
        return self._gather(wide, cut.dim + 1).flatten(cut.dim, cut.dim + 2)

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

        def gathered(x: Any) -> Any:
            nonlocal done
            if done or not isinstance(x, torch.Tensor) or x.dim() != 3:
                return x
            done = True
            return self._gather(x, self.plan.dim)

        return tree_map(gathered, output)

    def _gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        if x.dtype == torch.bool:
            return self._gather(x.to(torch.uint8), dim).to(torch.bool)
        n = self.members.size
        length = x.shape[dim] * n
        if BOOK.phase != "evaluate":
            learns = x.requires_grad and torch.is_grad_enabled()
            size = x.numel() * x.element_size() * n
            crossing = Crossing(how="gather", whole_bytes=size, gradient=learns, again=recomputing())
            self.gathered.append(crossing)
            if GlobalView.active or self.plan.in_root:
                self.gathered_in_views.append(crossing)
        together = gather(x, self.members, dim)
        balanced = self.balanced(length)
        if not balanced:
            return together
        order = torch.cat([positions(length, n, i, balanced=balanced, device=x.device) for i in range(n)])
        return together.index_select(dim, order.argsort())

    def attend(self, args: Any, kwargs: Any, *, as_called: bool = True) -> torch.Tensor:
        """`as_called`: the model's own code calls the library's attention, so the call is known beforehand."""
        given = {**dict(zip(NAMES, args, strict=False)), **kwargs}
        q, k, v = as_autocast(*(given.pop(name) for name in NAMES[:3]))
        self.calls.append(
            AttentionCall(
                batch=q.shape[0],
                heads=q.shape[1],
                kv_heads=k.shape[1],
                length=q.shape[-2],
                head_dim=q.shape[-1],
                value_dim=v.shape[-1],
                itemsize=q.element_size(),
                trained=torch.is_grad_enabled() and q.requires_grad,
                again=recomputing(),
                evaluating=BOOK.phase == "evaluate",
            )
        )
        if GlobalView.active and not (self.plan.in_root and as_called):
            self.calls_in_views.append(self.calls[-1])
        if k.shape[1] == 1 and q.shape[1] > 1:
            given["enable_gqa"] = True  # One head of keys for all: plain attention broadcasts it.
        length = q.shape[-2] * self.members.size
        self._attending = True
        try:
            return BY_METHOD[self.method](q, k, v, self.members, balanced=self.balanced(length), **given)
        finally:
            self._attending = False

    def take(self) -> tuple[list[AttentionCall], list[Crossing]]:
        """What crossed the ranks since the last take."""
        taken = self.calls, self.gathered
        self.calls, self.gathered, self.gathered_in_views, self.calls_in_views = [], [], [], []
        return taken


class _Attention(TorchFunctionMode):
    """Puts attention across ranks in the place of attention."""

    def __init__(self, cut: SequenceCut) -> None:
        super().__init__()
        self.cut = cut

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and not self.cut._attending:
            return self.cut.attend(args, kwargs or {})
        return func(*args, **(kwargs or {}))

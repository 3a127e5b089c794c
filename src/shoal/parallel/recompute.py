"""Recomputation: a block keeps its input (selectively, also its matrix products) and computes the rest again.

Memory falls, numbers do not change. The block's own hooks stay outside: ZeRO-3 has gathered the block's parameters
by the time it is computed again. What a block's forward changes of its own state is changed once (`forward_state.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shoal.comm.ledger import BOOK
from shoal.layout.blocks import blocks
from shoal.layout.held_state import GENERATORS, StateHolder
from shoal.parallel.forward_state import ForwardState
from shoal.parallel.written_arguments import WrittenArguments

_again = 0


def recomputing() -> bool:
    """Whether the present forward is a repetition inside backward."""
    return _again > 0


def forward_phase() -> str:
    """The phase under which what a forward sends is entered in the ledger."""
    return BOOK.phase if BOOK.phase == "evaluate" else "backward" if recomputing() else "forward"


class _Repeating:
    """Around a repetition inside backward. It may be entered again: backward through backward repeats a block twice."""

    def __init__(self, inner: Any, modes: Sequence[Any]) -> None:
        self._inner, self._modes = inner, modes
        self._stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        global _again
        with ExitStack() as stack:
            # backward() is itself a call that function modes see, and while they see it they are off: what they
            # changed in the first forward they must change in the repetition too.
            for mode in self._modes:
                if mode not in _get_current_function_mode_stack():
                    stack.enter_context(mode)
            stack.enter_context(self._inner)
            self._stacks.append(stack.pop_all())
        _again += 1

    def __exit__(self, *error: Any) -> None:
        global _again
        _again -= 1
        self._stacks.pop().__exit__(*error)


def _kept_products() -> set[Any]:
    """What selective recomputation keeps: results that cost much work for their size."""
    aten = torch.ops.aten
    names = [
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "convolution",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    ]
    return {getattr(aten, name).default for name in names if hasattr(aten, name)}


def _policy(kept: set[Any], context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts(mode: str, kept: set[Any]) -> tuple[Any, Any]:
    modes = list(_get_current_function_mode_stack())
    if mode == "full":
        return nullcontext(), _Repeating(nullcontext(), modes)
    forward, again = create_selective_checkpoint_contexts(partial(_policy, kept))
    return forward, _Repeating(again, modes)


def recompute_blocks(model: nn.Module, mode: str) -> list[str]:
    """Makes every block of the model recompute; returns their names."""
    kept = _kept_products()
    names = []
    _without_cache(model)
    for name, block in blocks(model):
        # Recurrent layers overwrite their own matrix products, so none can be kept for them.
        recurrent = any(isinstance(module, nn.RNNBase) for module in block.modules())
        how = "full" if recurrent else mode
        written = WrittenArguments(name)
        block.forward = partial(_call, name, block, block.forward, how, kept, list(GENERATORS), written)  # type: ignore[method-assign]
        names.append(name)
    return names


def _without_cache(model: nn.Module) -> None:
    """Switches the key-value cache of Hugging Face models off: a block that runs twice would extend it twice."""
    for module in model.modules():
        for held in (getattr(module, "config", None), getattr(module, "generation_config", None)):
            if getattr(held, "use_cache", False) is True:
                held.use_cache = False  # type: ignore[union-attr]


class _ProductsWritten(TorchDispatchMode):
    """Notes whether a block writes into the products that selective recomputation would keep for it."""

    def __init__(self, kept: set[Any]) -> None:
        super().__init__()
        self._kept = kept
        self._results: list[tuple[torch.Tensor, int]] = []
        self.written = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._kept:
            self._results += [(x, x._version) for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.written = any(x._version != version for x, version in self._results)
        self._results = []


_WATCHED = WeakKeyDictionary[nn.Module, _ProductsWritten]()
"""Blocks under selective recomputation -> what their first call showed."""


def _mode_of(block: nn.Module, mode: str, kept: set[Any]) -> tuple[str, Any]:
    """How a block is recomputed now, and what watches it. In its first call everything is computed again; later its
    products are kept, unless it writes into them."""
    if mode == "full":
        return mode, nullcontext()
    if block not in _WATCHED:
        watch = _WATCHED[block] = _ProductsWritten(kept)
        return "full", watch
    return ("full" if _WATCHED[block].written else mode), nullcontext()


def _call(
    name: str,
    block: nn.Module,
    forward: Any,
    mode: str,
    kept: set[Any],
    generators: list[StateHolder],
    written: WrittenArguments,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    state = ForwardState(name, block, generators)
    mode, watch = _mode_of(block, mode, kept)

    def run(*args: Any, **kwargs: Any) -> Any:
        with state.again() if recomputing() else state.first(), nullcontext() if recomputing() else watch:
            return forward(*args, **kwargs)

    repeat = partial(checkpoint, use_reentrant=False, context_fn=partial(_contexts, mode, kept))
    return written.call(repeat, run, args, kwargs)

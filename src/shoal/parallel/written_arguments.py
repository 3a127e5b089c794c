"""A block that writes into what it is given (`ReLU(inplace=True)`, `x += ...`), computed again in backward.

The repetition must start from the arguments as they were, and whoever called the block must see what it wrote. So the
block works on copies, and what it wrote is copied back. Which arguments a block writes into shows in its first call,
for which all are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten


class WritesElsewhere(ValueError):
    """A block writes into an argument that it left alone before."""


class WrittenArguments:
    """Of one block: which of its arguments, laid flat, it writes into."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: set[int] | None = None

    def call(self, repeat: Callable[..., Any], forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`repeat(run, *tensors)` runs and, in backward, repeats `run` on the same tensors."""
        leaves, shape = tree_flatten((args, kwargs))
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        copied = [n for n in places if self._known is None or n in self._known]
        written: set[int] = set()

        def run(*tensors: torch.Tensor) -> Any:
            given = list(leaves)
            for n, tensor in zip(places, tensors, strict=True):
                given[n] = tensor.clone() if n in copied else tensor
            versions = {n: given[n]._version for n in places}
            args, kwargs = tree_unflatten(given, shape)
            output = forward(*args, **kwargs)
            written.update(n for n, version in versions.items() if given[n]._version != version)
            return output, {n: given[n] for n in copied}

        output, after = repeat(run, *(leaves[n].clone() if n in copied else leaves[n] for n in places))
        if not written.issubset(copied):
            raise WritesElsewhere(
                f"recompute: {self._name or 'the model'} writes into an argument that it did not write into when it "
                "was first called, and computing it again in backward needs it as it was; leave recompute out, or let "
                "the block make a new tensor"
            )
        self._known = (self._known or set()) | written
        for n in sorted(written):
            leaves[n].copy_(after[n])
        # A block may give back the very tensor that it was given.
        same = {id(after[n]): leaves[n] for n in copied}
        return tree_map(lambda leaf: same.get(id(leaf), leaf), output)

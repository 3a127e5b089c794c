"""Nothing is dropped: a model whose random masks are turned off, for a check in which a serial run and ranks that hold
parts of the model must compute the same. Dropout modules, rates that modules carry as attributes and calls of the
library's functions are all covered; what else a model draws can be
made the same each time, but not turned off.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from shoal.job.facts import is_dropout_rate

DROPPING = frozenset(
    {
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        torch.dropout,
        torch.dropout_,
        torch.feature_dropout,
        torch.feature_dropout_,
        torch.alpha_dropout,
        torch.alpha_dropout_,
        torch.feature_alpha_dropout,
        torch.feature_alpha_dropout_,
    }
)
"""Functions whose first argument comes back unchanged if nothing is dropped."""
DROPOUT_ARGUMENT = 4
"""The place of `dropout_p` among the arguments of attention."""


def without_dropout(model: nn.Module) -> nn.Module:
    """The model itself, with every rate at 0."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and is_dropout_rate(name, value):
                setattr(module, name, 0.0)
    return model


class Undropped(TorchFunctionMode):
    """While active, the library's functions drop nothing, whatever rate they are given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in DROPPING:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > DROPOUT_ARGUMENT:
                args = (*args[:DROPOUT_ARGUMENT], 0.0, *args[DROPOUT_ARGUMENT + 1 :])
            elif "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


@contextmanager
def drawing_alike(seed: int = 1) -> Iterator[None]:
    """Inside, whatever draws random numbers draws the same each time; what torch draws begins at `seed`."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])

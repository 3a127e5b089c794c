"""Float64 all the way: models that compute some parts in float32 on purpose are kept in float64 during a proof.

Many norms and rotary embeddings cast to float32 inside and back, and models with parameters in half precision cast what
they are given. In a float64 proof that rounding, 1e-7 of each value and more, would hide faults ten thousand times
larger than the tolerance. So a request to make a float64 tensor narrower is answered with float64, in the serial and
in the parallel run alike, and the certificate names the modules that asked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any, ClassVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

NARROWER = (torch.float32, torch.bfloat16, torch.float16)


class KeepFloat64(TorchFunctionMode):
    """While active, nothing narrows float64. `modules` counts the modules that tried to, by class name."""

    _paused: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.modules: dict[str, int] = {}

    @classmethod
    @contextmanager
    def paused(cls) -> Iterator[None]:
        """For code that is not part of the computation: everything is narrowed as it asks."""
        cls._paused += 1
        try:
            yield
        finally:
            cls._paused -= 1

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._paused:
            return func(*args, **kwargs)
        if not any(isinstance(a, torch.Tensor) and a.dtype == torch.float64 for a in args):
            if func is torch.full and kwargs.get("dtype") is None and _too_large(args[1:], kwargs.get("fill_value")):
                kwargs["dtype"] = torch.float64  # The lowest float64, as a mask: float32 has no such number.
            return func(*args, **kwargs)
        if func in (torch.Tensor.float, torch.Tensor.bfloat16, torch.Tensor.half):
            self._note()
            return args[0]
        narrowed = kwargs.get("dtype") in NARROWER or any(a is dtype for a in args for dtype in NARROWER)
        if narrowed and func not in (torch.Tensor.__eq__,):
            self._note()
            args = tuple(torch.float64 if isinstance(a, torch.dtype) and a in NARROWER else a for a in args)
            if kwargs.get("dtype") in NARROWER:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)

    def _note(self) -> None:
        frame = sys._getframe(2)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                name = type(owner).__name__
                self.modules[name] = self.modules.get(name, 0) + 1
                return
            frame = frame.f_back  # type: ignore[assignment]
        self.modules["(outside a module)"] = self.modules.get("(outside a module)", 0) + 1


def to_float64(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in double precision: float64, or complex128 where it is complex; whole numbers stay as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def model_in_float64(model: nn.Module) -> nn.Module:
    """The model itself in double precision. `model.to(torch.float64)` would drop the imaginary parts of complex
    parameters, and with them another model would be proven."""
    return model._apply(to_float64)


def _too_large(args: Sequence[Any], named: Any) -> bool:
    value = args[0] if args else named
    return isinstance(value, float) and isfinite(value) and abs(value) > torch.finfo(torch.float32).max

"""Draws whose distribution depends on values, element by element: Poisson, binomial, gamma and Dirichlet.

PyTorch draws them by rejection from one stream, so an element's number depends on the elements before it. Here each
element has its own sequence, seeded with 64 random bits (splitmix64): any part of a tensor then draws what the full
tensor would. Gamma draws use Marsaglia and Tsang's method (2000), Poisson draws invert the distribution function,
binomial draws count. Gradients of gamma and Dirichlet draws are PyTorch's own, which follow from the drawn value
(implicit reparameterisation).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Draw = Callable[[Sequence[int], torch.device, str], torch.Tensor | torch.Generator]
"""Takes shape, device and kind: "uniform" in [0, 1), "normal", "bits" (64 of them), "order" or "rows of bits" (uniform
numbers and bits, for a tensor that no axis cuts)."""
_aten = torch.ops.aten

ATTEMPTS = 256
"""More than any draw of a gamma variable takes: each attempt succeeds with a probability above 0.95."""


class _Sequences:
    """A sequence of numbers for each element, derived from its 64 bits."""

    def __init__(self, bits: torch.Tensor) -> None:
        self.bits = bits.to(torch.int64).numpy().reshape(-1).view(np.uint64)
        self.at = 0

    def uniform(self, which: np.ndarray | slice = slice(None)) -> np.ndarray:
        """The next number of some elements, in [0, 1)."""
        self.at += 1
        with np.errstate(over="ignore"):
            key = self.bits[which] + np.uint64(self.at) * np.uint64(0x9E3779B97F4A7C15)
            key = (key ^ key >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
            key = (key ^ key >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return ((key ^ key >> np.uint64(31)) >> np.uint64(11)) * 2.0**-53

    def normal(self, which: np.ndarray) -> np.ndarray:
        radius = np.sqrt(-2.0 * np.log1p(-self.uniform(which)))
        return radius * np.cos(2.0 * np.pi * self.uniform(which))  # type: ignore[no-any-return]


def _values(tensor: torch.Tensor, shape: Sequence[int]) -> np.ndarray:
    flat = tensor.detach().double().cpu().expand(tuple(shape)).reshape(-1).numpy()
    return flat.astype(np.float64)


def _log_gamma_draws(shapes: np.ndarray, sequences: _Sequences) -> np.ndarray:
    """Logarithms of gamma variables: with a small shape parameter the variable itself would underflow."""
    with np.errstate(divide="ignore", invalid="ignore"):
        # A variable of shape a < 1 is one of shape a + 1 times a power of a uniform number.
        boost = np.where(shapes < 1, np.log1p(-sequences.uniform()) / shapes, 0.0)
        d = np.where(shapes < 1, shapes + 1, shapes) - 1 / 3
        c = 1 / np.sqrt(9 * d)
        found, left = np.log(d), np.flatnonzero(shapes > 0)
        for _ in range(ATTEMPTS):
            if not len(left):
                break
            x = sequences.normal(left)
            log_v = 3 * np.log1p(c[left] * x)  # NaN where it would be negative, and no comparison holds.
            bound = 0.5 * x * x + d[left] * (1 - np.exp(log_v) + log_v)
            taken = np.log1p(-sequences.uniform(left)) < bound
            found[left[taken]] += log_v[taken]
            left = left[~taken]
        return np.where(shapes > 0, found + boost, -np.inf)


def _gamma(draw: Draw, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    shapes = args[0]
    bits = draw(shapes.shape, shapes.device, "bits")
    if isinstance(bits, torch.Generator):
        return func(shapes, generator=bits)
    drawn = np.exp(_log_gamma_draws(_values(shapes, shapes.shape), _Sequences(bits)))
    return _like(drawn, shapes).clamp_min_(torch.finfo(shapes.dtype).tiny)


def _dirichlet(draw: Draw, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    shapes = args[0]
    bits = draw(shapes.shape, shapes.device, "rows of bits")
    if isinstance(bits, torch.Generator):
        return func(shapes, generator=bits)
    logs = torch.from_numpy(_log_gamma_draws(_values(shapes, shapes.shape), _Sequences(bits))).reshape(shapes.shape)
    return logs.softmax(-1).to(shapes.device, shapes.dtype)


def _poisson(draw: Draw, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    rates = args[0]
    bits = draw(rates.shape, rates.device, "bits")
    if isinstance(bits, torch.Generator):
        return func(rates, generator=bits)
    rate = rates.detach().double().cpu().reshape(-1)
    wanted = torch.from_numpy(_Sequences(bits).uniform())
    low, high = torch.full_like(rate, -1.0), (rate + 12 * rate.sqrt() + 64).ceil()
    while bool((high - low > 1).any()):
        middle = ((low + high) / 2).floor()
        enough = torch.special.gammaincc(middle + 1, rate) > wanted  # The probability of at most `middle`.
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return high.reshape(rates.shape).to(rates.device, rates.dtype)


def _binomial(draw: Draw, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    counts, chances = args[0], args[1]
    shape = torch.broadcast_shapes(counts.shape, chances.shape)
    bits = draw(shape, counts.device, "bits")
    if isinstance(bits, torch.Generator):
        return func(counts, chances, generator=bits)
    num, chance, sequences = _values(counts, shape), _values(chances, shape), _Sequences(bits)
    drawn = np.zeros_like(num)
    for trial in range(int(num.max(initial=0.0))):
        drawn += (sequences.uniform() < chance) & (trial < num)
    return torch.from_numpy(drawn).reshape(shape).to(chances.device, chances.dtype)


def _like(values: np.ndarray, tensor: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).reshape(tensor.shape).to(tensor.device, tensor.dtype)


SEQUENCE_RULES: dict[Any, Callable[[Draw, Any, Sequence[Any], dict[str, Any]], Any]] = {
    _aten._standard_gamma.default: _gamma,
    _aten._sample_dirichlet.default: _dirichlet,
    _aten.poisson.default: _poisson,
    _aten.binomial.default: _binomial,
}

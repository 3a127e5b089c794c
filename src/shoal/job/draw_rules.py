"""What each random operation makes of uniform or normal numbers, and where those come from.

Numbers are drawn by Philox (Salmon et al. 2011), whose 128-bit key is the place and the sample: no state is kept, and
no two keys share a sequence. An operation's result is an element-wise (or row-wise) function of them, so the rule
works on any part of a tensor. A permutation is not element-wise and needs all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from shoal.job.draw_sequences import SEQUENCE_RULES, Draw

UNCUT = {"order": "permutation", "rows of bits": "Dirichlet sample"}
"""Kinds of numbers that need the full tensor -> what is computed from them."""
_aten = torch.ops.aten
_MASK = 0xFFFFFFFFFFFFFFFF


def key_of(*numbers: int) -> int:
    """64 bits that depend on all of the numbers and on their order (splitmix64's finaliser after each)."""
    key = 0x9E3779B97F4A7C15
    for number in numbers:
        key = (key ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        key = (key ^ key >> 27) * 0x94D049BB133111EB & _MASK
        key ^= key >> 31
    return key


DTYPES: dict[str, type[np.generic]] = {"normal": np.float64, "bits": np.int64, "rows of bits": np.int64}
"""Dtype of each kind other than uniform numbers."""


class Numbers:
    """A generator that is seeded anew for every key."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._philox)
        self._state: Any = self._philox.state

    def empty(self, kind: str, shape: Sequence[int]) -> np.ndarray:
        return np.empty(shape, dtype=DTYPES.get(kind, np.float32))

    def fill(self, kind: str, shape: Sequence[int], place: int, who: int) -> np.ndarray:
        values = self.empty(kind, shape)
        self.fill_into(kind, values, place, who)
        return values

    def fill_into(self, kind: str, values: np.ndarray, place: int, who: int) -> None:
        inner: Any = self._state["state"]
        inner["key"][0], inner["key"][1] = place, who
        inner["counter"][:] = 0
        self._state["buffer_pos"], self._state["has_uint32"] = 4, 0
        self._philox.state = self._state
        if kind == "normal":
            self._generator.standard_normal(out=values)
        elif values.dtype == np.int64:
            values[...] = self._philox.random_raw(values.size).view(np.int64).reshape(values.shape)
        else:
            self._generator.random(out=values, dtype=np.float32)


def _keep(draw: Draw, shape: Sequence[int], device: torch.device, keep: Any) -> torch.Tensor:
    """True with probability `keep`, a number or a tensor of them."""
    numbers = draw(shape, device, "uniform")
    if isinstance(numbers, torch.Generator):
        drawn = torch.empty(tuple(shape), dtype=torch.bool, device=device)
        return drawn.bernoulli_(keep, generator=numbers)
    if isinstance(keep, torch.Tensor):
        return numbers.to(device) < keep
    return (numbers < keep).to(device)


def _plain(draw: Draw, shape: Sequence[int], device: torch.device, dtype: torch.dtype, kind: str) -> torch.Tensor:
    numbers = draw(shape, device, kind)
    if isinstance(numbers, torch.Generator):
        drawn = torch.empty(tuple(shape), dtype=dtype, device=device)
        return drawn.normal_(generator=numbers) if kind == "normal" else drawn.uniform_(generator=numbers)
    return numbers.to(device, dtype)


def _given(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments of a call in the order of the operation's schema, with its defaults."""
    named = [(each.name, each.default_value) for each in func._schema.arguments]
    return [args[at] if at < len(args) else kwargs.get(name, usual) for at, (name, usual) in enumerate(named)]


def _bernoulli_(draw: Draw, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    target, keep, _ = _given(func, args, kwargs)
    return target.copy_(_keep(draw, target.shape, target.device, keep))


def _bernoulli(draw: Draw, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    like = args[0]
    keep = args[1] if len(args) > 1 else kwargs.get("p", like)
    return _keep(draw, like.shape, like.device, keep).to(like.dtype)


def _native_dropout(draw: Draw, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, rate, train = (*args, *kwargs.values())[:3]
    if train is False or rate == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = _keep(draw, x.shape, x.device, 1.0 - rate)
    return x * kept * (1.0 / (1.0 - rate) if rate < 1 else 0.0), kept


def _in_place(kind: str, make: Callable[..., torch.Tensor], *, wide: bool = False) -> Any:
    """Fills a tensor with what `make` makes of the numbers and of the operation's own arguments; `wide`: in float64."""

    def rule(draw: Draw, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        target, *values, _generator = _given(func, args, kwargs)
        dtype = torch.float64 if wide else target.dtype
        return target.copy_(make(_plain(draw, target.shape, target.device, dtype, kind), *values))

    return rule


_uniform_ = _in_place("uniform", lambda numbers, low, high: numbers * (high - low) + low)
_normal_ = _in_place("normal", lambda numbers, mean, std: numbers * std + mean)
_log_normal_ = _in_place("normal", lambda numbers, mean, std: (numbers * std + mean).exp_())
_cauchy_ = _in_place(
    "uniform", lambda numbers, median, sigma: ((numbers - 0.5) * torch.pi).tan_() * sigma + median, wide=True
)
_geometric_ = _in_place(
    "uniform",
    lambda numbers, success: (torch.log1p(-numbers) / np.log1p(-min(success, 1 - 1e-12))).ceil_().clamp_min_(1),
    wide=True,
)


def _normal(draw: Draw, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    mean, std, _ = _given(func, args, kwargs)
    tensors = [value for value in (mean, std) if isinstance(value, torch.Tensor)]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    return _plain(draw, shape, tensors[0].device, tensors[0].dtype, "normal") * std + mean


def _normal_of(draw: Draw, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    mean, std, shape = args
    device = torch.device(kwargs.get("device") or "cpu")
    return _plain(draw, shape, device, kwargs.get("dtype") or torch.get_default_dtype(), "normal") * std + mean


def _rrelu(draw: Draw, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, noise, lower, upper, training, _ = _given(func, args, kwargs)
    if not training:
        return func(*args, **kwargs)
    slopes = _plain(draw, x.shape, x.device, x.dtype, "uniform") * (upper - lower) + lower
    noise.copy_(torch.where(x <= 0, slopes, torch.ones((), dtype=x.dtype, device=x.device)))
    return x.mul_(noise) if func is _aten.rrelu_with_noise_.default else x * noise


def _multinomial(draw: Draw, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Inverts the distribution function. Without replacement the weight of a drawn element becomes zero."""
    weights, num, replacement, _ = _given(func, args, kwargs)
    weights, num = weights.double(), int(num)
    numbers = _plain(draw, (*weights.shape[:-1], num), weights.device, torch.float64, "uniform")
    taken = []
    for column in range(num):
        sums = weights.cumsum(-1)
        wanted = numbers[..., column : column + 1] * sums[..., -1:]
        taken.append(torch.searchsorted(sums, wanted, right=True).clamp_max_(weights.shape[-1] - 1))
        if not replacement:
            weights = weights.scatter(-1, taken[-1], 0.0)
    return torch.cat(taken, -1)


def _randperm(draw: Draw, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    device = torch.device(kwargs.get("device") or "cpu")
    numbers = _plain(draw, (int(args[0]),), device, torch.float64, "order")
    return numbers.argsort(stable=True).to(kwargs.get("dtype") or torch.int64)


def _exponential_(draw: Draw, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    target, rate, _ = _given(func, args, kwargs)
    numbers = _plain(draw, target.shape, target.device, torch.promote_types(target.dtype, torch.float32), "uniform")
    # 1 - u is never 0; u may be, and an exponential draw must not (Gumbel noise takes its logarithm).
    least = torch.finfo(target.dtype).tiny
    return target.copy_((-torch.log1p(-numbers) / rate).clamp_min_(least))


def _made(kind: str) -> Any:
    def rule(draw: Draw, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        device = torch.device(kwargs.get("device") or "cpu")
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        return _plain(draw, args[0], device, dtype, kind)

    return rule


def _like(kind: str) -> Any:
    def rule(draw: Draw, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        like = args[0]
        device = torch.device(kwargs.get("device") or like.device)
        return _plain(draw, like.shape, device, kwargs.get("dtype") or like.dtype, kind)

    return rule


def _integers(draw: Draw, shape: Sequence[int], device: torch.device, bounds: Sequence[int]) -> torch.Tensor:
    low, high = (0, bounds[0]) if len(bounds) == 1 else bounds
    numbers = _plain(draw, shape, device, torch.float64, "uniform")
    return (numbers * (high - low)).floor_().clamp_max_(high - low - 1) + low


def _randint(draw: Draw, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    *bounds, shape = args
    device = torch.device(kwargs.get("device") or "cpu")
    return _integers(draw, shape, device, bounds).to(kwargs.get("dtype") or torch.int64)


def _randint_like(draw: Draw, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    like, *bounds = args
    return _integers(draw, like.shape, like.device, bounds).to(kwargs.get("dtype") or like.dtype)


def _random_(draw: Draw, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    target, *bounds = args
    return target.copy_(_integers(draw, target.shape, target.device, bounds))


RULES: dict[Any, Callable[[Draw, Any, Sequence[Any], dict[str, Any]], Any]] = {
    _aten.bernoulli_.float: _bernoulli_,
    _aten.bernoulli_.Tensor: _bernoulli_,
    _aten.bernoulli.default: _bernoulli,
    _aten.bernoulli.p: _bernoulli,
    _aten.bernoulli.Tensor: _bernoulli,
    _aten.native_dropout.default: _native_dropout,
    _aten.uniform_.default: _uniform_,
    _aten.normal_.default: _normal_,
    _aten.exponential_.default: _exponential_,
    _aten.cauchy_.default: _cauchy_,
    _aten.log_normal_.default: _log_normal_,
    _aten.geometric_.default: _geometric_,
    _aten.rrelu_with_noise.default: _rrelu,
    _aten.rrelu_with_noise_.default: _rrelu,
    _aten.multinomial.default: _multinomial,
    _aten.randperm.default: _randperm,
    _aten.randperm.generator: _randperm,
    _aten.normal.float_float: _normal_of,
    _aten.normal.Tensor_float: _normal,
    _aten.normal.float_Tensor: _normal,
    _aten.normal.Tensor_Tensor: _normal,
    _aten.rand.default: _made("uniform"),
    _aten.rand.generator: _made("uniform"),
    _aten.randn.default: _made("normal"),
    _aten.randn.generator: _made("normal"),
    _aten.rand_like.default: _like("uniform"),
    _aten.randn_like.default: _like("normal"),
    _aten.rand_like.generator: _like("uniform"),
    _aten.randn_like.generator: _like("normal"),
    _aten.randint.default: _randint,
    _aten.randint.low: _randint,
    _aten.randint.generator: _randint,
    _aten.randint.low_generator: _randint,
    _aten.randint_like.default: _randint_like,
    _aten.randint_like.low_dtype: _randint_like,
    _aten.random_.to: _random_,
    _aten.random_.__getattr__("from"): _random_,
    **SEQUENCE_RULES,
}
"""Operation -> its rule. Other random operations have none."""

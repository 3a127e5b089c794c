"""Optimiser state other than ranges of a parameter, as JSON: each value is written as [value, kind].

Numbers, text, lists and dicts are in the manifest itself; a tensor (Adafactor's rows, LBFGS's directions) is in the
rank's file under a name, and the manifest has the name. Kinds are checked when they are read: nothing is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal.checkpoint.files import COMPLEX, DTYPES, dtype_name, from_json, to_json

_DTYPES = {dtype_name(dtype): dtype for dtype in DTYPES}
_PLAIN = {"none": type(None), "bool": bool, "str": str}


def cannot_hold(value: Any) -> str | None:
    """Why a checkpoint cannot hold a value; None if it can."""
    if isinstance(value, torch.Tensor):
        known = value.dtype in DTYPES or value.dtype in COMPLEX
        return None if known else f"a tensor of dtype {dtype_name(value.dtype)}"
    if value is None or type(value) in (bool, int, float, str):
        return None
    if type(value) in (list, tuple):
        return next((why for entry in value if (why := cannot_hold(entry))), None)
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return next((why for entry in value.values() if (why := cannot_hold(entry))), None)
    return f"a {type(value).__name__}"


def encode(value: Any, put: Callable[[torch.Tensor], str]) -> list[Any]:
    """[value, kind]; `put` stores a tensor and returns the name under which it can be read."""
    why = cannot_hold(value)
    if why is not None:
        raise ValueError(f"it is {why}, and a checkpoint holds numbers, text, lists, dicts and tensors")
    if isinstance(value, torch.Tensor):
        if value.dim() or value.is_complex():
            return [put(value), "tensor"]
        number = float(value) if value.is_floating_point() else value.item()
        return [to_json(number), dtype_name(value.dtype)]
    if isinstance(value, (list, tuple)):
        return [[encode(entry, put) for entry in value], type(value).__name__]
    if isinstance(value, dict):
        return [[[key, encode(entry, put)] for key, entry in value.items()], "dict"]
    if isinstance(value, (float, int)) and not isinstance(value, bool):
        return [to_json(value), type(value).__name__]
    return [value, "none" if value is None else type(value).__name__]


def is_kind(kind: Any) -> bool:
    """Whether `encode` writes such a kind."""
    return kind in ("int", "float", "tensor", "list", "tuple", "dict") or kind in _PLAIN or kind in _DTYPES


def decode(row: Any, get: Callable[[str], torch.Tensor]) -> Any:
    """The inverse of `encode`. Raises ValueError or TypeError for anything else."""
    value, kind = row
    if kind == "tensor":
        return get(value)
    if kind in ("list", "tuple"):
        entries = [decode(entry, get) for entry in value]
        return entries if kind == "list" else tuple(entries)
    if kind == "dict":
        return {_key(key): decode(entry, get) for key, entry in value}
    if kind in _PLAIN:
        if type(value) is not _PLAIN[kind]:
            raise ValueError(f"{value!r} is not a {kind}")
        return value
    number = from_json(value)
    if isinstance(number, (str, list, dict)) or number is None:
        raise ValueError(f"{value!r} is not a number")
    if kind in ("int", "float"):
        return int(number) if kind == "int" else float(number)
    return torch.tensor(number, dtype=_DTYPES[kind])


def _key(key: Any) -> str | int:
    if type(key) not in (str, int):
        raise ValueError(f"{key!r} is not a key")
    return key  # type: ignore[no-any-return]

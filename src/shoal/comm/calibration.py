"""The calibration file: what `shoal calibrate` measured on this machine, for the jobs that are started on it.

It is TOML and may be edited. [links.inside] and [links.between] say what messages cost, [backend] what carries tensors
in host memory fastest; other tables are for other readers. A file that cannot be right is refused, never half used.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.comm.network import DEFAULT, LinkTimes, Network, agreed

BACKENDS = ("shoal", "gloo")
"""What can carry tensors in host memory. (On GPUs there is nothing to choose: NCCL.)"""
LARGEST_S = {"latency_s": 60.0, "byte_s": 1e-3, "reduce_byte_s": 1e-3}
"""A minute for a message, a kilobyte in a second: whatever is above is a slip of the pen."""


class WrongCalibration(ValueError):
    """A calibration file that cannot be used."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a job needs of the file."""

    network: Network
    backend: str


def calibration_path(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where the file is: SHOAL_CALIBRATION (empty: nowhere, none is used), or in the user's own configuration. None
    where there is no such place."""
    named = environment.get("SHOAL_CALIBRATION")
    if named is not None:
        return Path(named) if named else None
    home = environment.get("HOME")
    configuration = environment.get("XDG_CONFIG_HOME") or (home and f"{home}/.config")
    return Path(configuration) / "shoal" / "calibration.toml" if configuration else None


def read_calibration(path: Path | None = None) -> Calibration | None:
    """What was measured on this machine, or None if nothing was. Raises WrongCalibration."""
    named = path is not None or "SHOAL_CALIBRATION" in os.environ
    path = path or calibration_path()
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, PermissionError) and not named:
            return None  # HOME is another user's, as in many containers; nobody meant a file there.
        raise _wrong(path, f"cannot be read ({error})") from error
    try:
        tables = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise _wrong(path, f"is not TOML ({error})") from error
    backend = _value(tables, ("backend", "fastest"), path)
    if backend not in BACKENDS:
        raise _wrong(path, f"has fastest = {backend!r} in [backend], where {' or '.join(BACKENDS)} was expected")
    return Calibration(Network(_link(tables, "inside", path), _link(tables, "between", path)), backend)


def network_here() -> Network:
    """The links of this process's job; outside a job, the links that one started here would take."""
    here = agreed()
    if here is None:
        found = read_calibration()
        here = found.network if found is not None else DEFAULT
    return here


def _link(tables: dict[str, Any], level: str, path: Path) -> LinkTimes:
    return LinkTimes(**{name: _seconds(tables, ("links", level, name), path) for name in LARGEST_S})


def _seconds(tables: dict[str, Any], keys: tuple[str, ...], path: Path) -> float:
    value, largest = _value(tables, keys, path), LARGEST_S[keys[-1]]
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    # Only reducing may cost nothing: it may be hidden behind the moving of the next bytes.
    if not 0 <= number <= largest or (number == 0 and keys[-1] != "reduce_byte_s"):
        expected = f"seconds above 0 and at most {largest:g}" if keys[-1] != "reduce_byte_s" else f"0 to {largest:g}"
        raise _wrong(path, f"has {keys[-1]} = {value!r} in [{'.'.join(keys[:-1])}], where {expected} was expected")
    return number


def _value(tables: dict[str, Any], keys: tuple[str, ...], path: Path) -> Any:
    found: Any = tables
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    if found is None:
        raise _wrong(path, f"has no {keys[-1]} in [{'.'.join(keys[:-1])}], where one was expected")
    return found


def _wrong(path: Path, what: str) -> WrongCalibration:
    return WrongCalibration(f"the calibration file {path} {what}; delete it, or measure anew with `shoal calibrate`")

"""The calibration file: what `shoal calibrate` measured on this machine, for the jobs that are started on it.

It is TOML and may be edited. [links.inside] and [links.between] hold the cost of messages, [backend] the fastest
backend for tensors in host memory, [machine] the speed of computation. An implausible file
is refused, never partly used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.comm.network import DEFAULT, LinkTimes, NetworkTimes, agreed
from shoal.files.toml import BadFile, read_toml

if TYPE_CHECKING:
    from shoal.files.schema import CalibrationFile, LinkTable

BACKENDS = ("shoal", "gloo")
"""Backends for tensors in host memory. (On GPUs there is no choice: NCCL.)"""


class WrongCalibration(ValueError):
    """A calibration file that cannot be used."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The part of the file that a job needs."""

    network: NetworkTimes
    backend: str


def calibration_path(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The path of the file: SHOAL_CALIBRATION (empty: no file is used), or in the user's configuration folder; None if
    there is no such folder."""
    named = environment.get("SHOAL_CALIBRATION")
    if named is not None:
        return Path(named) if named else None
    home = environment.get("HOME")
    configuration = environment.get("XDG_CONFIG_HOME") or (home and f"{home}/.config")
    return Path(configuration) / "shoal" / "calibration.toml" if configuration else None


def read_calibration_file(path: Path | None = None) -> CalibrationFile | None:
    """All measurements of this machine, or None if there is no file.

    Raises:
        WrongCalibration: The file cannot be read, or is implausible.
    """
    named = path is not None or "SHOAL_CALIBRATION" in os.environ
    path = path or calibration_path()
    if path is None:
        return None
    try:
        values = read_toml(path)
        from shoal.files.schema import CalibrationFile  # pydantic: only where there is a file.
        from shoal.files.table import checked

        return checked(CalibrationFile, values)
    except BadFile as error:
        absent: tuple[type[OSError], ...] = (FileNotFoundError, NotADirectoryError)
        if not named:  # HOME may belong to another user, as in many containers; no file was asked for.
            absent += (PermissionError,)
        if isinstance(error.__cause__, absent):
            return None
        again = "delete it, or measure anew with `shoal calibrate`"
        raise WrongCalibration(f"the calibration file {path}: {error}; {again}") from error


def read_calibration(path: Path | None = None) -> Calibration | None:
    """The measurements of this machine that a job needs, or None if there is no file. Raises WrongCalibration."""
    found = read_calibration_file(path)
    if found is None:
        return None
    return Calibration(NetworkTimes(_link(found.links.inside), _link(found.links.between)), found.backend.fastest)


def network_here() -> NetworkTimes:
    """The links of this process's job; outside a job, those that a job started here would use."""
    here = agreed()
    if here is None:
        found = read_calibration()
        here = found.network if found is not None else DEFAULT
    return here


def _link(table: LinkTable) -> LinkTimes:
    return LinkTimes(table.latency_s, table.byte_s, table.reduce_byte_s)

"""Options from text and files: `--set lr=3e-4`, `--config job.toml`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shoal.common.suggest import did_you_mean
from shoal.files.toml import BadFile, read_toml
from shoal.runtime.options import WrongOption


def parse_settings(texts: list[str] | None) -> dict[str, Any] | None:
    """The settings of `--set name=value`; a value is JSON, or text."""
    found: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise WrongOption(f"--set {text}: expected NAME=VALUE, such as --set lr=3e-4")
        try:
            found[name.strip()] = json.loads(value)
        except ValueError:
            found[name.strip()] = value.strip()
    return found or None


def read_config(path: str | Path, known: Iterable[str]) -> dict[str, Any]:
    """The options of a TOML file, by the names of the command line with _ for -; [set] is a table of settings.

    Args:
        path: The file.
        known: The options that there are.

    Raises:
        WrongOption: The file cannot be read, or has an option that does not exist.
    """
    try:
        table = read_toml(path)
    except BadFile as error:
        raise WrongOption(f"--config {path}: {error}") from None
    found = {name.replace("-", "_"): value for name, value in table.items()}
    options = sorted(set(known) - {"config"})
    for name, value in found.items():
        if name not in options:
            raise WrongOption(
                f"--config {path}: no option {name!r}{did_you_mean(name, options)}; there are {', '.join(options)}"
            )
        if isinstance(value, Mapping) != (name == "set"):
            raise WrongOption(f"--config {path}: {name} is {value!r}; only [set] is a table")
    return found

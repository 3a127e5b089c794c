"""What ranks run in the tests of comparisons: several contestants in one start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compare import unfair
from shoal.compare import rank as rank_
from shoal.compare.adapters import adapters
from shoal.launch.join import join


def contestants(settings: dict[str, Any], channel: Any) -> dict[str, Any]:
    """The facts of each contestant, trained one after the other by ranks that have joined once."""
    adapters().update(unfair.ADAPTERS)
    join(backend="gloo")
    found, kept = {}, rank_.leave
    rank_.leave = lambda: None
    try:
        for name in settings["names"]:
            place = str(Path(settings["folder"]) / name)
            found[name] = rank_.run_framework({**settings, "contestant": name, "folder": place}, channel)
    finally:
        rank_.leave = kept
    return found

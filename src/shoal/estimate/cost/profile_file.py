"""A profile as a TOML file: what `shoal calibrate --from` writes, and `--profile FILE.toml` reads."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path

from shoal.estimate.cost.profile import Profile
from shoal.estimate.cost.profiles import PROFILES


class BadProfile(ValueError):
    """A profile that cannot be read, in one sentence."""


def profile_toml(profile: Profile, *, origin: str) -> str:
    """All of its numbers."""
    lines = [f"# {origin}", f'name = "{profile.name}"']
    lines += [f"{field.name} = {getattr(profile, field.name):.6g}" for field in fields(Profile) if field.name != "name"]
    return "\n".join(lines) + "\n"


def read_profile(name: str) -> Profile:
    """A known profile by its name, or one from a file; what a file leaves out is a good framework's."""
    if not name.endswith(".toml"):
        if name not in PROFILES:
            raise BadProfile(f"no profile is called {name!r}; known are {', '.join(PROFILES)}, or give a TOML file")
        return PROFILES[name]
    try:
        values = tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadProfile(f"the profile {name} cannot be read: {error}") from error
    known = {field.name for field in fields(Profile)}
    for key, value in values.items():
        if key not in known:
            raise BadProfile(f"the profile {name} has {key!r}; expected some of {', '.join(sorted(known))}")
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
        if not (isinstance(value, str) if key == "name" else number):
            raise BadProfile(f"the profile {name} has {key} = {value!r}; expected a number of at least 0")
    return Profile(**values)

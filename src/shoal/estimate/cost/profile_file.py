"""A profile as a TOML file: what `shoal calibrate --from` writes, and `--profile FILE.toml` reads."""

from __future__ import annotations

from dataclasses import asdict, fields
from functools import cache
from typing import TYPE_CHECKING

from shoal.common.suggest import did_you_mean
from shoal.estimate.cost.profile import Profile
from shoal.estimate.cost.profiles import PROFILES
from shoal.files.toml import BadFile, read_toml, toml_text

if TYPE_CHECKING:
    from shoal.files.table import Table


class BadProfile(ValueError):
    """A profile that cannot be read, in one sentence."""


@cache
def profile_schema() -> type[Table]:
    """The fields of a `Profile`; what a file leaves out is a good framework's."""
    from shoal.files.table import table_of_numbers

    return table_of_numbers("ProfileFile", [field.name for field in fields(Profile) if field.name != "name"])


def profile_toml(profile: Profile, *, origin: str) -> str:
    """All of its numbers."""
    return toml_text(profile_schema()(**asdict(profile)), heading=origin)


def read_profile(name: str) -> Profile:
    """A known profile by its name, or one from a file."""
    if not name.endswith(".toml"):
        if name not in PROFILES:
            near = did_you_mean(name, PROFILES)
            raise BadProfile(
                f"no profile is called {name!r}{near}; known are {', '.join(PROFILES)}, or give a TOML file"
            )
        return PROFILES[name]
    try:
        values = read_toml(name)
        from shoal.files.table import checked

        return Profile(**checked(profile_schema(), values).model_dump(exclude_none=True))
    except BadFile as error:
        raise BadProfile(f"the profile {name}: {error}") from error

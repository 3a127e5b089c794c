"""The secret that makes processes ranks of one job: SHOAL_TOKEN, or a private file where all ranks are on one host.

Keys for the store and for links are derived from it. Launchers of Shoal's own draw a token for each job. Under torchrun
on one host, ranks of one user share a file that no other user can read. Between hosts there is no such place, so a
token must be given.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

TOKEN_BYTES = 32
FILE = "token"


class TokenMissing(ValueError):
    """Ranks on several hosts were started without a secret that they share."""


def job_token(environment: Mapping[str, str] = os.environ) -> bytes:
    """The job's secret as this process holds it. Raises TokenMissing."""
    given = environment.get("SHOAL_TOKEN", "")
    if given:
        return given.encode(errors="surrogateescape")
    if not on_one_host(environment):
        raise TokenMissing(
            f"SHOAL_TOKEN is not set, and MASTER_ADDR is {environment.get('MASTER_ADDR')!r}: without a token any "
            "process that reaches that address could join as a rank. Set SHOAL_TOKEN to the same secret on every "
            "host, for example the output of `openssl rand -hex 16`."
        )
    return _users_token(environment)


def derive(key: bytes, *names: str) -> bytes:
    """A key for one purpose; it reveals nothing about the others."""
    return hmac.digest(key, "\0".join(names).encode(errors="surrogateescape"), "sha256")


def on_one_host(environment: Mapping[str, str]) -> bool:
    """Whether all ranks are surely on this host."""
    world, here = environment.get("WORLD_SIZE"), environment.get("LOCAL_WORLD_SIZE")
    if environment.get("SHOAL_RENDEZVOUS") or (world and world == here):
        return True
    return is_loopback(environment.get("MASTER_ADDR", ""))


def is_loopback(address: str) -> bool:
    """Whether an address leads to this host only; none at all means that no network is used."""
    if address in ("", "localhost"):
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def token_file(environment: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_CACHE_HOME/shoal/token`, by default below `~/.cache`."""
    given = environment.get("XDG_CACHE_HOME", "")
    folder = Path(given) if os.path.isabs(given) else Path(os.path.expanduser("~")) / ".cache"
    return folder / "shoal" / FILE


def _users_token(environment: Mapping[str, str]) -> bytes:
    path = token_file(environment)
    way_out = "Remove it, or set SHOAL_TOKEN to the same secret on every rank"
    try:
        if not os.path.lexists(path):
            _make(path)
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise TokenMissing(
            f"SHOAL_TOKEN is not set, and {path}, which would hold a secret of this user, cannot be used: "
            f"{error.strerror or error}. {way_out}."
        ) from error
    with open(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
            raise TokenMissing(
                f"SHOAL_TOKEN is not set, and {path} is not a regular file that only this user may read. {way_out}."
            )
        found = file.read(2 * TOKEN_BYTES + 1)
    if len(found) != 2 * TOKEN_BYTES:
        raise TokenMissing(f"SHOAL_TOKEN is not set, and {path} does not hold a secret of Shoal's. {way_out}.")
    return found


def _make(path: Path) -> None:
    """Written under another name and linked into place: of ranks that start at once, one wins and all read the same."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f"{FILE}-")  # Of mode 0600.
    try:
        with open(handle, "wb") as file:
            file.write(secrets.token_hex(TOKEN_BYTES).encode())
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    finally:
        os.unlink(aside)

"""What has been checked on this machine: a small file in the user's cache folder, so that a check is made once.

A key names a model, its code and a strategy (`verify/fingerprint.py`); an entry holds what was found, and a code that
only the holder of the user's secret can compute (HMAC; the secret lies in the same folder, readable by the user alone).
An entry from elsewhere, or written by hand, counts for nothing. Whatever is wrong with the files (missing, torn, no
regular files, not writable) costs another check and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

MOST_ENTRIES = 2000
"""The oldest make room for the newest."""
MOST_BYTES = 16 << 20
"""A larger file is not one of ours."""
SECRET_BYTES = 32


def proven_file() -> Path:
    """`$XDG_CACHE_HOME/shoal/proven.json`, by default below `~/.cache`."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The standard asks for relative paths to be ignored.
    folder = Path(given) if os.path.isabs(given) else Path(os.path.expanduser("~")) / ".cache"
    return folder / "shoal" / "proven.json"


def secret_file() -> Path:
    """The secret with which entries are signed, next to the file of entries."""
    return proven_file().with_name("proven.key")


def is_proven(key: str) -> bool:
    """Whether this user's Shoal has entered the key."""
    return key in _entries(_secret())


def said(key: str) -> list[dict[str, Any]]:
    """The messages for the user that were entered with the key: they hold in every run."""
    listed = _entries(_secret()).get(key, {}).get("messages", [])
    return [row for row in listed if isinstance(row, dict)]


def remember(key: str, **facts: Any) -> None:
    """Enters a key with what a person may want to know of it. JSON values only."""
    with contextlib.suppress(OSError):
        proven_file().parent.mkdir(parents=True, exist_ok=True)
    secret = _secret() or _new_secret()
    if not secret:
        return
    entries = _entries(secret)
    entries.pop(key, None)
    entry = {**facts, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    entries[key] = {**entry, "code": _code(secret, key, entry)}
    kept = dict(list(entries.items())[-MOST_ENTRIES:])
    with contextlib.suppress(OSError):
        _put(proven_file(), json.dumps({"proven": kept}, indent=1).encode())


def _code(secret: bytes, key: str, entry: dict[str, Any]) -> str:
    text = json.dumps([key, entry], sort_keys=True)
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def _entries(secret: bytes) -> dict[str, Any]:
    """The entries that were signed with the secret."""
    found = _read(proven_file(), private=False)
    if not secret or found is None:
        return {}
    try:
        listed = json.loads(found)["proven"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    valid: dict[str, Any] = {}
    for key, entry in listed.items() if isinstance(listed, dict) else ():
        code = entry.get("code") if isinstance(entry, dict) else None
        if isinstance(code, str) and code.isascii():
            rest = {name: value for name, value in entry.items() if name != "code"}
            if hmac.compare_digest(code, _code(secret, key, rest)):
                valid[key] = entry
    return valid


def _secret() -> bytes:
    """The user's secret, or nothing."""
    found = _read(secret_file(), private=True)
    return found if found is not None and len(found) == SECRET_BYTES else b""


def _new_secret() -> bytes:
    """A new secret in place of none or of a file that cannot be one; nothing if it cannot be written."""
    secret = secrets.token_bytes(SECRET_BYTES)
    try:
        _put(secret_file(), secret)
    except OSError:
        return b""
    # Of two processes that write one at the same time the later wins; the other's entry is checked again.
    return _secret()


def _read(path: Path, *, private: bool) -> bytes | None:
    """A regular file's content; with `private`, only if the user owns it and no one else may read or write it."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > MOST_BYTES:
            return None
        if private and (facts.st_uid != os.getuid() or facts.st_mode & 0o077):
            return None
        with open(handle, "rb", closefd=False) as file:
            return file.read(MOST_BYTES)
    except OSError:
        return None
    finally:
        os.close(handle)


def _put(path: Path, content: bytes) -> None:
    """Written to a temporary file and moved into place: another process reads the old content or the new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix="proven-")  # Readable by the user alone.
    try:
        with open(handle, "wb") as out:
            out.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise

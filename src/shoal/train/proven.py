"""What has been proven on this machine: a small file in the user's cache folder, so that a layout is checked once.

A key names a model, its code and a strategy (`verify/fingerprint.py`); an entry says what was found. Whatever is wrong
with the file (it is missing, torn, or cannot be written) costs another check and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

MOST_ENTRIES = 2000
"""The oldest make room for the newest."""


def proven_file() -> Path:
    """`$XDG_CACHE_HOME/shoal/proven.json`, by default below `~/.cache`."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The standard asks for relative paths to be ignored.
    folder = Path(given) if os.path.isabs(given) else Path(os.path.expanduser("~")) / ".cache"
    return folder / "shoal" / "proven.json"


def is_proven(key: str) -> bool:
    return key in _entries()


def remember(key: str, **facts: Any) -> None:
    """Enters a key with what a person may want to know of it. JSON values only."""
    entries = _entries()
    entries.pop(key, None)
    entries[key] = {**facts, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    kept = dict(list(entries.items())[-MOST_ENTRIES:])
    file = proven_file()
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        # Written aside and moved into place: another process reads the old file or the new one.
        handle, aside = tempfile.mkstemp(dir=file.parent, prefix="proven-", suffix=".json")
        try:
            with open(handle, "w", encoding="utf-8") as out:
                json.dump({"proven": kept}, out, indent=1)
            os.replace(aside, file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(aside)
            raise


def _entries() -> dict[str, Any]:
    try:
        found = json.loads(proven_file().read_text(encoding="utf-8"))["proven"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}

"""What the verbs share in what they print and write: JSON or text for people, files that options name, strategies."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shoal.api.drawable import MOST_BOXES, CannotDraw, require_drawable

__all__ = [
    "MOST_BOXES",
    "CannotDraw",
    "echoed",
    "emitter",
    "print_json",
    "require_drawable",
    "short",
    "write_file",
    "write_picture",
]


@contextlib.contextmanager
def emitter(show: Callable[[Any], None], *, as_json: bool) -> Iterator[Callable[[Any], None]]:
    """What prints a report: `show`, for people. With `as_json` standard output is for one JSON object, and what a job
    or a library prints there goes to standard error."""
    if not as_json:
        yield show
        return
    from shoal.training.record.run import plain

    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)

    def emit(outcome: dict[str, Any]) -> None:
        sys.stdout.flush()
        os.dup2(kept, 1)
        print(json.dumps(plain(outcome), allow_nan=False), flush=True)

    try:
        yield emit
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def print_json(report: dict[str, Any]) -> None:
    """For people who read JSON, where nothing else prints."""
    print(json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False))


def write_file(text: str, path: str | Path, *, option: str) -> None:
    """Writes the file that an option names."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CannotDraw(f"{option} {str(path)!r}: {reason}; name a file that can be written") from None


def write_picture(svg: str, path: str, *, option: str) -> None:
    """Writes a picture to the file that an option names."""
    suffix = Path(path).suffix
    if suffix.lower() not in ("", ".svg"):
        raise CannotDraw(f"{option} {path!r}: pictures are drawn as SVG, not as {suffix}; name a .svg file")
    write_file(svg, path, option=option)


def short(number: float, unit: str = "") -> str:
    """Three digits and a unit."""
    for prefix, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}".rstrip()


def echoed(strategy: object, typed: str | None) -> str:
    """A strategy as it was understood, and as it was typed where the two read differently: `dp(2)` for "dp(2)";
    `dp(2)  (typed: dp(2, zero=0))` for "dp(2, zero=0)"."""

    def plain(text: str) -> str:
        return "".join(text.split()).replace("'", '"')

    text = str(strategy)
    if typed is None or plain(typed) == plain(text):
        return text
    return f"{text}  (typed: {' '.join(typed.split())})"

"""Reads a TOML file into plain tables, and writes the tables of a schema with their units as comments.

What a table may hold is the schema's (`shoal.files.schema`); this file needs no pydantic, so that a process which finds
no file never imports it.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Any

NO_NOTES: Mapping[str, str] = {}


class BadFile(ValueError):
    """A file that cannot be used, in one sentence whose subject is the file: "it has no level; give ..."."""


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a file.

    Raises:
        BadFile: It cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadFile(f"it cannot be read ({error.strerror or error}); name a file that can") from error
    except (ValueError, RecursionError) as error:  # No UTF-8, no TOML, an integer of too many digits, too deep.
        reason = " ".join(str(error).split())
        raise BadFile(f"it is not TOML ({reason}); correct it") from error


def toml_text(table: Any, *, heading: str = "", notes: Mapping[str, str] = NO_NOTES) -> str:
    """A table of the schema as the text of a file, to the last bit of every number.

    Args:
        table: An instance of `shoal.files.schema.Table`.
        heading: Lines of comment at the top.
        notes: By path ("links.inside"), the comment instead of the description that the schema has for it.
    """
    lines = [*_comment(heading), *_lines(table, "", notes)]
    # No text holds a line break as it is: two blank lines are where a table of tables begins.
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"


def _lines(table: Any, path: str, notes: Mapping[str, str]) -> Iterator[str]:
    """What a table holds: numbers and texts first, since whatever follows the head of a table belongs to that one."""
    tables = []
    for key, value, description in _items(table):
        at = f"{path}.{_key(key)}" if path else _key(key)
        comment = notes.get(at, description)
        if _is_table(value) or (isinstance(value, list) and value and _is_table(value[0])):
            tables.append((at, value, comment))
        else:
            yield f"{_key(key)} = {_literal(value)}" + (f"  # {comment}" if comment else "")
    for at, value, comment in tables:
        yield from ("", *_comment(comment))
        for each in value if isinstance(value, list) else [value]:
            held = [held for _, held, _ in _items(each)]
            if isinstance(value, list):
                yield f"[[{at}]]"
            elif not held or not all(map(_is_table, held)):
                yield f"[{at}]"
            yield from _lines(each, at, notes)


def _items(table: Any) -> Iterator[tuple[str, Any, str]]:
    """(key, value, description) of all that is given."""
    if isinstance(table, Mapping):
        yield from ((key, value, "") for key, value in table.items())
        return
    for name, field in type(table).model_fields.items():
        if (value := getattr(table, name)) is not None:
            yield name, value, field.description or ""


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or hasattr(type(value), "model_fields")


def _comment(text: str) -> list[str]:
    return [f"# {line}".rstrip() for line in text.splitlines()]


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _literal(key)


def _literal(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float():
            # The fewest digits that are this number again: 1e+11 rather than 100000000000.0.
            text = next(text for digits in range(1, 18) if float(text := f"{value:.{digits}g}") == value)
            return text if set(text) & set(".en") else f"{text}.0"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case datetime() | date():
            return value.isoformat()
        case list():
            return f"[{', '.join(map(_literal, value))}]"
    return str(value)

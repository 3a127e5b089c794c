"""The reference of `docs/api.md`, made from signatures and docstrings: `python -m shoal.api.reference` prints it, and
`--write docs/api.md` puts it into the page. A test holds the page to it.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import shoal

MARK = "<!-- What follows is made by `python -m shoal.api.reference --write docs/api.md`. -->"
SECTION = re.compile(r"^(Args|Returns|Raises|Example):\s*$", re.MULTILINE)
SAME = {"train_job": "train"}
"""Names that are another name of the same function."""


def reference() -> str:
    """The generated part of the page."""
    names = [name for name in shoal.__all__ if name not in shoal.strategy.__all__ and name not in shoal.REGISTRY]
    found = {name: _found(name) for name in names}
    parts = [MARK, "", "## Functions", ""]
    for name, each in found.items():
        if not inspect.isclass(each):
            parts += _function(name, each)
    parts += ["## Classes", ""]
    for name, each in found.items():
        if inspect.isclass(each):
            parts += _class(name, each)
    return "\n".join(parts).rstrip() + "\n"


def _found(name: str) -> Any:
    """What a public name stands for; a room of the same name, once imported, would hide a function."""
    place = shoal._LATER.get(name)
    if place is None:
        return getattr(shoal, name)
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)


def _function(name: str, function: Any) -> list[str]:
    if name in SAME:
        return [f"### `shoal.{name}`", "", f"The same as `shoal.{SAME[name]}`.", ""]
    text = _sections(inspect.getdoc(function) or "")
    lines = [f"### `shoal.{name}`", "", text[""], "", "```text", _signature(name, function), "```", ""]
    if "Args" in text:
        lines += ["| argument | meaning |", "|---|---|"]
        lines += [f"| `{arg}` | {_cell(meaning)} |" for arg, meaning in _entries(text["Args"])] + [""]
    if "Returns" in text:
        lines += [f"**Returns** {' '.join(text['Returns'].split())}", ""]
    for error, meaning in _entries(text.get("Raises", "")):
        lines += [f"**Raises** `{error}`: {meaning}", ""]
    if "Example" in text:
        lines += ["```python", text["Example"], "```", ""]
    return lines


def _class(name: str, cls: Any) -> list[str]:
    text = _sections(inspect.getdoc(cls) or "")
    lines = [f"### `shoal.{name}`", "", text[""], ""]
    documented: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("shoal"):
            documented |= _field_docs(base)
    if is_dataclass(cls):
        public = [each for each in fields(cls) if not each.name.startswith("_") and "set by" not in each.metadata]
        lines += ["| field | default | meaning |", "|---|---|---|"]
        for each in public:
            required = each.default is MISSING and each.default_factory is MISSING
            cells = "required" if required else _default(each.default), _cell(documented.get(each.name, ""))
            lines.append(f"| `{each.name}: {_cell(_type(each.type))}` | {cells[0]} | {cells[1]} |")
        lines.append("")
    methods = [
        (key, value)
        for key, value in inspect.getmembers(cls, inspect.isfunction)
        if not key.startswith("_") and value.__module__.startswith("shoal") and value.__doc__
    ]
    if methods:
        lines += ["| method | meaning |", "|---|---|"]
        for key, value in methods:
            lines.append(f"| `{key}{_cell(_arguments(value))}` | {_cell(_sections(inspect.getdoc(value) or '')[''])} |")
        lines.append("")
    return lines


def _sections(text: str) -> dict[str, str]:
    """A Google-style docstring by its sections; what stands before them is ""."""
    parts = SECTION.split(text)
    found = {"": parts[0].strip().replace("\n\n", "<br>").replace("\n", " ").replace("<br>", "\n\n")}
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        found[name] = textwrap.dedent(body.strip("\n")).rstrip()
    return found


def _entries(text: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for line in text.splitlines():
        if line and not line.startswith(" "):
            name, _, meaning = line.partition(":")
            found.append((name.strip(), meaning.strip()))
        elif found and line.strip():
            found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}")
    return found


def _signature(name: str, function: Any) -> str:
    given = []
    seen_star = False
    for each in inspect.signature(function).parameters.values():
        if each.kind is each.KEYWORD_ONLY and not seen_star:
            given.append("*")
            seen_star = True
        mark = "**" if each.kind is each.VAR_KEYWORD else ""
        default = "" if each.default is each.empty else f" = {_default(each.default).strip('`')}"
        given.append(f"{mark}{each.name}: {_type(each.annotation)}{default}")
    one = f"shoal.{name}({', '.join(given)})"
    return one if len(one) <= 100 else f"shoal.{name}(\n" + "".join(f"    {part},\n" for part in given) + ")"


def _arguments(function: Any) -> str:
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    return f"({', '.join(names)})"


def _type(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _default(value: Any) -> str:
    if value is MISSING:
        return "empty"
    if callable(value):
        name = getattr(value, "__name__", "function")
        return f"`{'function' if name == '<lambda>' else name}`"
    return f"`{value!r}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _field_docs(cls: Any) -> dict[str, str]:
    """The docstrings below the fields of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    found = {}
    for field, after in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            text = getattr(after.value, "value", None)
            if isinstance(text, str):
                found[field.target.id] = text
    return found


def written(page: str) -> str:
    """The page with its generated part made anew."""
    return page.partition(MARK)[0].rstrip() + "\n\n" + reference()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        path = Path(sys.argv[2])
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(reference())

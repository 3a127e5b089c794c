"""A page that works offline: a template over the one of all pages, their style, data as JSON, and a script that draws.

All text goes through Jinja2 with escaping; the data are in a block of their own, in which no tag can end early.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COMMON = Path(__file__).with_name("page")


def render_page(folder: Path, name: str, data: Any, **words: Any) -> str:
    """The page of the template `name`.html.j2 and the script `name`.js in a folder.

    Args:
        folder: Where both are.
        name: Of both.
        data: Plain values, without NaN, which the script reads as DATA.
        words: What the template shows, `title` and `subtitle` among them.
    """
    import jinja2
    from markupsafe import Markup

    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, COMMON]), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    text = json.dumps(data, allow_nan=False)
    scripts = [(COMMON / "page.js"), (folder / f"{name}.js")]
    return templates.get_template(f"{name}.html.j2").render(
        **words, style=Markup((COMMON / "page.css").read_text(encoding="utf-8")),
        script=Markup("\n".join(each.read_text(encoding="utf-8") for each in scripts)),
        # Markup in the data stays data: no "<" is left in it.
        data=Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")),
    )  # fmt: skip

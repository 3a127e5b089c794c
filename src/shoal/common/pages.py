"""Pages of Shoal: one look, one way to draw, everything in one file that works offline.

A page is a Jinja2 template that extends `page/base.html.j2`. All text is escaped; data are JSON in a block of their
own, in which no tag can end early. Plots are drawn by `page/plots.js` as SVG, for the width that there is: a plotting
library would be 3 MB in every page, several times what a page may weigh.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHARED = Path(__file__).with_name("page")


def render(
    template: Path, *, data: Any, script: Path, title: str, subtitle: str, style: Path | None = None, **values: Any
) -> str:
    """The page.

    Args:
        template: Its template.
        data: What the script draws, as strict JSON values.
        script: Draws it; `plots.js` comes before.
        title: Of the page.
        subtitle: A line below it.
        style: What the page adds to the look that all share.
        values: For the template.
    """
    from markupsafe import Markup

    text = json.dumps(data, allow_nan=False)
    styles = [SHARED / "look.css", *([style] if style is not None else [])]
    return rendered(
        template.name,
        template.parent,
        title=title,
        subtitle=subtitle,
        **values,
        style=Markup("".join(path.read_text(encoding="utf-8") for path in styles)),
        scripts=[Markup(path.read_text(encoding="utf-8")) for path in (SHARED / "plots.js", script)],
        # Markup in the data stays data: no "<" is left in it.
        data=Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")),
    )


def rendered(name: str, *folders: Path, **values: Any) -> str:
    """A template of one of the folders, or of those that all pages share. All text is escaped."""
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, SHARED]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return templates.get_template(name).render(**values)

"""A small writer of SVG: boxes, words and arrows that remember how much room they take, so that a picture is as large
as what is in it. The output is plain text without references to anything outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

INK, SOFT, FAINT, PAPER = "#1c1e21", "#444950", "#c3c7cc", "#ffffff"
FONT = "font-family='system-ui, Helvetica, Arial, sans-serif'"
RANK_COLOURS = ("#8ab8e6", "#f4b26f", "#9fd39a", "#d8a6d6", "#f2dd7a", "#8fd6d2", "#eb9a94", "#b9b3ec")
LETTER_PX = 0.54
"""Width of a letter, on average, in units of the font's size."""


def rank_colour(rank: int) -> str:
    """Neighbours differ; after eight ranks the colours begin again."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def printable(text: str) -> str:
    """Text for an XML document, without the characters that XML cannot hold."""
    return escape("".join(character for character in text if character.isprintable()))


@dataclass(slots=True)
class Drawing:
    """Elements in pixels, from the top left corner, and how far to the right and down they reach."""

    width_px: float = 0.0
    height_px: float = 0.0
    elements: list[str] = field(default_factory=list)

    def box(
        self,
        x: float,
        y: float,
        wide: float,
        high: float,
        *,
        fill: str,
        line: str = PAPER,
        dashed: bool = False,
        tip: str = "",
    ) -> None:
        dashes = " stroke-dasharray='3 2'" if dashed else ""
        place = f"x='{x:.1f}' y='{y:.1f}' width='{wide:.1f}' height='{high:.1f}'"
        shape = f"<rect {place} fill='{fill}' stroke='{line}'{dashes}"
        self.elements.append(f"{shape}><title>{printable(tip)}</title></rect>" if tip else f"{shape}/>")
        self._reach(x + wide, y + high)

    def words(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12.0,
        anchor: str = "start",
        colour: str = INK,
        bold: bool = False,
        over_a_box: bool = False,
    ) -> None:
        """`y` is the line the letters stand on; `anchor` is start, middle or end. `over_a_box`: whose tip is to be
        seen through them."""
        weight = " font-weight='600'" if bold else ""
        weight += " pointer-events='none'" if over_a_box else ""
        at = "" if anchor == "start" else f" text-anchor='{anchor}'"
        self.elements.append(
            f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size:g}'{at}{weight} fill='{colour}'>{printable(text)}</text>"
        )
        long = len(text) * size * (LETTER_PX + (0.03 if bold else 0.0))
        self._reach(x + {"start": long, "middle": long / 2, "end": 0.0}[anchor], y + 0.3 * size)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, *, colour: str = SOFT, wide: float = 1.4) -> None:
        """A line with a head at its second end."""
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        if not length:
            return
        along_x, along_y = (x2 - x1) / length, (y2 - y1) / length
        back_x, back_y = x2 - 7 * along_x, y2 - 7 * along_y
        head = " ".join(
            f"{x:.1f},{y:.1f}"
            for x, y in (
                (x2, y2),
                (back_x - 3.2 * along_y, back_y + 3.2 * along_x),
                (back_x + 3.2 * along_y, back_y - 3.2 * along_x),
            )
        )
        self.elements.append(
            f"<path d='M{x1:.1f} {y1:.1f}L{back_x:.1f} {back_y:.1f}' stroke='{colour}' stroke-width='{wide:g}'/>"
            f"<polygon points='{head}' fill='{colour}'/>"
        )
        self._reach(max(x1, x2), max(y1, y2))

    def curve(
        self,
        points: Sequence[tuple[float, float]],
        *,
        colour: str,
        wide: float = 1.6,
        dashed: bool = False,
        filled: bool = False,
    ) -> None:
        """Straight lines from point to point, or the area that they enclose."""
        dashes = " stroke-dasharray='4 3'" if dashed else ""
        look = f"fill='{colour}'" if filled else f"fill='none' stroke='{colour}' stroke-width='{wide:g}'{dashes}"
        way = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.elements.append(f"<{'polygon' if filled else 'polyline'} points='{way}' {look}/>")
        for x, y in points:
            self._reach(x, y)

    def put(self, other: Drawing, x: float, y: float) -> None:
        """Another drawing, moved to a place of this one."""
        self.elements += [f"<g transform='translate({x:.1f} {y:.1f})'>", *other.elements, "</g>"]
        self._reach(x + other.width_px, y + other.height_px)

    def notes(self, x: float, y: float, lines: list[str]) -> None:
        """Captions, one below the other."""
        for number, line in enumerate(lines):
            self.words(x, y + 17 * number, line, size=12.5, colour=SOFT)

    def document(self, title: str, *, margin_px: float = 24.0) -> str:
        """The drawing as a self-contained SVG."""
        width, height = self.width_px + margin_px, self.height_px + margin_px
        return "\n".join(
            [
                f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height:.0f}' "
                f"viewBox='0 0 {width:.0f} {height:.0f}' {FONT} role='img'>",
                f"<title>{printable(title)}</title>",
                f"<rect width='100%' height='100%' fill='{PAPER}'/>",
                *self.elements,
                "</svg>",
                "",
            ]
        )

    def _reach(self, x: float, y: float) -> None:
        self.width_px, self.height_px = max(self.width_px, x), max(self.height_px, y)

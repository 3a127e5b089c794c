"""The picture of a strategy: a panel for each of its axes that cuts something, slowest links first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.pictures.context import context_panel
from shoal.pictures.data import data_panel
from shoal.pictures.experts import experts_panel
from shoal.pictures.pipeline import pipeline_panel
from shoal.pictures.spatial import spatial_panel
from shoal.pictures.svg import Drawing
from shoal.pictures.tensor import tensor_panel
from shoal.strategy import Strategy
from shoal.strategy.terms.axes import AxisTerm, cp, dp, ep, pp, spatial, tp

PANELS: dict[type[AxisTerm], Callable[[Any], Drawing]] = {
    dp: data_panel,
    tp: tensor_panel,
    cp: context_panel,
    ep: experts_panel,
    pp: pipeline_panel,
    spatial: spatial_panel,
}

MOST_RANKS = 16
"""Along one axis. Parts of more ranks are too thin to be seen."""
LEFT_PX, TOP_PX, GAP_PX = 24.0, 34.0, 34.0


class NothingToDraw(ValueError):
    """A strategy whose picture would be empty, or too fine to be seen."""


def picture_svg(strategy: Strategy) -> str:
    """All panels of a strategy below each other, as a self-contained SVG."""
    terms = [term for term in strategy.terms if type(term) in PANELS and isinstance(term, AxisTerm) and term.n > 1]
    if not terms:
        raise NothingToDraw(
            f"{strategy} has no axis with a picture; those of dp, pp, tp, cp, ep and spatial are drawn where they "
            "have at least two ranks"
        )
    large = next((term for term in terms if term.n > MOST_RANKS), None)
    if large is not None:
        raise NothingToDraw(
            f"{large}: parts of {large.n:,} ranks are too small to be seen, at most {MOST_RANKS} are drawn; the "
            "pattern is the same with fewer ranks"
        )
    page = Drawing()
    page.words(LEFT_PX, TOP_PX, str(strategy), size=17, bold=True)
    y = TOP_PX + 18
    for term in terms:
        panel = PANELS[type(term)](term)
        if len(terms) > 1:
            page.words(LEFT_PX, y + 18, str(term), size=14, bold=True)
            y += 26
        page.put(panel, LEFT_PX, y)
        y += panel.height_px + GAP_PX
    return page.document(str(strategy))

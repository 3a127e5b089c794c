"""Where a strategy stands in the field: the four axes of one survey, the spectrum of another, the classes of
a third.

- Langer et al. 2020: parallelism, optimisation, scheduling, communication pattern.
- Ben-Nun and Hoefler 2019: the spectrum of consistency, from synchronous to ensembles.
- Nichols et al. 2021: data, intra-layer, inter-layer, hybrid.

All of it is computed from the terms, so a table of systems cannot disagree with how they are written.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.strategy.expression import Strategy, as_strategy
from shoal.strategy.terms import AxisTerm, bsp, ensemble, pp
from shoal.strategy.terms.term import Term

SPECTRUM = (
    "synchronous",
    "backup workers / n-softsync",
    "stale-synchronous",
    "asynchronous / HOGWILD",
    "model averaging / elastic averaging",
    "ensembles",
)
"""From consistent to inconsistent."""

SCHEDULING = ("synchronous", "bounded asynchronous", "asynchronous")
PARALLELISM = {
    "batch": "data",
    "layers": "model vertical (between layers)",
    "layer": "model horizontal (within layers)",
}
"""What an axis cuts, in the words of the four-axis taxonomy; these words are used both ways round in the
field, hence the gloss.
"""
CLASSES = {"batch": "data", "layer": "intra-layer", "layers": "inter-layer"}
"""What an axis cuts, in the words of the comparison of frameworks."""


class TaxonomyPlace(NamedTuple):
    """The place of a strategy in all three orders."""

    parallelism: str
    """"none", "data", "model vertical", "model horizontal", or "hybrid: ..."."""
    optimisation: str
    """"centralised": one optimiser, however its work is spread; "decentralised": several that explore and are
    merged.
    """
    scheduling: str
    communication: str
    """The patterns of all axes, outermost first."""
    spectrum: str
    comparison: str
    """"serial", "data", "intra-layer", "inter-layer" or "hybrid: ..."."""

    def as_dict(self) -> dict[str, str]:
        return self._asdict()


def place(strategy: Strategy | Term) -> TaxonomyPlace:
    """The place of a strategy, from its terms alone."""
    strategy = as_strategy(strategy)
    axes = [axis.term for axis in strategy.axes]
    return TaxonomyPlace(
        parallelism=_one_or_hybrid(PARALLELISM, axes, nothing="none"),
        optimisation=_optimisation(strategy),
        scheduling=_scheduling(strategy),
        communication=" + ".join(dict.fromkeys(pattern for term in axes for pattern in term.patterns())) or "none",
        spectrum=SPECTRUM[spectrum_position(strategy)],
        comparison=_one_or_hybrid(CLASSES, axes, nothing="serial"),
    )


def _one_or_hybrid(names: dict[str, str], axes: list[AxisTerm], *, nothing: str) -> str:
    cut = {what for term in axes for what in term.cuts}
    kinds = [name for what, name in names.items() if what in cut]
    if len(kinds) > 1:
        return f"hybrid: {' + '.join(kinds)}"
    return kinds[0] if kinds else nothing


def _optimisation(strategy: Strategy) -> str:
    loose = any(level.sync.exchanges == "model" for level in strategy.dp_levels) or strategy.term(ensemble) is not None
    return "decentralised" if loose else "centralised"


def _scheduling(strategy: Strategy) -> str:
    """The loosest of all parts: a run is as synchronous as its least synchronous axis."""
    found = {"synchronous"}
    for level in strategy.dp_levels:
        found.add(level.sync.scheduling)
    pipeline = strategy.term(pp)
    if pipeline is not None and pipeline.schedule == "pipedream":
        found.add("bounded asynchronous")
    if strategy.term(ensemble) is not None:
        found.add("asynchronous")  # Members never wait for each other.
    return max(found, key=SCHEDULING.index)


def spectrum_position(strategy: Strategy | Term) -> int:
    """The index on the spectrum: that of the least consistent part."""
    strategy = as_strategy(strategy)
    found = [0]
    for level in strategy.dp_levels:
        backed = isinstance(level.sync, bsp) and level.sync.backup
        found.append(SPECTRUM.index("backup workers / n-softsync" if backed else level.sync.spectrum))
    pipeline = strategy.term(pp)
    if pipeline is not None and pipeline.schedule == "pipedream":
        found.append(SPECTRUM.index("stale-synchronous"))
    if strategy.term(ensemble) is not None:
        found.append(SPECTRUM.index("ensembles"))
    return max(found)

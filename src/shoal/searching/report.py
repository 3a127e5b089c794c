"""The page of a search: history, importances, the Pareto front, every trial; one HTML file that works offline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.common.pages import render
from shoal.training.record.run import plain

PAGE = Path(__file__).with_name("page")
FILE = "search.html"


def write_page(results: Mapping[str, Any], folder: Path) -> Path:
    """Writes the page into the search's folder; its path."""
    place = folder / FILE
    unfinished = place.with_suffix(".tmp")
    unfinished.write_text(page(results), encoding="utf-8")
    unfinished.replace(place)
    return place


def page(results: Mapping[str, Any]) -> str:
    """The page."""
    options, best, trials = results["options"], results["best"], results["trials"]
    entries = (
        f"{options['trials']} members, {options['rounds']} rounds"
        if options["method"] == "pbt"
        else (f"{len(trials)} trials")
    )
    return render(
        PAGE / "search.html.j2",
        data=plain(dict(results)),
        script=PAGE / "search.js",
        title=f"Search of {_short(options['space'])}",
        subtitle=f"{entries} by {options['method']} · {options['strategy']} · {options['metric']}, "
        f"{options['better']} is better",
        best=[] if best is None else [(name, _text(value)) for name, value in best["params"].items()],
        commands=[] if best is None else _commands(results, best),
        asked=[(name, _text(value)) for name, value in options.items() if value not in (None, 0, False, "")],
    )


def _short(space: str) -> str:
    """A file without its folder and the usual name of a space."""
    return Path(space).name.removesuffix(":space")


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _commands(results: Mapping[str, Any], best: Mapping[str, Any]) -> list[str]:
    winner = results.get("winner")
    evaluated = [] if winner is None else [f"shoal evaluate {winner['folder']}"]
    return [f'shoal train "{best["job"]}" --strategy "{results["options"]["strategy"]}"', *evaluated]

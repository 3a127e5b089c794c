"""`shoal.taxonomy`: the techniques, and the field's systems placed by their terms, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.api.call import checked_keywords
from shoal.common.printed import PrintedTable
from shoal.strategy import SYSTEMS, contract, place, techniques
from shoal.strategy.terms.term import FAMILIES


@dataclass(frozen=True, kw_only=True, repr=False)
class Taxonomy(PrintedTable):
    """Techniques and systems; each is a dictionary with the columns of the printed table."""

    techniques: list[dict[str, Any]]
    systems: list[dict[str, Any]] | None
    """None: one family was asked for."""

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        """What the verb prints with `--json`."""
        tables = {"techniques": self.techniques}
        return tables if self.systems is None else {**tables, "systems": self.systems}

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        rows = [[each["name"], each["title"], each["example"]] for each in self.techniques]
        rows += [[each["name"], str(each["year"]), each["strategy"]] for each in self.systems or ()]
        return "Techniques" if self.systems is None else "Techniques and systems", ["name", "what", "strategy"], rows


@checked_keywords
def taxonomy(family: str | None = None) -> Taxonomy:
    """Lists the techniques, and the field's systems, each written as a strategy and placed by its terms.

    Args:
        family: Only the techniques of this family, such as `"compress"` or `"sync"`.

    Returns:
        `.techniques` and `.systems`, lists of dictionaries.

    Raises:
        ValueError: There is no such family; the text lists all.

    Example:
        [each["name"] for each in shoal.taxonomy("compress").techniques]
    """
    if family is not None:
        if family not in FAMILIES:
            raise ValueError(f"taxonomy {family}: expected one of {', '.join(FAMILIES)}")
        return Taxonomy(techniques=[each._asdict() for each in techniques(family)], systems=None)
    return Taxonomy(techniques=[each._asdict() for each in techniques()], systems=[_system(each) for each in SYSTEMS])


def _system(system: Any) -> dict[str, Any]:
    return {
        "name": system.name,
        "year": system.year,
        "source": system.source,
        "strategy": str(system.strategy),
        "note": system.note,
        **place(system.strategy).as_dict(),
        "contract": str(contract(system.strategy)),
    }

"""`shoal explain STRATEGY`: what a strategy is, in words, as a mesh, by its contract and by its place in the
field.
"""

from __future__ import annotations

from typing import Any

from shoal.strategy import explanation, parse


def explain_strategy(text: str, as_json: bool = False, world: int | None = None) -> None:
    """Print all that can be said of a strategy. A text that is none raises a StrategyError, ready to be
    shown.
    """
    told = explanation(parse(text), world=world)
    if as_json:
        import json

        print(json.dumps(told, indent=2, ensure_ascii=False))
        return
    _print(told)


def _print(told: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)

    def heading(title: str, value: str = "") -> None:
        line = Text()
        line.append(title, style="bold")
        line.append(f"  {value}" if value else "")
        console.print()
        console.print(line, soft_wrap=True)

    def line(text: str, style: str = "", indent: int = 2) -> None:
        from rich.padding import Padding

        console.print(Padding(Text(text, style=style), (0, 0, 0, indent)))

    console.print(Text(told["strategy"], style="bold cyan"), soft_wrap=True)
    heading("In words")
    for term in told["terms"]:
        line(term["term"], style="cyan")
        line(term["words"], indent=4)
    mesh = told["mesh"]
    axes = " x ".join(f"{axis['name']} {axis['size']}" for axis in mesh["axes"]) or "one process"
    servers = f" + {mesh['servers']} servers" if mesh["servers"] else ""
    heading(
        "Mesh",
        f"{axes}{servers} = {mesh['world']} {'rank' if mesh['world'] == 1 else 'ranks'}; slowest links first",
    )
    for row in mesh["picture"]:
        line(row)
    contract = told["contract"]
    heading("Contract", contract["name"])
    line(contract["band"])
    for reason in contract["reasons"]:
        line(f"- {reason}")
    heading("Taxonomy")
    for axis, value in told["taxonomy"].items():
        line(f"{axis:14} {value}")
    line(
        f"{'spectrum':14} {told['spectrum']['position']} ({told['spectrum']['index'] + 1} of "
        f"{len(told['spectrum']['of'])}, consistent first)"
    )
    line(f"{'compared as':14} {told['comparison']}")
    heading("Legal", "yes, as far as its terms go" if told["legal"] else "no")
    for refusal in told["refusals"]:
        line(f"{refusal['term']}: {refusal['reason']}", style="red")
        if refusal["nearest"]:
            line(f"nearest legal: {', '.join(refusal['nearest'])}", indent=4)
    same = any(system["same"] for system in told["systems"])
    heading(
        "Known systems that train this way" if same else "No known system trains quite this way; the nearest"
    )
    for system in told["systems"]:
        line(f"{system['name']} ({system['year']}): {system['strategy']}")

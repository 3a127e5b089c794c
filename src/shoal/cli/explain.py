"""`shoal explain STRATEGY`: what a strategy is, in words, as a mesh, by its contract and by its place in the
field; with a timeline, what each rank of its pipeline does when; with a picture, what each rank holds.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.api.explain import CannotExplain, explain, names_a_job
from shoal.cli.output import echoed, print_json, write_picture

if TYPE_CHECKING:
    from shoal.api.timeline import Timeline

TIMELINE_FILE = "timeline.svg"

STYLES = {"F": "bold blue", "B": "bold yellow", "W": "bold magenta", "idle": "dim", "ruler": "dim"}


def explain_anything(
    text: str,
    *,
    as_json: bool,
    world: int | None,
    timeline: bool,
    timeline_file: str | None,
    strategy_text: str | None,
    size: str | None,
    picture_file: str | None = None,
) -> None:
    """A strategy, or a job where the text names one and is no strategy."""
    from shoal.cli.explain_job import explain_job

    drawn = timeline_file if timeline_file is not None else TIMELINE_FILE if timeline else None
    if names_a_job(text):
        if drawn is not None:
            raise CannotExplain(f"--timeline draws a strategy, but {text!r} is a job; name the strategy alone")
        if picture_file is not None:
            raise CannotExplain(f"--picture draws a strategy, but {text!r} is a job; name the strategy alone")
        if world is not None and strategy_text is None:
            raise CannotExplain(f"--ranks {world} checks a strategy, but {text!r} is a job; add --strategy")
        explain_job(text, size=size, strategy_text=strategy_text, world=world, as_json=as_json)
        return
    for option, given in (("--strategy", strategy_text), ("--size", size)):
        if given is not None:
            raise CannotExplain(f"{option} {given}: it goes with a job, but {text!r} names none")
    if Path(text).is_dir():
        raise CannotExplain(f"{text} is a folder without a run.json, so not that of a run; `shoal runs` lists runs")
    explain_strategy(text, as_json=as_json, world=world, timeline_file=drawn, picture_file=picture_file)


def explain_strategy(
    text: str,
    as_json: bool = False,
    world: int | None = None,
    timeline_file: str | None = None,
    picture_file: str | None = None,
) -> None:
    """Print the description of a strategy, and draw its pipeline or its axes into the files that are named. A
    text that is none raises a StrategyError, ready to be shown.
    """
    found = explain(text, ranks=world)
    report = found.to_json()
    timeline = None
    if timeline_file is not None:
        timeline = found.timeline()
        write_picture(timeline.to_svg(), timeline_file, option="--timeline-file")
    if picture_file is not None:
        write_picture(found.to_svg(), picture_file, option="--picture")
    if as_json:
        if timeline is not None:
            report["timeline"] = {"file": timeline_file, **timeline.to_json()}
        if picture_file is not None:
            report["picture"] = {"file": picture_file}
        print_json(report)
        return
    _print({**report, "strategy": echoed(report["strategy"], text)} if "strategy" in report else report)
    if picture_file is not None:
        print(f"\nPicture  drawn in {picture_file}")
    if timeline is not None and timeline_file is not None:
        _print_timeline(timeline, timeline_file)


def _print_timeline(timeline: Timeline, path: str) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print()
    console.print(Text("Timeline", style="bold"), Text(" forward 1, backward 2; ranks along pp"))
    for row in timeline.rows(width=console.width - 2):
        line = Text("  ")
        for what, piece in row:
            line.append(piece, style=STYLES.get(what, ""))
        line.rstrip()
        console.print(line, soft_wrap=True)
    for caption in timeline.captions():
        console.print(Text(f"  {caption}"), soft_wrap=True)
    console.print(Text(f"  drawn in {path}"), soft_wrap=True)


def _print(report: dict[str, Any]) -> None:
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

    console.print(Text(report["strategy"], style="bold cyan"), soft_wrap=True)
    heading("In words")
    for term in report["terms"]:
        line(term["term"], style="cyan")
        line(term["words"], indent=4)
    mesh = report["mesh"]
    axes = " x ".join(f"{axis['name']} {axis['size']}" for axis in mesh["axes"]) or "one process"
    servers = f" + {mesh['servers']} servers" if mesh["servers"] else ""
    heading(
        "Mesh",
        f"{axes}{servers} = {mesh['world']} {'rank' if mesh['world'] == 1 else 'ranks'}; slowest links first",
    )
    for row in mesh["picture"]:
        line(row)
    contract = report["contract"]
    heading("Contract", contract["name"])
    line(contract["band"])
    for reason in contract["reasons"]:
        line(f"- {reason}")
    heading("Taxonomy")
    for axis, value in report["taxonomy"].items():
        line(f"{axis:14} {value}")
    line(
        f"{'spectrum':14} {report['spectrum']['position']} ({report['spectrum']['index'] + 1} of "
        f"{len(report['spectrum']['of'])}, consistent first)"
    )
    line(f"{'compared as':14} {report['comparison']}")
    heading("Legal", "yes, as far as its terms go" if report["legal"] else "no")
    for refusal in report["refusals"]:
        line(f"{refusal['term']}: {refusal['reason']}", style="red")
        if refusal["nearest"]:
            line(f"nearest legal: {', '.join(refusal['nearest'])}", indent=4)
    same = any(system["same"] for system in report["systems"])
    heading("Known systems that train this way" if same else "No known system trains quite this way; the nearest")
    for system in report["systems"]:
        line(f"{system['name']} ({system['year']}): {system['strategy']}")

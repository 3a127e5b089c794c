"""`shoal explain JOB`: how a job's model may be cut. What comes before its blocks, the blocks, what comes after; where
a pipeline can be cut and what crosses; what tensor, context and expert parallelism may cut, and why not more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shoal.api.explain import explain
from shoal.cli.output import emitter, short

if TYPE_CHECKING:
    from rich.console import Console

MOST_LINES = 12
"""Of one kind: longer lists end in a count. `--json` has them all."""


def explain_job(
    text: str, *, size: str | None = None, strategy_text: str | None = None, world: int | None = None, as_json: bool
) -> None:
    """Prints the layout of a job; with a strategy, whether the job can be trained by it."""
    from rich.console import Console

    with emitter(_print, as_json=as_json) as show:
        with Console(stderr=True).status("") as status:
            found = explain(text, size=size, strategy=strategy_text, ranks=world, progress=status.update)
        show(found.to_json())


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False)
    size = short(report["parameters"])
    title = Text.assemble((report["job"], "bold cyan"), f"  {report['model']}, {size} parameters")
    console.print(title, soft_wrap=True)
    for name, value in report["declared"].items():
        console.print(Padding(Text(f"declared by the job: {name} = {value}"), (0, 0, 0, 2), expand=False))
    _print_chain(console, report)
    for heading, lines in (
        ("Tensor", _some(report["tensor"]["lines"])),
        ("Sequence", _sequence_lines(report["sequence"])),
        ("Planes", _plane_lines(report["planes"])),
        ("Experts", _expert_lines(report["experts"])),
        *([("Strategy", _strategy_lines(report["strategy"]))] if "strategy" in report else []),
    ):
        console.print()
        console.print(Text(heading, style="bold"))
        for line in lines:
            style = "red" if line.startswith("no: ") else ""
            console.print(Padding(Text(line, style=style), (0, 0, 0, 2), expand=False))


def _print_chain(console: Console, report: dict[str, Any]) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from shoal.layout.described import span

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("")
    table.add_column("pieces", overflow="fold")
    table.add_column("class", overflow="fold")
    for name in ("parameters", "cost", "crosses a cut before"):
        table.add_column(name, justify="right", no_wrap=True)
    for part, title in (("prefix", "before"), ("blocks", "blocks"), ("suffix", "after")):
        for number, group in enumerate(report[part]):
            like = "like blocks" if group["is_block"] else "alike"
            several = f": {group['count']} {like}" if group["count"] > 1 else ""
            table.add_row(
                title if not number else "",
                span(group["first"], group["last"]) + several,
                group["class"],
                short(group["parameters"]),
                f"{100 * group['cost_share']:.1f}%",
                _crossing(group),
            )
    console.print()
    pieces = len(report["pieces"])
    line = f"  {pieces} pieces; a pipeline can be cut at {report['cuts']} of {max(pieces - 1, 0)} places"
    console.print(Text.assemble(("Pipeline", "bold"), line), soft_wrap=True)
    console.print(Padding(table, (0, 0, 0, 2), expand=False))
    reasons: dict[str, list[str]] = {}
    for path, why in report["no_cut_before"].items():
        reasons.setdefault(why, []).append(path)
    lines = [f"no cut before {', '.join(_some(paths, 4))}: it {why}" for why, paths in reasons.items()]
    for tied in report["tied"]:
        lines.append(f"tied: {tied['parameter']} is read by {' and '.join(_some(tied['read_by'], 4))}")
    for num, rows in report["stages"].items():
        shares = " | ".join(f"{span(row['first'], row['last'])} {100 * row['cost_share']:.0f}%" for row in rows)
        lines.append(f"{num} stages: {shares}")
    for text in _some(lines):
        console.print(Padding(Text(text), (0, 0, 0, 2), expand=False))


def _crossing(group: dict[str, Any]) -> str:
    if not group["cuts"]:
        return "-"
    sizes = [short(size, "B") for size in group["crossing_bytes"]]
    return f"{sizes[0]} a sample" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} a sample"


def _sequence_lines(report: dict[str, Any]) -> Iterator[str]:
    if not report["may_be_cut"]:
        yield f"stays unsharded: {report['why_not']}"
        return
    kind, blocks = "causal" if report["causal"] else "not causal", len(report["blocks"])
    yield f"{report['length']} positions (dimension {report['dim']}), {kind}: may be cut in {blocks} blocks"
    along = [
        f"{num} {what}{'s' if num > 1 else ''}"
        for num, what in ((report["cut_along"], "argument"), (report["masks"], "mask"))
        if num
    ]
    if along:
        yield f"cut along with it: {' and '.join(along)} of each block"
    if report["loss_stays_cut"]:
        yield f"it stays cut to the loss, which reads {', '.join(report['loss_reads']) or 'nothing else'} by position"
    else:
        yield f"it is gathered behind the blocks: {report['why_gathered']}"


def _plane_lines(report: dict[str, Any]) -> Iterator[str]:
    if not report["may_be_cut"]:
        yield f"stay whole: {report['why_not']}"
        return
    planes = report["convolutions"]
    sizes = list(dict.fromkeys(" x ".join(map(str, size)) for size in planes.values()))
    yield (
        f"may be cut: {100 * report['cut_share']:.0f}% of the work on products, {len(planes)} convolutions with planes "
        f"of {', '.join(_some(sizes, 4))}"
    )
    yield f"on two ranks a forward exchanges halos or planes {report['exchanges']} times"
    if report["gathered"]:
        where = [f"{row['module'] or 'the loss'} ({row['operation']})" for row in report["gathered"]]
        yield f"gathered for {', '.join(_some(where, 4))}"
    if report["computed_alike"]:
        yield f"smaller than two ranks, computed by both: {', '.join(_some(report['computed_alike'], 4))}"


def _expert_lines(report: dict[str, Any]) -> Iterator[str]:
    kinds: dict[tuple[int, str], list[str]] = {}
    for layer in report["layers"]:
        kinds.setdefault((layer["count"], layer["form"]), []).append(layer["path"])
    for (count, form), paths in kinds.items():
        yield f"{count} experts, {form}, in {len(paths)} layers: {', '.join(_some(paths, 4))}"
    yield from _some([f"passed over: {row['reason']}" for row in report["passed_over"]])
    if not report["layers"] and not report["passed_over"]:
        yield "none"


def _strategy_lines(report: dict[str, Any]) -> Iterator[str]:
    from shoal.layout.described import span

    if report["legal"] and not report["cannot_run"]:
        yield f"{report['strategy']}: legal for this model"
    elif report["legal"]:
        yield f"no: {report['cannot_run']}"
    for refusal in report["refusals"]:
        yield f"no: {refusal['term']}: {refusal['reason']}"
        if refusal["nearest"]:
            yield f"nearest legal: {', '.join(refusal['nearest'])}"
    for stage, row in enumerate(report.get("stages", ())):
        where = span(row["first"], row["last"])
        yield f"stage {stage} on rank {row['rank']} of pp: {where}, {100 * row['cost_share']:.0f}% of the cost"


def _some(lines: list[str], most: int = MOST_LINES) -> list[str]:
    return lines if len(lines) <= most else [*lines[: most - 1], f"and {len(lines) - most + 1} more"]

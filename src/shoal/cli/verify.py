"""`shoal verify`: shows a certificate; exit status 0 if it holds, 1 if not."""

from __future__ import annotations

from typing import Any


def verify_command(job: str, text: str, *, steps: int, size: str | None, changed: dict[str, Any], as_json: bool) -> int:
    from rich.console import Console

    from shoal.api.known import require_known
    from shoal.cli.output import emitter
    from shoal.parallel.runnable import require_runnable
    from shoal.strategy import parse, require_legal

    strategy = parse(text)
    require_legal(strategy)
    require_runnable(strategy)
    require_known(job, size)
    console = Console(stderr=True)

    def doing(what: str) -> None:
        if console.is_terminal:
            status.update(what)
        else:
            console.print(f"  {what}", style="dim")

    with emitter(show, as_json=as_json) as emit:
        with console.status("importing torch") as status:
            from shoal.proof.certify import verify

            certificate = verify(job, strategy, steps=steps, size=size, overrides=changed, progress=doing)
        report: Any = certificate.to_json() if as_json else certificate
        emit(report)
    return 0 if certificate.passed else 1


def show(certificate: Any) -> None:
    """The certificate for people."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    c = certificate
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    style = {"PASSED": "bold green", "FAILED": "bold red"}.get(c.verdict, "bold yellow")
    table.add_row("verdict", Text(c.verdict, style=style))
    table.add_row("job", c.job)
    table.add_row("strategy", f"{c.strategy}  ({c.world} rank{'s' if c.world != 1 else ''}, {c.steps} steps)")
    table.add_row("contract", c.contract)
    table.add_row("compared with", f"{c.serial}, seed {c.seed}")
    table.add_row("compared", c.compared_text)
    table.add_row("largest difference", f"{c.max_rel_diff:.2e}  at {c.worst}  (tolerance {c.tolerance:.0e})")
    if c.conditioning:
        table.add_row("conditioning", c.conditioning_text)
    table.add_row("ledger", c.ledger_verdict)
    for line in c.ledger_differences[:6]:
        table.add_row("", line)
    if c.float32_drift is not None:
        drift = f"{c.float32_drift:.1e} (information only: float32 cannot distinguish a bug from rounding)"
        table.add_row("in float32", drift)
    if c.zero_gradient:
        more = f" and {len(c.zero_gradient) - 3} more" if len(c.zero_gradient) > 3 else ""
        names = ", ".join(c.zero_gradient[:3]) + more
        table.add_row("zero gradient", f"{names}: where the true gradient is zero, compared absolutely")
    if c.widened:
        table.add_row("kept in float64", ", ".join(f"{name} ({times}x)" for name, times in c.widened.items()))
    for note in c.notes:
        table.add_row("note", note)
    table.add_row("not covered", c.not_covered)
    Console().print(table)

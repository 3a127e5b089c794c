"""`shoal doctor`: what this machine has, and what works on it, as one paste."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shoal.cli.app import JSON, app


@app.command()
def doctor(
    no_test: Annotated[bool, typer.Option("--no-test", help="Only look at the machine.")] = False,
    seconds: Annotated[float, typer.Option(min=1.0, help="Begin no further part of the self-test after this.")] = 60.0,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Print what this machine has (devices, links, backends, versions, limits) and prove every axis that it allows, in
    about a minute. Paste the text into a report of a failure."""
    from rich.console import Console

    from shoal.api.doctor import doctor as examine
    from shoal.cli.output import print_json

    console = Console(stderr=True)
    with console.status("...") as status:

        def doing(what: str) -> None:
            if console.is_terminal:
                status.update(what)
            else:
                console.print(f"  {what}", style="dim")

        found = examine(test=not no_test, seconds=seconds, progress=doing)
    if as_json:
        print_json(found.to_json())
    else:
        print(found)
    sys.exit(0 if found.healthy else 1)

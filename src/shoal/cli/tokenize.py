"""`shoal tokenize`: text files as a token file."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def tokenize_command(texts: list[str], *, as_json: bool, **options: Any) -> None:
    """Tokenizes with a progress bar, prints where the tokens are and how they are used."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from shoal.api.tokenize import tokenize
    from shoal.cli.output import emitter

    total = sum(Path(each).stat().st_size for each in texts if Path(each).is_file())
    columns = (TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with emitter(_print, as_json=as_json) as show:
        errors = Console(stderr=True)
        with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
            task = bar.add_task("", total=total)
            found = tokenize(texts, progress=lambda nbytes: bar.update(task, advance=nbytes), **options)
        show(found.to_json())


def _print(found: dict[str, Any]) -> None:
    print(
        f"{found['folder']}: {found['tokens']:,} tokens of {found['documents']:,} documents, "
        f"vocabulary {found['vocab']:,}, {found['bytes'] / 1e6:.2f} MB"
    )
    print(f'use it in a job: train=TokenData("{found["folder"]}", sequence=1024)')

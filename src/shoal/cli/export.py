"""`shoal export`: a trained model as a file or folder that needs nothing of Shoal."""

from __future__ import annotations

from typing import Any


def export_command(run: str, *, as_json: bool = False, **options: Any) -> int:
    """Writes the model, prints where it is and how it is loaded."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from shoal.api.export import export
    from shoal.cli.output import emitter

    columns = (TextColumn("writing"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with emitter(_print, as_json=as_json) as show:
        errors = Console(stderr=True)
        with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
            task = bar.add_task("", total=None)

            def moved(nbytes: int, total: int) -> None:
                bar.update(task, advance=nbytes, total=total)

            written = export(run, progress=moved, **options).to_json()
        show(written)
    return 0


def _print(written: dict[str, Any]) -> None:
    size = written["bytes"]
    shown = f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
    print(f"{written['path']}: {written['tensors']} tensors, {shown}, step {written['step']}")
    print("load it:")
    for line in written["load"]:
        print(f"    {line}")

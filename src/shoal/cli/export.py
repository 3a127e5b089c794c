"""`shoal export`: a trained model as a file or folder that needs nothing of Shoal."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def export_command(
    run: str, *, to: str, out: str | None = None, step: int | None = None, dtype: str | None = None,
    job: str | None = None, overwrite: bool = False, as_json: bool = False,
) -> int:  # fmt: skip
    """Writes the model, prints where it is and how it is loaded."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from shoal.cli.output import emitter
    from shoal.training.record.run import RUN, read_json

    console = Console(stderr=True)
    given = Path(run)
    with emitter(_print, as_json=as_json) as show:
        with console.status("importing torch"):
            from shoal.export.formats import export, target_of
            from shoal.export.trained import checkpoint_of, options_of, require_same_job, run_folder
            from shoal.job.facts import build_without_memory
            from shoal.runtime.setup import job_from

            folder = run_folder(given)
            kind, path = target_of(to, out, folder)
            arguments = read_json(folder / RUN).get("arguments") or {}
            checkpoint = checkpoint_of(given, step)
            loaded = job_from(options_of(arguments, job))
            require_same_job(checkpoint, loaded)
            model = build_without_memory(loaded)
        columns = (TextColumn("writing"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            total = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
            task = bar.add_task("", total=total)
            written = export(
                checkpoint, model, kind, path, dtype=dtype, overwrite=overwrite,
                progress=lambda nbytes: bar.advance(task, nbytes),
            )  # fmt: skip
        show(written)
    return 0


def _print(written: dict[str, Any]) -> None:
    size = written["bytes"]
    shown = f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
    print(f"{written['path']}: {written['tensors']} tensors, {shown}, step {written['step']}")
    print("load it:")
    for line in written["load"]:
        print(f"    {line}")

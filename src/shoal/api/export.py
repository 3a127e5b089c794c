"""`shoal.export`: a trained model as a file or folder that needs nothing of Shoal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.api.call import checked_keywords
from shoal.common.printed import PrintedTable
from shoal.training.record.run import RUN, Run, read_json

if TYPE_CHECKING:
    from shoal.job import Job

Progress = Callable[[int, int], None]
"""Is given bytes just written, and bytes in all."""


@dataclass(frozen=True, kw_only=True, repr=False)
class ExportedModel(PrintedTable):
    """What was written, and how it is loaded."""

    path: str
    format: str
    step: int
    tensors: int
    bytes: int
    load: list[str]
    """Lines of Python that load it, without Shoal."""

    def to_json(self) -> dict[str, Any]:
        """What the verb prints with `--json`."""
        return asdict(self)

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        title = f"{self.path}: {self.tensors} tensors, {self.bytes / 1e6:.2f} MB, step {self.step}"
        return title, ["load it"], [[line] for line in self.load]


@checked_keywords
def export(
    run: str | Path | Run,
    *,
    to: str = "safetensors",
    out: str | None = None,
    step: int | None = None,
    dtype: str | None = None,
    ema: bool = False,
    job: str | Job | None = None,
    overwrite: bool = False,
    progress: Progress = lambda nbytes, total: None,
) -> ExportedModel:
    """Writes the trained model as files that need nothing of Shoal.

    Args:
        run: A Run, the folder of one, or of one of its checkpoints.
        to: A file (`"model.safetensors"`, `"model.pt"`) or a format: safetensors, state_dict, hf-folder, dcp.
        out: Where a format is written. None: in the run's `export` folder.
        step: Step of the checkpoint. None: the newest.
        dtype: Convert floating-point tensors: fp32, bf16, fp16 or fp64.
        ema: Whether to write the moving average of the weights.
        job: The job, if its file was moved since the run.
        overwrite: Whether what lies at the path is replaced.
        progress: Is given the bytes just written, and all there are.

    Returns:
        Path, format, step, number of tensors, bytes, and the lines that load it.

    Example:
        shoal.export("runs/first", to="model.safetensors")
    """
    from shoal.exporting.formats import export as write
    from shoal.exporting.formats import target_of
    from shoal.exporting.trained import checkpoint_of, options_of, require_same_job, run_folder
    from shoal.job.facts import build_without_memory
    from shoal.runtime.setup import job_from

    if job is not None and not isinstance(job, str):
        from shoal.job.load import named

        job = named(job)
    given = run.folder if isinstance(run, Run) else Path(run)
    folder = run_folder(given)
    kind, path = target_of(to, out, folder)
    arguments = read_json(folder / RUN).get("arguments") or {}
    checkpoint = checkpoint_of(given, step, ema=ema)
    loaded = job_from(options_of(arguments, job))
    require_same_job(checkpoint, loaded)
    model = build_without_memory(loaded)
    total = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    written = write(
        checkpoint, model, kind, path, dtype=dtype, overwrite=overwrite, progress=lambda nbytes: progress(nbytes, total)
    )
    return ExportedModel(**written)

"""Peak memory of a rank while it starts, as a fraction of the model: the model lies on the disk until it is cut.

For each strategy ranks start twice, with a tiny model and with one of about 1 GB of parameters (a GPT of 20 blocks,
float32), and end before their first step. What counts is the difference of the two peaks over the bytes of the model.
With `--weights` ranks also start from safetensors files of that model, in float32 and in bfloat16.

    python benchmarks/start_memory.py [--weights] [--json]
"""

from __future__ import annotations

import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _report import arguments, report

STRATEGIES = ("dp(2)", "dp(2, zero=3)", "tp(2)", "pp(2, '1f1b', micro=2)")


def job_of(layers: int, hidden: int) -> Any:
    import torch

    from shoal.job import Job, TextData, cross_entropy
    from shoal.job.models.gpt import GPT, GPTConfig

    config = GPTConfig(sequence=16, layers=layers, hidden=hidden, heads=16)
    return Job(
        name="start",
        train=TextData(bytes(range(256)) * 64, sequence=16),
        loss=cross_entropy,
        model=lambda: GPT(config),
        optimizer=lambda groups: torch.optim.SGD(groups, lr=1e-4),
        global_batch=4,
        steps=1,
    )


def start(settings: dict[str, Any], channel: Any) -> dict[str, float]:
    """On a rank: everything before the first step."""
    from shoal.launch.join import join, leave
    from shoal.runtime.setup import prepare
    from shoal.strategy import parse

    me, job = join(), job_of(settings["layers"], settings["hidden"])
    if settings["weights"] is not None:
        from shoal.job import start_from

        job = start_from(job, settings["weights"])
    ready = prepare(job, parse(settings["strategy"]), rank=me.rank, backend=me.backend, device=me.device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    full = sum(shape.numel() * 4 for shape in _shapes(ready))
    leave()
    return {"peak": peak, "model": full}


def _shapes(ready: Any) -> list[Any]:
    import torch

    return [torch.Size(shape) for shape, _ in ready.engine.shapes.values()]


SIZES = {"tiny": (2, 32), "full": (20, 1024)}


def write_weights(settings: dict[str, Any], channel: Any) -> None:
    """In one process: the models of both sizes as files."""
    import torch
    from safetensors.torch import save_file

    for name, size in SIZES.items():
        state = job_of(*size).model().state_dict()
        stored = {key: value.to(getattr(torch, settings["dtype"])) for key, value in state.items()}
        save_file(stored, Path(settings["folder"]) / f"{name}.safetensors")


def measure(strategy: str, weights: str | None = None, words: str = "") -> dict[str, Any]:
    """`weights`: the folder with the files to start from."""
    from shoal.launch import run_ranks

    def of(name: str) -> list[dict[str, float]]:
        file = None if weights is None else f"{weights}/{name}.safetensors"
        layers, hidden = SIZES[name]
        settings = {"strategy": strategy, "layers": layers, "hidden": hidden, "weights": file}
        return run_ranks("start_memory:start", settings, ranks=2)

    empty, full = of("tiny"), of("full")
    over = max(row["peak"] for row in full) - max(row["peak"] for row in empty)
    model = full[0]["model"]
    return {"name": strategy + words, "model_mb": model / 1e6, "peak_mb": over / 1e6, "fraction": over / model}


def main() -> None:
    from shoal.launch import run_ranks

    def more(parser: Any) -> None:
        parser.add_argument("--weights", action="store_true", help="also start from safetensors files")

    asked = arguments(__doc__ or "", more)
    rows = [measure(strategy) for strategy in STRATEGIES]
    for dtype in ("float32", "bfloat16") if asked.weights else ():
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            run_ranks("start_memory:write_weights", {"folder": folder, "dtype": dtype}, ranks=1)
            rows += [measure(each, folder, f" from {dtype} files") for each in ("dp(2, zero=3)", "tp(2)")]
    report(rows, title="Peak memory of a rank at its start", as_json=asked.json)


if __name__ == "__main__":
    main()

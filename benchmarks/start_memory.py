"""Peak memory of a rank while it starts, as a fraction of the model: the model lies on the disk until it is cut.

For each strategy ranks start twice, with a tiny model and with one of about 1 GB of parameters (a GPT of 20 blocks,
float32), and end before their first step. What counts is the difference of the two peaks over the bytes of the model.

    python benchmarks/start_memory.py [--json]
"""

from __future__ import annotations

import resource
import sys
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
        name="start", train=TextData(bytes(range(256)) * 64, sequence=16), loss=cross_entropy,
        model=lambda: GPT(config), optimizer=lambda groups: torch.optim.SGD(groups, lr=1e-4), global_batch=4, steps=1,
    )  # fmt: skip


def start(settings: dict[str, Any], channel: Any) -> dict[str, float]:
    """On a rank: everything before the first step."""
    from shoal.launch.join import join, leave
    from shoal.runtime.setup import prepare
    from shoal.strategy import parse

    me, job = join(), job_of(settings["layers"], settings["hidden"])
    ready = prepare(job, parse(settings["strategy"]), rank=me.rank, backend=me.backend, device=me.device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    full = sum(shape.numel() * 4 for shape in _shapes(ready))
    leave()
    return {"peak": peak, "model": full}


def _shapes(ready: Any) -> list[Any]:
    import torch

    return [torch.Size(shape) for shape, _ in ready.engine.shapes.values()]


def measure(strategy: str) -> dict[str, Any]:
    from shoal.launch import run_ranks

    def of(layers: int, hidden: int) -> list[dict[str, float]]:
        settings = {"strategy": strategy, "layers": layers, "hidden": hidden}
        return run_ranks("start_memory:start", settings, ranks=2)

    empty, full = of(2, 32), of(20, 1024)
    over = max(row["peak"] for row in full) - max(row["peak"] for row in empty)
    model = full[0]["model"]
    return {"name": strategy, "model_mb": model / 1e6, "peak_mb": over / 1e6, "fraction": over / model}


def main() -> None:
    asked = arguments(__doc__ or "")
    rows = [measure(strategy) for strategy in STRATEGIES]
    report(rows, title="Peak memory of a rank at its start", as_json=asked.json)


if __name__ == "__main__":
    main()

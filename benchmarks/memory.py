"""Peak memory of a rank by stage of ZeRO, beside the formula; and of a host whose ranks share memory, beside DDP.

The default allocator keeps what a program frees and so hides what sharding saves. So each stage runs in processes of
its own with an allocator that gives memory back, the kernel's high-water mark is reset when training is under way,
and what counts is the peak over the size before the model was built, in bytes per parameter. The model is nearly all
parameters: 25 million of them in 32 blocks, a batch of one short sequence a rank. float32 and AdamW:

    stage 0   4 + 4 + 8         parameters, gradients, two moments
    stage 1   4 + 4 + 8/P
    stage 2   4 + (4 + 8)/P
    stage 3   (4 + 4 + 8)/P

What is over the formula is in use for a moment: buckets on the wire, gathered blocks, activations.

What a host holds whose ranks share memory stands below, beside DDP (`_host_memory.py`).

    python benchmarks/memory.py [--ranks 2] [--json]
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _report import arguments, report

RETURNING = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc: blocks of 64 KB and more come from the kernel one by one and go back when freed."""
SEQUENCE, WIDTH, BLOCKS, HEADS = 16, 256, 32, 8


def formula(zero: int, ranks: int) -> float:
    """Bytes per parameter, float32 and AdamW."""
    parameters, gradients, moments = 4.0, 4.0, 8.0
    return (
        parameters / (ranks if zero >= 3 else 1)
        + gradients / (ranks if zero >= 2 else 1)
        + moments / (ranks if zero >= 1 else 1)
    )


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux")


def tensor_bytes() -> int:
    """Bytes of all storages that live tensors hold, each once."""
    import torch

    gc.collect()
    held = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and not thing.is_meta:
            storage = thing.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def job_of(world: int, width: int, blocks: int) -> Any:
    import torch

    from shoal.job import Job, TextData, cross_entropy
    from shoal.job.models.gpt import GPT, GPTConfig

    config = GPTConfig(sequence=SEQUENCE, layers=blocks, hidden=width, heads=HEADS)
    return Job(
        name="memory",
        train=TextData(bytes(range(256)) * 64, sequence=SEQUENCE),
        loss=cross_entropy,
        model=lambda: GPT(config),
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-4),
        global_batch=world,
        steps=4,
    )


def peak(settings: dict[str, Any], channel: Any) -> dict[str, float]:
    """On every rank: peak resident bytes over the start, and tensor bytes between two steps."""
    from shoal.launch.join import join, leave
    from shoal.runtime.setup import prepare
    from shoal.strategy import parse

    me = join()

    def trained(width: int, blocks: int) -> Any:
        job = job_of(me.world, width, blocks)
        ready = prepare(job, parse(settings["strategy"]), rank=me.rank, backend=me.backend)
        for step in range(3):
            ready.runner.step(step, step * me.world)
        return ready

    # A small model first: the pages of the libraries that a step touches are not the model's.
    trained(HEADS * 8, 2).engine.close()
    gc.collect()
    before, before_tensors = resident("VmRSS"), tensor_bytes()
    ready = trained(WIDTH, BLOCKS)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    ready.runner.step(3, 3 * me.world)
    highest = resident("VmHWM")
    parameters = sum(bucket.buffer.numel for bucket in ready.engine.buckets)
    held = tensor_bytes() - before_tensors
    leave()
    return {"peak": highest - before, "held": held, "parameters": parameters}


def rank_rows(ranks: int) -> list[dict[str, Any]]:
    from shoal.launch import run_ranks

    rows = []
    for zero in range(4):
        print(f"dp({ranks}, zero={zero}) ...", file=sys.stderr, flush=True)
        settings = {"strategy": f"dp({ranks}, zero={zero})"}
        found = run_ranks("memory:peak", settings, ranks=ranks, environment=RETURNING)
        parameters = found[0]["parameters"]
        expected = formula(zero, ranks)
        measured = max(rank["peak"] for rank in found) / parameters
        rows.append(
            {
                "name": f"dp({ranks}, zero={zero})",
                "formula_bytes_per_parameter": round(expected, 2),
                "peak_bytes_per_parameter": round(measured, 2),
                "peak_over_formula": round(measured / expected, 3),
                "held_between_steps": round(max(rank["held"] for rank in found) / parameters, 2),
            }
        )
    return rows


def main() -> None:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--ranks", type=int, default=2)
        parser.add_argument("--only", choices=["rank", "host"], help="one of the two tables")

    asked = arguments(__doc__ or "", extend)
    from _host_memory import host_rows

    tables = {
        "rank": ("Peak memory of a rank", rank_rows),
        "host": ("Memory of a host, all its ranks together", host_rows),
    }
    found = {title: rows_of(asked.ranks) for of, (title, rows_of) in tables.items() if asked.only in (None, of)}
    if asked.json:
        report([row for rows in found.values() for row in rows], title="", as_json=True)
        return
    for title, rows in found.items():
        report(rows, title=f"{title}, 25 M parameters", as_json=False)


if __name__ == "__main__":
    main()

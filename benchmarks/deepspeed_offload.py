"""What DeepSpeed's offload of the optimiser's state does on a host without devices, for docs/offload.md.

    python benchmarks/deepspeed_offload.py none|cpu|nvme [stage]

One process, the network of `offload.py` with 10 blocks and a batch of 64. Needs deepspeed, which Shoal leaves out.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import tempfile
import time
from importlib import import_module
from typing import Any

os.environ.update(
    RANK="0",
    WORLD_SIZE="1",
    LOCAL_RANK="0",
    MASTER_ADDR="127.0.0.1",
    MASTER_PORT="29655",
    DS_ACCELERATOR="cpu",
    OMP_NUM_THREADS="1",
)

import torch
from _offload import job
from torch import nn


def main() -> None:
    import deepspeed

    where, stage = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
    torch.set_num_threads(1)
    backend: Any = import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # An all-reduce for inference only, which would be compiled for minutes.
    what = job(width=512, depth=10, batch=64)
    zero: dict[str, Any] = {"stage": stage}
    if where != "none":
        zero["offload_optimizer"] = {"device": where, "nvme_path": tempfile.mkdtemp(dir="/var/tmp")}
    model = what.model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        config={
            "train_micro_batch_size_per_gpu": 64,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "torch_autocast": {"enabled": False},
        },
    )
    times = []
    for _ in range(6):
        batch = what.train.batch(list(range(64)))  # type: ignore[arg-type]
        started = time.perf_counter()
        loss = nn.functional.cross_entropy(engine(batch["x"]), batch["y"])
        engine.backward(loss)
        engine.step()
        times.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(f"{where}, stage {stage}: peak {peak:.0f} MB, step {1e3 * statistics.median(times[1:]):.0f} ms")


if __name__ == "__main__":
    main()

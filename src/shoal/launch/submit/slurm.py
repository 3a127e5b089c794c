"""The sbatch script of a run: each task of its one step is a rank."""

from __future__ import annotations

from shoal.launch.submit.request import CannotSubmit, Request, quoted

WARNING_S = 120
"""How long before the time limit, or a preemption, ranks are asked to stop."""


def script(request: Request, *, sbatch: tuple[str, ...] = ()) -> str:
    """The script; `sbatch` are further options, such as `--partition=gpu`."""
    wrong = next((line for line in sbatch if not line.startswith("-") or "\n" in line), None)
    if wrong is not None:
        raise CannotSubmit(f"--sbatch {wrong!r}: expected an option of sbatch, such as --partition=gpu")
    lines = [
        f"--job-name={request.name}",
        f"--nodes={request.nodes}",
        f"--ntasks-per-node={request.ranks_per_node}",
        f"--cpus-per-task={request.cpus_per_rank}",
        f"--output={request.name}-%j.out",
        "--open-mode=append",
        "--requeue",
        # To the ranks, not to the batch shell (B:): that would end the shell, and Slurm then the step.
        f"--signal=TERM@{WARNING_S}",
    ]
    lines += [f"--time={request.minutes}"] if request.minutes is not None else []
    lines += [f"--gpus-per-node={request.gpus_per_node}"] if request.gpus_per_node else []
    header = "\n".join(f"#SBATCH {line}" for line in [*lines, *sbatch])
    return f"""#!/bin/bash
{header}

# A secret that the ranks of this job share.
export SHOAL_TOKEN=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \\n')
export OMP_NUM_THREADS={request.cpus_per_rank}
# --go-on: the same script starts the run, and goes on with it after a requeue or when it is submitted again.
exec srun --kill-on-bad-exit=1 shoal {quoted(request.train)}
"""

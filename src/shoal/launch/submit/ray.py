"""The driver of a run on a Ray cluster: TorchTrainer's workers are its ranks."""

from __future__ import annotations

from shoal.launch.submit.request import CannotSubmit, Request


def driver(request: Request, settings: dict[str, object]) -> str:
    """A Python program; `settings` are the options of the run."""
    if not request.folder.startswith("/"):
        raise CannotSubmit(
            f"--folder {request.folder}: workers of Ray have folders of their own; name one by its full path, on a "
            "file system that all nodes share"
        )
    resources: dict[str, float] = {"CPU": request.cpus_per_rank}
    if request.gpus_per_node:
        resources["GPU"] = request.gpus_per_node / request.ranks_per_node
    placement = "PACK" if request.nodes == 1 or request.ranks_per_node > 1 else "STRICT_SPREAD"
    return f'''"""Trains with Shoal on a Ray cluster. All nodes share the folder and the job's file."""

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

SETTINGS = {settings!r}


def train(settings):
    from shoal.training.launched import train_as_rank

    outcome = train_as_rank(**settings)
    ray.train.report({{key: outcome[key] for key in ("step", "loss") if outcome[key] is not None}})


if __name__ == "__main__":
    ray.init()  # The cluster that RAY_ADDRESS names, or that this machine is part of.
    trainer = TorchTrainer(
        train,
        train_loop_config=SETTINGS,
        torch_config=TorchConfig(backend="gloo"),  # For the workers to find each other; Shoal makes its own groups.
        scaling_config=ScalingConfig(
            num_workers={request.world}, resources_per_worker={resources!r}, placement_strategy="{placement}",
            use_gpu={request.gpus_per_node > 0},
        ),
        run_config=RunConfig(
            name="{request.name}", storage_path="{request.folder.rstrip("/")}/ray",
            failure_config=FailureConfig(max_failures={request.retries}),
        ),
    )
    trainer.fit()
    print("trained; the run is in {request.folder}")
'''

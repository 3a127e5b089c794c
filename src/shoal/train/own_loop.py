"""The engine without Job, for those who own their training loop: three lines in their script.

    engine = shoal.engine(model, "dp(2, zero=1)", optimizer=lambda groups: torch.optim.AdamW(groups, lr=3e-4))
    ...
    engine.backward(loss_sum, count)      # where loss.backward() stood
    engine.step()                         # where optimizer.step() stood

Run it under `shoal launch script.py --ranks 2` or torchrun. `engine.share(len(batch))` is this rank's slice of a batch.
"""

from __future__ import annotations

import torch
from torch import nn

from shoal.job.elementwise import elementwise
from shoal.parallel.apply import Options, parallelize
from shoal.parallel.engine import Engine
from shoal.parallel.optimizer import Factory
from shoal.parallel.placement import mesh_of
from shoal.strategy import Strategy, parse, require_legal
from shoal.train.launch.join import join


def engine(
    model: nn.Module,
    strategy: str | Strategy,
    *,
    optimizer: Factory,
    options: Options = lambda name, param: {},
    clip: float | None = None,
    sync_batch_norm: bool = True,
) -> Engine:
    """Joins the ranks that a launcher started and makes the model train by the strategy."""
    wanted = parse(strategy) if isinstance(strategy, str) else strategy
    me = join()
    require_legal(wanted, world=me.world)
    mesh = mesh_of(wanted, rank=me.rank, backend=me.backend)
    if me.device.type != "cpu":
        model.to(me.device)
    torch.set_num_threads(1 if me.world > 1 and me.device.type == "cpu" else torch.get_num_threads())
    return parallelize(
        model, wanted, mesh, optimizer=optimizer, options=options, clip=clip,
        elementwise=elementwise(optimizer), batch_norm="sync" if sync_batch_norm else "local",
    )  # fmt: skip

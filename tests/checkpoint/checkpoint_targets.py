"""A small awkward model under any strategy, and what ranks do with its checkpoints in tests.

The model has tied weights, batch norm, a parameter that is never used, a frozen one, a scalar one, one
without elements and sizes that divide by nothing, so that pieces fall on every side of every boundary.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shoal.checkpoint import save as checkpoint_module
from shoal.checkpoint.save import (
    CheckpointFailed,
    average_buffers,
    find_intact,
    open_checkpoint,
    restore,
    save,
)
from shoal.comm.json_exchange import exchange
from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Mesh
from shoal.launch.join import join
from shoal.parallel.apply import parallelize
from shoal.parallel.engine import Engine
from shoal.strategy import parse

WORDS, WIDTH = 37, 11

OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-3, momentum=0.9),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-3),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.narrow = nn.Linear(3 * WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(3, 3)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("mask", torch.full((3,), -torch.inf))
        self.register_buffer("passing", torch.randn(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x)
        for block in self.blocks:
            h = block(h)
        h = self.norm(h.transpose(1, 2)).transpose(1, 2)
        return self.head(h * self.scale + self.frozen.sum())


def engine_for(
    text: str,
    *,
    rank: int = 0,
    optimizer: str = "adamw",
    dtype: str = "float64",
    seed: int = 0,
    **options: Any,
) -> Engine:
    torch.manual_seed(seed)
    model = options.pop("model", Net)().to(getattr(torch, dtype))
    strategy = parse(text)
    mesh = Mesh([(axis.name, axis.size) for axis in strategy.axes], rank=rank, backend="shoal-gloo")
    return parallelize(
        model,
        strategy,
        mesh,
        optimizer=OPTIMIZERS[optimizer],
        clip=0.5,
        bucket_bytes=4000,
        options=lambda name, param: {"weight_decay": 0.0} if param.dim() < 2 else {},
        **options,
    )


def train(engine: Engine, first: int, steps: int, *, batch: int = 12) -> list[float]:
    """Losses of steps `first` and on; a step's batch depends on its number only."""
    everyone, losses = engine.replicas.everyone, []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randint(0, WORDS, (batch, 5), generator=generator) for _ in "xy")
        size = batch // everyone.size
        mine = slice(everyone.index * size, (everyone.index + 1) * size)
        out = engine.model(x[mine])
        loss = F.cross_entropy(out.flatten(0, 1), y[mine].flatten(), reduction="sum")
        engine.backward(loss, y[mine].numel())
        losses.append(engine.step(1.0 / (1 + step)).loss)
    return losses


def save_cases(arguments: dict[str, Any], channel: Any) -> list[list[float]]:
    """Each case trains three steps, saves, and goes on for three: the losses of the undisturbed run."""
    me, curves = join(), []
    for case in arguments["cases"]:
        engine = engine_for(case["strategy"], rank=me.rank, optimizer=case["optimizer"], dtype=case["dtype"])
        losses = train(engine, 0, 3)
        save(Path(case["folder"]), engine, step=3, progress={"counter": 36})
        curves.append(losses + train(engine, 3, 3))
        engine.close()
    return curves


def restore_cases(arguments: dict[str, Any], channel: Any) -> list[list[float]]:
    """Each case restores into an engine that began otherwise, saves what it then holds, and trains on."""
    me, curves = join(), []
    for case in arguments["cases"]:
        options = {"optimizer": case["optimizer"], "dtype": case["dtype"], "seed": 99, "rank": me.rank}
        engine = engine_for(case["strategy"], **options)
        found = find_intact(Path(case["folder"]), warn=_refuse)
        assert found is not None
        restore(engine, found)
        assert engine.model.norm.num_batches_tracked == 3
        save(Path(case["again"]), engine, step=3, progress={})
        engine.close()

        engine = engine_for(case["strategy"], **options)
        restore(engine, open_checkpoint(found.path))
        curves.append(train(engine, 3, 3))
        engine.close()
    return curves


def _refuse(text: str) -> None:
    raise AssertionError(f"a checkpoint was passed over: {text}")


def fill_the_disk(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Saves into a small file system until it is full."""
    me = join()
    engine = engine_for(f"dp({me.world}, zero=1)", rank=me.rank)
    train(engine, 0, 1)
    for step in itertools.count(1):
        try:
            save(Path(arguments["folder"]), engine, step=step, progress={}, keep=1000)
        except CheckpointFailed as error:
            left = sorted(path.name for path in Path(arguments["folder"]).iterdir())
            losses = train(engine, 1, 1)
            return {
                "step": step,
                "text": str(error),
                "errno": error.errno,
                "left": left,
                "losses": losses,
                "last_good": str(error.last_good),
            }
    raise AssertionError


def fail_on_one_rank(arguments: dict[str, Any], channel: Any) -> list[Any]:
    """The first save succeeds; the second fails on one rank."""
    me, folder = join(), Path(arguments["folder"])
    engine = engine_for(f"dp({me.world}, zero=2)", rank=me.rank)
    train(engine, 0, 1)
    save(folder, engine, step=1, progress={})

    def full(*args: Any) -> Any:
        if args[0].suffix == ".safetensors":
            args[0].write_bytes(b"half a file")
        raise OSError(errno.ENOSPC, "No space left on device")

    what = arguments["what"]
    genuine = getattr(checkpoint_module, what)
    if me.rank == arguments["rank"]:
        setattr(checkpoint_module, what, full)
    try:
        save(folder, engine, step=2, progress={})
        raise AssertionError("the save should have failed")
    except CheckpointFailed as error:
        text = str(error)
    finally:
        setattr(checkpoint_module, what, genuine)
    left = sorted(path.name for path in folder.iterdir())
    dist.barrier()
    save(folder, engine, step=3, progress={})
    return [text, left]


def local_statistics(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Local batch norm: what a rank holds before and after a save, what was saved, the mean in place."""
    me = join()
    engine = engine_for(f"dp({me.world})", rank=me.rank, batch_norm="local")
    train(engine, 0, 2)
    own = engine.model.norm.running_mean
    before = own.tolist()
    path = save(Path(arguments["folder"]), engine, step=2, progress={})
    after = own.tolist()
    saved = open_checkpoint(path).buffers()
    dist.barrier()
    average_buffers(engine.model, engine.replicas.everyone)
    return {
        "before": before,
        "after": after,
        "saved": saved["norm.running_mean"].tolist(),
        "averaged": own.tolist(),
        "mask": bool((saved["mask"] == -torch.inf).all()),
        "count": int(saved["norm.num_batches_tracked"]),
    }


def only_one_rank_sees_damage(arguments: dict[str, Any], channel: Any) -> list[Any]:
    """Ranks share the work of verifying; all must come to the same end."""
    join()
    warnings: list[str] = []
    found = find_intact(Path(arguments["folder"]), warn=warnings.append)
    return [found and found.step, warnings]


def phases_of_a_save(arguments: dict[str, Any], channel: Any) -> list[str]:
    me = join()
    engine = engine_for(f"dp({me.world}, zero=3)", rank=me.rank)
    train(engine, 0, 1)
    BOOK.take()
    path = save(Path(arguments["folder"]), engine, step=1, progress={})
    restore(engine, open_checkpoint(path))
    return sorted({key.phase for key in BOOK.take().entries})


def exchange_reports(arguments: dict[str, Any], channel: Any) -> list[Any]:
    me = join()
    reports = [{}, {"text": "größer 🐟" * 50}, {"numbers": [1, 2.5, None]}]
    return exchange(reports[me.rank % 3])


def save_for_ever(arguments: dict[str, Any], channel: Any) -> None:
    """For a process that will be killed: goes on from the newest checkpoint and saves after every step."""
    folder = Path(arguments["folder"])
    engine = engine_for("serial")
    found = find_intact(folder, warn=_refuse)
    step = 0
    if found is not None:
        restore(engine, found)
        step = found.step
    while True:
        train(engine, step, 1)
        step += 1
        save(folder, engine, step=step, progress={"step": step})
        channel.say({"step": step, "pid": os.getpid()})

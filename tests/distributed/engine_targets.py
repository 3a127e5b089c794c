"""What the tests of the engine run on real ranks: one engine on a small model, looked at from inside."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Members, Mesh
from shoal.launch.join import join, leave
from shoal.parallel.apply import parallelize
from shoal.parallel.batch_norm import release, synchronise
from shoal.parallel.engine import Engine
from shoal.parallel.result import NonFinite
from shoal.strategy import parse

WIDTH = 64


def start(text: str, model: nn.Module, *, clip: float | None = None, **options: Any) -> tuple[Engine, Any]:
    me, strategy = join(), parse(text)
    mesh = Mesh([(axis.name, axis.size) for axis in strategy.axes], rank=me.rank, backend=me.backend)
    options.setdefault("optimizer", lambda groups: torch.optim.AdamW(groups, lr=0.01))
    return parallelize(model, strategy, mesh, clip=clip, **options), me


def chain(blocks: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(blocks)))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(model(x)).square().sum()


def float_bytes() -> int:
    """Bytes of all floating-point tensors that are alive, each storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.is_floating_point():
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def settled_float_bytes() -> int:
    """The same, once it no longer falls: Gloo's thread lets go of what it sent a moment after its work is done."""
    alive, steady = float_bytes(), 0
    while steady < 10:
        time.sleep(0.01)
        now = float_bytes()
        steady = steady + 1 if now >= alive else 0
        alive = min(alive, now)
    return alive


def memory(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Bytes of parameters and gradients that a stage keeps after backward and between steps."""
    engine, _ = start(arguments["strategy"], chain())
    x = torch.randn(8, WIDTH)
    for _ in range(2):
        engine.backward(loss_of(engine.model, x), 8.0)
        gradients = sum(
            tensor.untyped_storage().nbytes()
            for bucket in engine.buckets
            for tensor in (bucket.full, bucket.shard)
            if tensor is not None
        )
        alive = settled_float_bytes()
        engine.step()
    parameters = sum(bucket.buffer.values.untyped_storage().nbytes() for bucket in engine.buckets)
    parameters += 0 if engine.owner.keeps_full else sum(master.numel() * 4 for master in engine.owner.masters)
    whole = sum(bucket.buffer.padded * 4 for bucket in engine.buckets)
    leave()
    return {"gradients": gradients, "parameters": parameters, "alive_after_backward": alive, "whole": whole}


def non_finite(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """A step with a bad loss on one rank, then a good one; what the parameters were in between."""
    engine, me = start(arguments["strategy"], chain(2), clip=1.0)
    x = torch.ones(4, WIDTH)
    engine.backward(loss_of(engine.model, x), 4.0)
    engine.step()
    before = [piece.values.clone() for piece in engine.owner.parameters()]
    bad = float(arguments["bad"]) if me.rank == me.world - 1 else 1.0
    engine.backward(loss_of(engine.model, x) * bad, 4.0)
    said = ""
    try:
        engine.step()
    except NonFinite as error:
        said = str(error)
    kept = all(torch.equal(piece.values, old) for piece, old in zip(engine.owner.parameters(), before, strict=True))
    engine.backward(loss_of(engine.model, x), 4.0)
    after = engine.step()
    leave()
    return {"said": said, "kept": kept, "loss_after": after.loss, "norm_after": after.grad_norm}


def misuse(arguments: dict[str, Any], channel: Any) -> dict[str, str]:
    """What the engine says to a loop that calls it in the wrong order."""
    engine, _ = start("dp(2)", chain(1))
    x = torch.ones(2, WIDTH)
    said = {}

    def hear(name: str, call: Any) -> None:
        try:
            call()
            said[name] = ""
        except RuntimeError as error:
            said[name] = str(error)

    hear("step first", engine.step)
    engine.backward(loss_of(engine.model, x), 2.0, last=False)
    hear("step without last", engine.step)
    engine.backward(loss_of(engine.model, x), 2.0)
    hear("backward after last", lambda: engine.backward(loss_of(engine.model, x), 2.0))
    engine.step()
    try:
        start("dp(2)", nn.Linear(2, 2).requires_grad_(False))
    except ValueError as error:
        said["nothing to train"] = str(error)
    leave()
    return said


def closed(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """The model after `close`: whole on every rank, and free of hooks."""
    engine, _ = start(arguments["strategy"], chain(3))
    x = torch.ones(2, WIDTH)
    engine.backward(loss_of(engine.model, x), 2.0)
    engine.step()
    with torch.no_grad():
        under_engine = engine.model(x).tolist()
    engine.close()
    BOOK.take()
    loss_of(engine.model, x).backward()
    grads = all(param.grad is not None for param in engine.model.parameters())
    sent = BOOK.take().calls
    with torch.no_grad():
        same = engine.model(x).tolist() == under_engine
    leave()
    return {"same": same, "grads": grads, "sent": sent}


def stale(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Forwards that nobody asked for, between backward and step and in evaluation, change nothing."""
    losses: dict[bool, list[float]] = {}
    for extra in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        model.register_parameter("scale", nn.Parameter(torch.ones(WIDTH)))
        model.register_forward_hook(lambda module, args, output: output * module.scale)
        engine, _ = start(arguments["strategy"], model)
        x = torch.ones(2, WIDTH)
        losses[extra] = []
        for _ in range(3):
            loss = loss_of(engine.model, x)
            if extra:
                with torch.no_grad():
                    engine.model(x)
            engine.backward(loss, 2.0)
            if extra:
                engine.model(x)
            losses[extra].append(engine.step().loss)
        engine.close()
    leave()
    return {"plain": losses[False], "extra": losses[True]}


def norms(arguments: dict[str, Any], channel: Any) -> list[float]:
    """Synchronised batch norm beside torch's own at the full batch: the largest difference of each case."""
    me = join()
    everyone = Mesh([("dp", me.world)], rank=me.rank, backend=me.backend).along("dp")
    found = [_norm_difference(everyone, case) for case in arguments["cases"]]
    leave()
    return found


def _norm_difference(everyone: Members, case: dict[str, Any]) -> float:
    kinds = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
    torch.manual_seed(case["dims"])
    settings = {key: case[key] for key in ("affine", "momentum", "track_running_stats") if key in case}
    ours, theirs = (kinds[case["dims"]](3, dtype=torch.float64, **settings) for _ in range(2))
    if ours.affine:
        with torch.no_grad():
            for module in (ours, theirs):
                module.weight.copy_(torch.tensor([0.5, 2.0, -1.0]))
                module.bias.copy_(torch.tensor([0.1, 0.0, 3.0]))
    synchronise(ours, everyone)
    shares = case["shares"]
    start_at = sum(shares[: everyone.index])
    mine = slice(start_at, start_at + shares[everyone.index])
    apart = 0.0
    for _ in range(3):
        # A large mean with a small spread: where sums of squares would cancel.
        plane = [4] * case["dims"] if case["dims"] > 1 else []
        x = torch.randn(sum(shares), 3, *plane, dtype=torch.float64) * 1e-2 + 100.0
        slope = torch.randn_like(x)
        whole, part = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
        expected, got = theirs(whole), ours(part)
        (expected * slope).sum().backward()
        (got * slope[mine]).sum().backward()
        assert whole.grad is not None
        assert part.grad is not None
        pairs = [(got, expected[mine]), (part.grad, whole.grad[mine])]
        pairs += [(a.double(), b.double()) for a, b in zip(ours.buffers(), theirs.buffers(), strict=True)]
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            total = a.grad.clone()  # type: ignore[union-attr]
            torch.distributed.all_reduce(total)
            pairs.append((total, b.grad))
            a.grad = b.grad = None
        for a, b in pairs:
            if b.numel():
                apart = max(apart, float((a - b).detach().abs().max()) / max(float(b.detach().abs().max()), 1.0))
    return apart


def reaching(arguments: dict[str, Any], channel: Any) -> dict[str, str]:
    """A block's weight used outside the block, while it is away."""
    model = chain(3)
    model.register_forward_hook(lambda module, args, output: output + module[0].weight.square().sum())
    engine, _ = start("dp(2, zero=3)", model)
    said = ""
    try:
        engine.backward(loss_of(engine.model, torch.ones(2, WIDTH)), 2.0)
        engine.step()
    except NonFinite as error:
        said = str(error)
    shapes = [list(param.shape) for param in model.parameters()]
    leave()
    return {"said": said, "shapes": str(shapes)}


def traffic(arguments: dict[str, Any], channel: Any) -> list[dict[str, Any]]:
    """The ledger of a third step, as rows."""
    engine, _ = start(arguments["strategy"], chain(4), clip=arguments.get("clip"))
    x = torch.ones(2, WIDTH)
    for _ in range(3):
        BOOK.take()
        for micro in range(arguments.get("micro", 1)):
            with BOOK.during("forward"):
                loss = loss_of(engine.model, x)
            engine.backward(loss, 2.0, last=micro == arguments.get("micro", 1) - 1)
        engine.step()
    rows = BOOK.take().to_json()
    leave()
    return rows


def _held() -> dict[str, int]:
    """What this process holds of the system: descriptors, threads, and memory it shares with others. The least of
    several looks, as the kernel lets go of a thread a moment after it has ended."""
    gc.collect()
    looks = []
    for _ in range(20):
        looks.append(
            {
                "descriptors": len(os.listdir("/proc/self/fd")),
                "threads": len(os.listdir("/proc/self/task")),
                "shared": Path("/proc/self/maps").read_text().count("memfd:shoal"),
            }
        )
        time.sleep(0.02)
    return {what: min(look[what] for look in looks) for what in looks[0]}


def one_after_another(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """What is held after two engines, and after as many again as were asked for; what a closed group says."""
    me = join(backend=arguments["backend"])
    said = ""
    for count in range(2 + arguments["engines"]):
        engine, _ = start(arguments["strategies"][count % len(arguments["strategies"])], chain(2))
        for _ in range(2):
            engine.backward(loss_of(engine.model, torch.ones(2, WIDTH)), 2.0)
            engine.step()
        engine.close()
        if count == 0:
            group = engine.placement.world.group
            try:
                group.allreduce([torch.ones(1)]).wait()
            except RuntimeError as error:
                said = str(error)
            del group
        del engine
        if count == 1:
            before = _held()
    after = _held()
    groups = len(torch.distributed.distributed_c10d._world.pg_map)
    known = len(BOOK.last)
    torch.distributed.barrier()
    leave()
    return {"before": before, "after": after, "groups": groups, "known": known, "said": said, "rank": me.rank}


class ActiveNorm(nn.BatchNorm2d):
    """As in timm: its own forward, with the activation in it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(x)
        rate = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            rate = 1.0 / float(self.num_batches_tracked) if self.momentum is None else rate
        y = nn.functional.batch_norm(
            x,
            self.running_mean if not self.training or self.track_running_stats else None,
            self.running_var if not self.training or self.track_running_stats else None,
            self.weight,
            self.bias,
            self.training or self.running_mean is None,
            rate,
            self.eps,
        )
        return torch.nn.functional.silu(y)


class Doubled(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x) + x


class SyncDoubled(nn.SyncBatchNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x) + x


class ByHand(nn.Module):
    """No batch norm by its class: it calls the function."""

    def __init__(self, channels: int, **settings: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(channels, dtype=torch.float64))
        self.register_buffer("var", torch.ones(channels, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x, self.mean, self.var, self.scale, None, self.training, 0.2) + x


class OwnStatistics(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean((0, 2, 3), keepdim=True)
        assert self.running_mean is not None
        self.running_mean.lerp_(mean.detach().flatten(), 0.1)
        return x - mean


NORMS: dict[str, Any] = {
    "active": ActiveNorm,
    "doubled": Doubled,
    "sync": nn.SyncBatchNorm,
    "sync subclass": SyncDoubled,
    "by hand": ByHand,
    "own statistics": OwnStatistics,
}


def norm_layers(arguments: dict[str, Any], channel: Any) -> list[Any]:
    """Layers with a forward of their own under `synchronise`, beside themselves at the full batch in one process; a
    refusal as text."""
    me = join()
    everyone = Mesh([("dp", me.world)], rank=me.rank, backend=me.backend).along("dp")
    found: list[Any] = []
    for case in arguments["cases"]:
        torch.manual_seed(3)
        settings = case.get("settings", {})
        ours, theirs = (NORMS[case["kind"]](3, **settings).double() for _ in range(2))
        if case["kind"].startswith("sync"):
            # One process cannot run PyTorch's own here: the plain layer is what it stands for.
            plain = nn.BatchNorm2d(3, **settings).double()
            theirs = plain if case["kind"] == "sync" else Doubled(3, **settings).double()
        synchronise(ours, everyone)
        shares = case["shares"]
        first = sum(shares[: me.rank])
        mine = slice(first, first + shares[me.rank])
        worst = 0.0
        try:
            for _ in range(3):
                x = torch.randn(sum(shares), 3, *case.get("plane", [2, 2]), dtype=torch.float64) + 5.0
                slope = torch.randn_like(x)
                full, part = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
                expected, got = theirs(full), ours(part)
                (expected * slope).sum().backward()
                (got * slope[mine]).sum().backward()
                pairs = [(got, expected[mine]), (part.grad, full.grad[mine])]  # type: ignore[index]
                pairs += [(a.double(), b.double()) for a, b in zip(ours.buffers(), theirs.buffers(), strict=True)]
                worst = max([worst, *(float((a - b).detach().abs().max()) for a, b in pairs if b.numel())])
            release(ours)
            ours.eval(), theirs.eval()
            worst = max(worst, float((ours(x) - theirs(x)).detach().abs().max()))
            found.append(worst)
        except ValueError as error:
            found.append(str(error))
    leave()
    return found


class Choosing(nn.Module):
    """Calls the blocks that its rank is told to call, in that order."""

    def __init__(self, calls: list[int], widths: list[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.calls = calls
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH)) for width in widths
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.calls:
            x = x + self.blocks[number](x)
        return x


def choosing(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Ranks that call different blocks: what is said, and whether the parameters are those of before."""
    me, strategy = join(backend=arguments.get("backend")), parse(arguments["strategy"])
    mesh = Mesh([(axis.name, axis.size) for axis in strategy.axes], rank=me.rank, backend=me.backend)
    model = Choosing([0, 1, 2], arguments["widths"]).to(me.device)
    engine = parallelize(model, strategy, mesh, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
    x = torch.ones(2, WIDTH, device=me.device) * (me.rank + 1)
    losses, said = [], ""
    for calls in ([0, 1, 2], arguments["calls"][me.rank]):
        model.calls = calls
        before = [piece.values.clone() for piece in engine.owner.parameters()]
        try:
            engine.backward(loss_of(model, x), 2.0)
            losses.append(engine.step().loss)
        except ValueError as error:
            if arguments.get("raise"):
                raise
            said = str(error)
            break
    after = list(engine.owner.parameters())
    kept = all(torch.equal(piece.values, old) for piece, old in zip(after, before, strict=True))
    if not said:
        leave()
    return {"said": said, "kept": kept, "losses": losses}


def stop_during_backward(arguments: dict[str, Any], channel: Any) -> list[bool]:
    """Which of three steps say that all stop; rank 1 is asked to in the backward of the second."""
    engine, me = start("dp(2)", chain())
    engine.asked_to_stop = lambda: bool(channel.stop_requested)
    stops = []
    for step in range(3):

        def in_backward(gradient: torch.Tensor, step: int = step) -> None:
            if step == 1 and me.rank == 1:
                channel.ask_to_stop()

        loss = loss_of(engine.model, torch.randn(8, WIDTH))
        loss.register_hook(in_backward)
        engine.backward(loss, 8.0)
        stops.append(bool(engine.step().stop))
    leave()
    return stops

"""One job with each optimiser of the zoo, on real ranks, compared with a plain PyTorch loop and with itself resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from distributed.optimizer_zoo import EVERY, ONE_GROUP, Net
from shoal.checkpoint.save import open_checkpoint, require_savable, restore, save
from shoal.job import Job, TensorData
from shoal.job.facts import infer_facts
from shoal.job.probe_run import needs_closure
from shoal.launch.join import join, leave
from shoal.runtime.setup import Prepared, prepare
from shoal.strategy import parse, require_legal

STEPS, MIDDLE, BATCH = 6, 3, 6


def schedule(step: int) -> float:
    return 1.0 / (1 + step // 2)


def constant(step: int) -> float:
    return 1.0


def options(name: str, param: torch.Tensor) -> dict[str, Any]:
    return {} if param.dim() > 1 else {"lr": 0.03}


def job_of(name: str) -> Job:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(40, 1, generator=generator, dtype=torch.float64)
    plain = name in ONE_GROUP or name == "WithoutRate"
    return Job(
        name="zoo",
        model=Net,
        train=TensorData(x=x, y=y),
        inputs=("x",),
        loss=lambda out, batch: ((out - batch["y"]).square().sum(), len(out)),
        optimizer=EVERY[name],
        options=(lambda *_: {}) if plain else options,
        schedule=constant if name in ("SelfPaced", "WithoutRate", "LBFGS") else schedule,
        global_batch=BATCH,
        steps=STEPS,
        clip=None,
    )


def plain_loop(name: str, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """PyTorch alone: the full batch, the job's optimiser on the model's own parameters."""
    job = job_of(name)
    torch.manual_seed(job.seed)
    model = Net().double()
    groups: list[dict[str, Any]] = []
    for path, param in model.named_parameters():
        mine = dict(job.options(path, param))
        same = next((g for g in groups if {k: v for k, v in g.items() if k != "params"} == mine), None)
        if same is None:
            groups.append({"params": [param], **mine})
        else:
            same["params"].append(param)
    optimizer = job.optimizer(groups)
    base = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
    order, counter = job.order(), 0
    for step in range(steps):
        batch = job.train.batch(order.indices(counter))
        counter = order.next(counter)

        def closure(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = (model(batch["x"]) - batch["y"]).square().mean()
            loss.backward()
            return loss

        if job.schedule is schedule:
            for group, lr in zip(optimizer.param_groups, base, strict=True):
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(lr * schedule(step))
                else:
                    group["lr"] = lr * schedule(step)
        if needs_closure(optimizer):
            optimizer.step(closure)  # type: ignore[arg-type]
        else:
            closure()
            optimizer.step()
    return {path: param.detach() for path, param in model.named_parameters()}


def run(ready: Prepared, first: int, last: int, counter: int) -> int:
    for step in range(first, last):
        ready.runner.step(step, counter)
        counter = ready.runner.order.next(counter)
    return counter


def pieces(ready: Prepared) -> list[tuple[str, int, torch.Tensor]]:
    return [(piece.name, piece.start, piece.values.clone()) for piece in ready.engine.owner.parameters()]


def difference(ready: Prepared, wanted: dict[str, torch.Tensor]) -> float:
    rows = [
        float((values - wanted[name].reshape(-1)[start : start + values.numel()]).abs().max())
        for name, start, values in pieces(ready)
    ]
    return max(rows, default=0.0)


def zoo(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """For each optimiser and strategy: a refusal, or how far from the plain loop it ended, and whether a run that was
    resumed in the middle ended where the unbroken one did."""
    me = join()
    found: dict[str, Any] = {}
    for name in arguments["optimizers"]:
        torch.manual_seed(0)
        wanted = plain_loop(name)
        facts = infer_facts(job_of(name))
        for strategy in arguments["strategies"]:
            label = f"{name} {strategy}"
            try:
                require_legal(parse(strategy), facts=facts)
            except ValueError as error:
                found[label] = {"refused": str(error)}
                continue

            def ready(strategy: str = strategy, name: str = name) -> Prepared:
                return prepare(job_of(name), parse(strategy), rank=me.rank, backend=me.backend, dtype=torch.float64)

            unbroken = ready()
            require_savable(unbroken.engine, unbroken.optimizer)
            counter = run(unbroken, 0, MIDDLE, 0)
            folder = Path(arguments["folder"]) / label.replace(" ", "-")
            path = save(folder, unbroken.engine, step=MIDDLE, progress={})
            run(unbroken, MIDDLE, STEPS, counter)
            apart = difference(unbroken, wanted)
            ended = pieces(unbroken)
            unbroken.engine.close()
            resumed = ready()
            restore(resumed.engine, open_checkpoint(path))
            run(resumed, MIDDLE, STEPS, counter)
            same = all(torch.equal(a[2], b[2]) for a, b in zip(ended, pieces(resumed), strict=True))
            resumed.engine.close()
            others = {}
            for other in arguments.get("others", ()):
                moved = ready(other)
                restore(moved.engine, open_checkpoint(path))
                run(moved, MIDDLE, STEPS, counter)
                others[other] = difference(moved, wanted)
                moved.engine.close()
            found[label] = {"difference": apart, "resumed": same, "others": others}
    leave()
    return found


def own_loop(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """A loop of one's own, with a scheduler, compared with plain PyTorch; and what it says to misuse."""
    import shoal

    torch.manual_seed(1)
    model = Net().double()
    engine = shoal.engine(
        model, arguments["strategy"], optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.05), options=options
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, [schedule, schedule])
    torch.manual_seed(1)
    twin = Net().double()
    many = [p for p in twin.parameters() if p.dim() > 1], [p for p in twin.parameters() if p.dim() < 2]
    plain = torch.optim.AdamW([{"params": many[0]}, {"params": many[1], "lr": 0.03}], lr=0.05)
    other = torch.optim.lr_scheduler.LambdaLR(plain, [schedule, schedule])
    generator, results = torch.Generator().manual_seed(5), []
    micros = engine.micro_batches
    for _ in range(STEPS):
        x = torch.randn(12, 5, generator=generator, dtype=torch.float64)
        y = torch.randn(12, 1, generator=generator, dtype=torch.float64)
        result = None
        for mx, my in zip(x.chunk(micros), y.chunk(micros), strict=True):
            mine = engine.share(len(mx))
            loss = (model(mx[mine]) - my[mine]).square().sum()
            engine.backward(loss, len(mx[mine]))
            result = engine.step()
            results.append(result is None)
        assert result is not None
        scheduler.step()
        plain.zero_grad(set_to_none=True)
        loss = (twin(x) - y).square().mean()
        loss.backward()
        plain.step()
        other.step()
        assert abs(result.loss - float(loss)) < 1e-10
    state = engine.state_dict()
    apart = max(float((state[name] - value).abs().max()) for name, value in twin.state_dict().items())
    said = {}
    for what, call in {
        "state_dict": lambda: model.inner.state_dict(),
        "load": lambda: model.load_state_dict(state),
        "step": engine.optimizer.step,
        "last": lambda: engine.backward(loss, 1, last=True),
    }.items():
        try:
            call()
            said[what] = ""
        except (RuntimeError, ValueError) as error:
            said[what] = str(error)
    engine.load_state_dict({name: torch.ones_like(value) for name, value in state.items()})
    ones = all(bool((value == 1).all()) for value in engine.state_dict().values())
    engine.close()
    leave()
    return {
        "apart": apart,
        "keys": list(state) == list(twin.state_dict()),
        "said": said,
        "ones": ones,
        "skipped": results[:micros],
    }


def own_loop_amp(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """What the model computes in, and what it gives, under amp."""
    import shoal

    torch.manual_seed(1)
    seen: list[str] = []

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.inner(x)
            seen.append(str(out.dtype))
            return out

    model = Watching()
    engine = shoal.engine(model, arguments["strategy"], optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
    out = model(torch.randn(4, 5))
    engine.backward(out.sum(), 4)
    engine.step()
    engine.close()
    after = model(torch.randn(4, 5)).dtype
    leave()
    return {"inside": seen[0], "outside": str(out.dtype), "after": str(after)}

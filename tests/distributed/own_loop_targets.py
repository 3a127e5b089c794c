"""Loops of one's own that one process would train otherwise: what the engine says to each, on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.launch.join import leave

SAMPLES = 12


class Ema(nn.Module):
    """Keeps a moving average, a count and, where asked, the like in a frozen parameter or in an attribute."""

    def __init__(self, kept_in: str = "buffer") -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.kept_in = kept_in
        start = torch.zeros(3, dtype=torch.float64)
        if kept_in == "buffer":
            self.register_buffer("mean", start)
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        elif kept_in == "parameter":
            self.mean = nn.Parameter(start, requires_grad=False)
        else:
            self.mean = start

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        centred = out - self.mean.clone()
        if self.training:
            with torch.no_grad():
                new = 0.9 * self.mean + 0.1 * out.mean(0)
                if self.kept_in == "attribute":
                    self.mean = new
                else:
                    self.mean.copy_(new)
                if self.kept_in == "buffer":
                    self.seen += len(x)
        return centred


def data(step: int, samples: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(samples, 4, generator=generator, dtype=torch.float64),
        torch.randint(3, (samples,), generator=generator),
    )


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


class NormScaled(torch.optim.SGD):
    """Steps by the norm of all gradients, which a shard does not have."""

    def step(self, closure: Any = None) -> Any:
        every = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = sum(float(param.grad.square().sum()) for param in every) ** 0.5  # type: ignore[union-attr]
        for param in every:
            param.grad.div_(norm + 1e-3)  # type: ignore[union-attr]
        return super().step(closure)


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def buffers(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Undeclared state that replicas change; then declared, against one process."""
    found: dict[str, Any] = {}
    for kept_in in ("buffer", "parameter", "attribute"):
        torch.manual_seed(1)
        model = Ema(kept_in).double()
        engine = shoal.engine(model, arguments["strategy"], optimizer=sgd)
        start = engine.state_dict()["inner.weight"]
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            found[kept_in] = refused(lambda model=model, engine=engine: one_step(model, engine, 0))
            found[f"{kept_in} warned"] = [str(each.message) for each in seen]
        found[f"{kept_in} updated"] = not torch.equal(start, engine.state_dict()["inner.weight"])
        engine.close()
    torch.manual_seed(1)
    model = Ema().double()
    declared = {"mean": "average", "seen": "sum"}
    engine = shoal.engine(model, arguments["strategy"], optimizer=sgd, buffers=declared)
    torch.manual_seed(1)
    twin = Ema().double()
    plain = sgd(twin.parameters())
    for step in range(5):
        if step == 3:  # Not a forward's change, and alike on all: no sum of changes.
            for each in (model, twin):
                each.seen.zero_()
        one_step(model, engine, step)
        x, y = data(step, SAMPLES + 1)
        plain.zero_grad()
        F.cross_entropy(twin(x), y).backward()
        plain.step()
    found["seen"] = [int(model.seen), int(twin.seen)]
    found["mean apart"] = float((model.mean - twin.mean).abs().max())
    engine.close()
    found["misspelt"] = refused(
        lambda: shoal.engine(Ema(), arguments["strategy"], optimizer=sgd, buffers={"maen": "average"})
    )
    found["mode"] = refused(lambda: shoal.engine(Ema(), arguments["strategy"], optimizer=sgd, buffers="mean"))
    leave()
    return found


def one_step(model: nn.Module, engine: Any, step: int) -> None:
    x, y = data(step, SAMPLES + 1)
    mine = engine.share(len(x))
    engine.backward(F.cross_entropy(model(x[mine]), y[mine], reduction="sum"), len(x[mine]))
    engine.step()


def losses(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """What the first step says of counts, and `check` of losses."""
    x, y = data(0)

    def run(
        count: Callable[[torch.Tensor], Any],
        samples: int = SAMPLES,
        *,
        reduction: str = "sum",
        check: bool = True,
        strategy: str = arguments["strategy"],
    ) -> list[str]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
        engine = shoal.engine(model, strategy, optimizer=sgd)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if check:
                before = engine.state_dict()
                engine.check(lambda x, y: (F.cross_entropy(model(x), y, reduction="sum"), len(x)), x, y)
                assert all(map(torch.equal, before.values(), engine.state_dict().values()))
                assert all(module.training for module in model.modules())
                assert model[2].p == 0.5
            xs, ys = data(0, samples)
            for mx, my in zip(xs.chunk(engine.micro_batches), ys.chunk(engine.micro_batches), strict=True):
                mine = engine.share(len(mx))
                engine.backward(F.cross_entropy(model(mx[mine]), my[mine], reduction=reduction), count(mx[mine]))
                engine.step()
        engine.close()
        return [str(each.message) for each in seen]

    found: dict[str, Any] = {
        "right": run(len),
        "unchecked": run(len, check=False),
        "right, zero=3, accumulate": run(len, strategy="dp(2, zero=3) * accumulate(2)"),
        "mean": run(lambda x: 1, reduction="mean"),
        "uneven": run(lambda x: 7, samples=13),
        "global": run(lambda x: SAMPLES),
    }
    model = nn.Linear(4, 3).double()
    engine = shoal.engine(model, arguments["strategy"], optimizer=sgd)

    def contrastive(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
        out = F.normalize(model(x), dim=1)
        return F.cross_entropy(out @ out.T, torch.arange(len(x)), reduction="sum"), len(x)

    for name, loss in {
        "check mean": lambda x, y: (F.cross_entropy(model(x), y), 1),
        "check count": lambda x, y: (F.cross_entropy(model(x), y, reduction="sum"), 12),
        "check coupled": contrastive,
    }.items():
        found[name] = refused(lambda loss=loss: engine.check(loss, x, y))
    found["one"] = refused(lambda: engine.check(contrastive, x[:1], y[:1]))
    found["vector"] = refused(lambda: engine.backward(F.cross_entropy(model(x), y, reduction="none"), 12))
    weight = model.weight.square().sum()
    found["count grad"] = refused(lambda: engine.backward(F.cross_entropy(model(x), y, reduction="sum"), weight))
    engine.close()
    found["optimizer"] = refused(
        lambda: shoal.engine(nn.Linear(4, 3), "dp(2, zero=1)", optimizer=lambda groups: NormScaled(groups, lr=0.1))
    )
    leave()
    return found


class Block(nn.Module):
    """Attention and a feed-forward part, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (y.view(b, t, 2, d // 2).transpose(1, 2) for y in self.qkv(x).split(d, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(x)))


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens(step: int, samples: int = 6) -> dict[str, torch.Tensor]:
    drawn = torch.randint(12, (samples, 9), generator=torch.Generator().manual_seed(step))
    return {"x": drawn[:, :-1], "y": drawn[:, 1:]}


def token_loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    labels = batch["y"]
    return F.cross_entropy(output.reshape(-1, output.shape[-1]), labels.reshape(-1), reduction="sum"), labels.numel()


def built() -> nn.Module:
    torch.manual_seed(4)
    return Tiny().double()


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def plain_loop(steps: int) -> tuple[dict[str, torch.Tensor], list[float], float]:
    """Plain PyTorch: weights, losses, and the loss of another batch."""
    model = built()
    optimizer = adamw(model.parameters())
    scheduler, losses = halving(optimizer), []
    for step in range(steps):
        batch = tokens(step)
        optimizer.zero_grad()
        total, count = token_loss(model(batch["x"]), batch)
        (total / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        losses.append(float(total.detach() / count))
    other = tokens(99, 5)
    total, count = token_loss(model(other["x"]), other)
    return model.state_dict(), losses, float(total / count)


def any_axes(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Five steps by `train_batch`, saved after the third and loaded by a second engine that makes the last two."""
    weights, losses, other = plain_loop(5)
    found: dict[str, Any] = {"losses": losses, "other": other}

    def engine() -> Any:
        return shoal.engine(
            built(), arguments["strategy"], optimizer=adamw, clip=0.5, example=tokens(0), loss=token_loss
        )

    first = engine()
    scheduler = halving(first.optimizer)
    mine = []
    for step in range(3):
        mine.append(first.train_batch(tokens(step)).loss)
        scheduler.step()
    first.save(arguments["folder"], step=3, progress={"scheduler": scheduler.state_dict()})
    first.close()
    leave()
    with engine() as again:
        scheduler = halving(again.optimizer)
        step, progress = again.load(arguments["folder"])
        scheduler.load_state_dict(progress["scheduler"])
        for at in range(step, 5):
            mine.append(again.train_batch(tokens(at)).loss)
            scheduler.step()
        found |= {"mine": mine, "evaluated": again.evaluate_batch(tokens(99, 5))["loss"], "rank": again.rank}
        found["lr"] = again.optimizer.param_groups[0]["lr"]
        model = again.model
        state = None
        try:
            state = again.state_dict()
        except RuntimeError as error:
            found["refused"] = str(error)
        path = again.save(arguments["folder"], step=5)
    saved = shoal.load_weights(path)
    found["saved"] = max(float((saved[name] - weights[name]).abs().max()) for name in weights)
    if state is not None:
        found["worst"] = max(float((state[name] - weights[name]).abs().max()) for name in weights)
        found["given back"] = max(
            float((value - weights[name]).abs().max()) for name, value in model.state_dict().items()
        )
    return found


def three_lines(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """The loop of three lines under zero=3: scheduler, save, load, evaluation, and what is refused."""
    _, losses, other = plain_loop(4)
    engine = shoal.engine(built(), arguments["strategy"], optimizer=adamw, clip=0.5)
    model, scheduler, mine = engine.model, halving(engine.optimizer), []

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
        return token_loss(model(x), {"y": y})

    def one(step: int) -> None:
        batch, part = tokens(step), engine.share(6)
        result = None
        x, y = batch["x"][part], batch["y"][part]
        for rows in torch.arange(len(x)).chunk(engine.micro_batches):
            engine.backward(*loss_of(x[rows], y[rows]))
            result = engine.step()
        mine.append(result.loss)
        scheduler.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(2):
            one(step)
        engine.save(arguments["folder"], step=2, progress={"scheduler": scheduler.state_dict()})
        one(90)
        scheduler.step()
        mine.pop()
        step, progress = engine.load(arguments["folder"])  # The scheduler keeps its optimiser.
        scheduler.load_state_dict(progress["scheduler"])
        for at in range(step, 4):
            one(at)
    batch = tokens(99, 5)
    found = {
        "mine": mine,
        "losses": losses,
        "other": other,
        "evaluated": engine.evaluate(loss_of, batch["x"], batch["y"]),
        "one sample": engine.evaluate(loss_of, batch["x"][:1], batch["y"][:1]),
        "lr": engine.optimizer.param_groups[0]["lr"],
    }
    for what, call in {
        "train_batch": lambda: engine.train_batch(batch),
        "pp": lambda: shoal.engine(built(), "pp(2, 'gpipe', micro=2)", optimizer=adamw),
        "nothing saved": lambda: engine.load(arguments["folder"] + "-none"),
    }.items():
        try:
            call()
        except (RuntimeError, ValueError) as error:
            found[what] = str(error)
    engine.close()
    leave()
    return found

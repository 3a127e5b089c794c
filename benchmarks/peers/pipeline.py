"""Pipelines by hand: the GPT cut into stages of equal numbers of blocks, run by the schedules of
`torch.distributed.pipelining`; and the limit, a rank's stages on all micro-batches without waiting for anybody.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from peers.common import (
    LIMIT,
    Contestants,
    Step,
    batches,
    clip_by,
    gpt_job,
    optimizer_of,
    shoal_runner,
    shoal_step,
    squares,
    sum_over,
    text_of,
)
from shoal.job import Job, LayoutHints
from shoal.job.models.gpt import GPT, MLP, GPTConfig
from shoal.runtime.step import build_model
from shoal.strategy import parse
from shoal.strategy.schedule import stage_rank
from shoal.strategy.terms import pp

SCHEDULES: dict[str, Any] = {
    "pp(2, 'gpipe', micro=4)": ScheduleGPipe,
    "pp(2, '1f1b', micro=4)": Schedule1F1B,
    "pp(2, '1f1b', micro=8)": Schedule1F1B,
    "pp(2, 'interleaved', micro=4, chunks=2)": ScheduleInterleaved1F1B,
    "pp(2, 'zero-bubble', micro=4)": ScheduleInterleavedZeroBubble,
    "pp(2, 'zero-bubble', micro=4, chunks=2)": ScheduleZBVZeroBubble,
}
PEERS = {text: f"{schedule.__name__}, micro={parse(text).term(pp).micro}" for text, schedule in SCHEDULES.items()}


def contestants(job: Job, me: Any, plain: Any) -> Contestants:
    found: Contestants = {LIMIT: partial(limit_step, job, me, plain)}
    for text, schedule in SCHEDULES.items():
        found[PEERS[text]] = partial(schedule_step, job, parse(text).term(pp), schedule, me, plain)
        found[text] = partial(shoal_step, job, text, me)
    return found


class Stage(nn.Module):
    """Some blocks; the first stage has the embeddings before them, the last the head behind them."""

    def __init__(self, model: GPT, number: int, count: int) -> None:
        super().__init__()
        layers = len(model.blocks)
        self.tokens, self.positions = (model.tokens, model.positions) if number == 0 else (None, None)
        self.blocks = model.blocks[number * layers // count : (number + 1) * layers // count]
        self.norm, self.head = (model.norm, model.head) if number == count - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.size(1)))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def schedule_step(job: Job, term: pp, schedule: Any, me: Any, plain: Any) -> Step:
    model, count = build_model(job), term.n * term.chunks
    mine = [n for n in range(count) if stage_rank(n, term.n, term.chunks, term.schedule) == me.rank]
    stages = [_stage(model, n, count, job.global_batch // term.micro, plain) for n in mine]
    tokens = job.global_batch * model.config.sequence
    ran = schedule(
        stages if term.schedule in ("interleaved", "zero-bubble") else stages[0],
        term.micro,
        scale_grads=False,
        loss_fn=lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / tokens,
    )
    parts = nn.ModuleList(stage.submod for stage in stages)
    optimizer = optimizer_of(job, parts.named_parameters())
    data = batches(job)
    has_loss = count - 1 in mine

    def step() -> float | None:
        batch, losses = next(data), []
        optimizer.zero_grad(set_to_none=True)
        ran.step(*([batch["x"]] if 0 in mine else []), **({"target": batch["y"], "losses": losses} if has_loss else {}))
        clip_by(parts.parameters(), sum_over(squares(parts.parameters()), plain).sqrt(), job.clip)
        optimizer.step()
        return float(torch.stack(losses).detach().sum()) if has_loss else None

    return step


def _stage(model: GPT, number: int, count: int, samples: int, plain: Any) -> PipelineStage:
    config = model.config

    def activations(width: int, learns: bool = True) -> Tensor:
        return torch.zeros(samples, config.sequence, width, requires_grad=learns)

    into = torch.zeros(samples, config.sequence, dtype=torch.int64) if number == 0 else activations(config.hidden)
    out = activations(config.vocab if number == count - 1 else config.hidden)
    # With shapes given, the schedule need not run a forward of its own to find them.
    return PipelineStage(
        Stage(model, number, count),
        number,
        count,
        torch.device("cpu"),
        input_args=(into,),
        output_args=(out,),
        group=plain,
    )


def limit_step(job: Job, me: Any, plain: Any, micro: int = 4) -> Step:
    model = build_model(job)
    stage = Stage(model, me.rank, me.world)
    optimizer = optimizer_of(job, stage.named_parameters())
    data = batches(job)
    samples, sequence, hidden = job.global_batch // micro, model.config.sequence, model.config.hidden
    activation = torch.randn(samples, sequence, hidden)

    def step() -> None:
        batch = next(data)
        optimizer.zero_grad(set_to_none=True)
        for x, y in zip(batch["x"].chunk(micro), batch["y"].chunk(micro), strict=True):
            if me.rank == 0:
                stage(x).backward(activation)
            else:
                logits = stage(activation.clone().requires_grad_())
                (F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / batch["y"].numel()).backward()
        clip_by(stage.parameters(), squares(stage.parameters()).sqrt(), job.clip)
        optimizer.step()

    return step


class Unbalanced(GPT):
    """Half of its work lies at its end, in a wide last block and a head for many words."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        wide = MLP(config)
        wide.up, wide.down = nn.Linear(config.hidden, 16 * config.hidden), nn.Linear(16 * config.hidden, config.hidden)
        self.blocks[-1].mlp = wide


BALANCED, EQUAL = "stages of equal cost", "stages of equal numbers of pieces"


def stage_contestants(size: str, batch: int, me: Any) -> Contestants:
    """The same pipeline over an unbalanced model, cut by cost and cut by count."""
    from dataclasses import replace

    job = gpt_job(size, batch=batch)
    small = size == "tiny"
    config = replace(job.model().config, vocab=1024 if small else 8192, layers=4 if small else 6)
    job = replace(job, model=partial(Unbalanced, config), train=text_of(config))
    even = replace(job, layout=LayoutHints(balanced=False))
    text = "pp(2, '1f1b', micro=8)"
    return {EQUAL: partial(shoal_step, even, text, me), BALANCED: partial(shoal_step, job, text, me)}


def bubble(job: Job, micro: int, me: Any, plain: Any, *, steps: int) -> dict[str, float]:
    """Idle time of both ranks over the time of a step without its update: waiting for messages, and from a rank's last
    backward until the slowest rank's."""
    import time

    import torch.distributed as dist

    runner, step = shoal_runner(job, f"pp(2, '1f1b', micro={micro})", me)
    blocked, ended = [0.0], [0.0]
    borders = runner.executor.borders
    receive, close = borders._fetch, runner.engine.close_backward

    def timed_receive(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        answer = receive(*args, **kwargs)
        blocked[0] += time.perf_counter() - start
        return answer

    def timed_close() -> None:
        ended[0] = time.perf_counter()
        close()

    for _ in range(2):
        step()
    idle = makespan = 0.0
    borders._fetch, runner.engine.close_backward = timed_receive, timed_close
    try:
        for _ in range(steps):
            dist.barrier(group=plain)
            start, blocked[0] = time.perf_counter(), 0.0
            step()
            mine = ended[0] - start
            longest = torch.tensor([mine], dtype=torch.float64)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=plain)
            waited = torch.tensor([blocked[0] + float(longest) - mine], dtype=torch.float64)
            idle += float(sum_over(waited, plain)) / me.world
            makespan += float(longest)
    finally:
        borders._fetch, runner.engine.close_backward = receive, close
    return {"idle_s": idle / steps, "makespan_s": makespan / steps, "in_flight": runner.executor.most_in_flight}

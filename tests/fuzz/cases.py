"""What is drawn: a Case says which model, data, loss, optimiser and batch; strategies are drawn for it separately.

A case is a pure function of its number, so a failure is reproduced by that number alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

CHANNELS, SIDE, CLASSES, VOCAB, LENGTH, HEADS = 2, 6, 5, 13, 8, 4

BLOCKS = {
    "vectors": ("mlp", "gated", "conditional", "per-sample", "scaled", "mlp", "gated", "ema"),
    "tokens": ("sdpa", "mha", "hand", "mlp", "gated", "sdpa", "hand", "experts", "scaled"),
    "images": ("conv", "depthwise", "conv"),
}
OPTIMIZERS = (
    "SGD",
    "momentum",
    "nesterov",
    "Adam",
    "AdamW",
    "AdamW",
    "amsgrad",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
    "Adafactor",
    "tensor-lr",
    "counted",
    "lamb",
    "global",
)
FULL_OPTIMIZERS = ("orthogonal", "preconditioned", "lamb", "Adafactor")
"""They look at full parameters, of which ranks may hold pieces."""
SCHEDULES = ("constant", "warm-up", "decay")
SINCE = 3400
"""Cases from this number on also draw servers, islands where they are the synchronous run, and more optimisers."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job, without a strategy."""

    seed: int
    kind: str
    width: int
    blocks: tuple[str, ...]
    norm: str
    bias: bool
    tied: bool
    repeated: bool
    frozen: bool
    centred: bool
    """The model subtracts the mean over the batch: samples are coupled inside the model."""
    causal: bool
    dropout: float
    loss: str
    ignored: bool
    samples: int
    batch: int
    last_batch: str
    clip: float | None
    optimizer: str
    schedule: str
    decay_matrices: bool
    steps: int

    @property
    def coupled(self) -> bool:
        """Whether the loss of a batch is not the sum of the losses of its samples."""
        return self.centred or self.loss == "contrastive"

    @property
    def averages_buffers(self) -> bool:
        """Whether the job declares what replicas do with the buffer that a forward updates; half of those that have
        one do."""
        return "ema" in self.blocks and self.seed % 2 == 1

    @property
    def linear(self) -> bool:
        """Whether the mean of islands that step by themselves once is the synchronous step."""
        plain = self.optimizer == "SGD" and self.clip is None and not self.coupled
        sometimes = "conditional" in self.blocks or "experts" in self.blocks or "per-sample" in self.blocks
        return plain and not self.batch_norm and "ema" not in self.blocks and not (self.decay_matrices and sometimes)

    @property
    def batch_norm(self) -> bool:
        return self.kind == "images" and self.norm in ("batch", "fused-batch")


def case_of(number: int) -> Case:
    """The case with this number."""
    draw = random.Random(number)
    kind = draw.choice(("vectors", "tokens", "tokens", "images"))
    width = draw.choice((8, 12, 16))
    norms = {"images": ("batch", "fused-batch", "layer", "none")}.get(kind, ("layer", "rms", "none"))
    names = draw.choices(BLOCKS[kind], k=draw.choice((2, 3, 4, 4)))
    losses = {
        "tokens": ("mean", "mean", "z"),
        "vectors": ("mean", "mse", "contrastive", "mean", "z"),
        "images": ("mean", "z", "mse"),
    }[kind]
    batch = draw.choice((12, 12, 24, 8, 16, 7))
    case = Case(
        seed=number,
        kind=kind,
        width=width,
        blocks=tuple(names),
        norm=draw.choice(norms),
        bias=draw.random() < 0.7,
        tied=draw.random() < 0.3,
        repeated=draw.random() < 0.15,
        frozen=draw.random() < 0.1,
        centred=kind == "vectors" and draw.random() < 0.1,
        causal=draw.random() < 0.5,
        dropout=draw.choice((0.0, 0.0, 0.0, 0.2)),
        loss=draw.choice(losses),
        ignored=draw.random() < 0.5,
        samples=draw.choice((24, 31, 40)),
        batch=batch,
        last_batch=draw.choice(("wrap", "wrap", "short")),
        clip=draw.choice((None, 0.5)),
        optimizer=draw.choice(OPTIMIZERS),
        schedule=draw.choice(SCHEDULES),
        decay_matrices=draw.random() < 0.3,
        steps=draw.choice((3, 4, 6)),
    )
    if number < SINCE:
        return case
    of = draw.random()
    if of < 0.25:
        return replace(case, optimizer=draw.choice(FULL_OPTIMIZERS))
    return replace(case, optimizer="SGD", clip=None) if of < 0.5 else case


def strategy_of(case: Case, draw: random.Random, *, most_ranks: int = 8) -> str:
    """The text of a strategy of at least two ranks or two micro-batches; it need not be legal for the case."""
    products = [("dp",), ("dp",), ("dp", "dp"), ("pp",), ("tp",), ("pp", "dp"), ("dp", "tp"), ("pp", "dp", "tp"), ()]
    if case.kind == "tokens":
        products += [("cp",), ("dp", "cp"), ("cp", "tp"), ("pp", "tp")]
    if "experts" in case.blocks:
        products += [("ep",), ("dp", "ep"), ("pp", "ep")]
    kinds = draw.choice(products)
    other = case.seed >= SINCE and draw.random() < 0.5
    if other and "dp" not in kinds[:1]:
        kinds = ("dp", *(kind for kind in kinds if kind != "dp"))
    terms, left, sharded, piped = [], most_ranks, False, False
    for kind in kinds:
        sizes = [n for n in (2, 2, 2, 2, 3, 4) if n <= left]
        if not sizes:
            break
        n = draw.choice(sizes)
        left //= n
        if kind == "dp" and other and not terms:
            terms.append(f"dp({n}, {_in_place_of_all_reduce(case, draw)})")
        elif kind == "dp":
            zero = 0 if sharded else draw.choice((0, 0, 1, 2, 3))
            sharded = sharded or zero > 0
            via = ", via=shared()" if not zero and kinds == ("dp",) and draw.random() < 0.2 else ""
            terms.append(f"dp({n}, zero={zero})" if zero else f"dp({n}{via})")
        elif kind == "pp":
            n = min(n, 3)
            piped = True
            schedule = draw.choice(("gpipe", "1f1b", "1f1b", "interleaved", "zero-bubble"))
            chunks = ", chunks=2" if schedule == "interleaved" else ""
            terms.append(f'pp({n}, "{schedule}", micro={draw.choice((1, 2, 3, 4))}{chunks})')
        elif kind == "tp":
            terms.append(f"tp({n}{', sequence=True' if draw.random() < 0.3 else ''})")
        elif kind == "cp":
            terms.append(f'cp({n}, "{draw.choice(("ring", "ulysses"))}")')
        else:
            terms.append(f"ep({n})")
    if not piped and (not terms or draw.random() < 0.25):
        terms.append(f"accumulate({draw.choice((2, 3))})")
    if draw.random() < 0.2:
        terms.append(f'recompute("{draw.choice(("full", "selective"))}")')
    return " * ".join(terms)


def _in_place_of_all_reduce(case: Case, draw: random.Random) -> str:
    """What a level of dp may use instead, with the same result."""
    if not case.linear or draw.random() < 0.25:
        return f"sync=bsp(), via=ps({draw.choice((1, 2))})"
    same = ["local(1)", "diloco(1, lr=1.0, momentum=0.0)", "bmuf(1, momentum=0.0)"]
    if not case.ignored and case.last_batch == "wrap":
        same.append('gossip("complete")')  # All islands count alike.
    return f"sync={draw.choice(same)}"

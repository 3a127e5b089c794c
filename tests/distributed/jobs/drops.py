"""Jobs that draw random numbers in every spelling: modules, functions, attention, noise, layers that are left out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.job import Job, TensorData, cross_entropy

HIDDEN, HEADS, LENGTH, VOCAB, RATE = 16, 4, 8, 11, 0.3
SAMPLES = 48


class Attention(nn.Module):
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.query, self.key, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.drop = nn.Dropout(RATE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        if self.by_hand:
            scores = q @ k.transpose(-1, -2) * (HIDDEN // HEADS) ** -0.5
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            mixed = self.drop(scores.masked_fill(future, float("-inf")).softmax(-1)) @ v
        else:
            rate = RATE if self.training else 0.0
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = Attention(by_hand)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        self.drop = nn.Dropout(RATE)

    def forward(self, x: Tensor) -> Tensor:
        # Two draws by this module's own code: one on the stream, one inside the region that tp cuts.
        x = x + F.dropout(self.attention(self.attention_norm(x)), RATE, self.training)
        inner = F.dropout(F.gelu(self.up(self.mlp_norm(x))), RATE, self.training)
        return x + self.drop(self.down(inner))


class Decoder(nn.Module):
    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.drop = nn.Dropout(RATE)
        self.blocks = nn.ModuleList(Block(by_hand) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Encoder(nn.Module):
    """The library's own layers, whose dropout is inside; `batch_first` or not."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(HIDDEN, HEADS, 2 * HIDDEN, dropout=RATE, batch_first=batch_first)
            for _ in range(2)
        )
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x = x if self.batch_first else x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x if self.batch_first else x.transpose(0, 1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.rnn = nn.LSTM(HIDDEN, HIDDEN, num_layers=3, dropout=RATE, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.tokens(tokens))[0])


class Noisy(nn.Module):
    """Draws of other kinds: stochastic depth, layer drop, Gaussian and Gumbel noise, feature and alpha dropout, noise
    on a weight, one layer called twice, tokens flattened into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.shared = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Dropout(RATE))
        self.alpha, self.planes = nn.AlphaDropout(RATE), nn.Dropout1d(RATE)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            if float(torch.rand([])) < 0.2:
                continue
            path = torch.bernoulli(torch.full((len(x), 1, 1), 0.8, dtype=x.dtype, device=x.device)) / 0.8
            weight = layer.weight * (1.0 + 0.1 * torch.randn_like(layer.weight))
            x = x + path * F.linear(x, weight, layer.bias).tanh()
        x = self.shared(self.shared(x))
        x = self.planes(self.alpha(x)) + 0.1 * torch.randn(x.shape, dtype=x.dtype, device=x.device)
        flat = F.dropout(x.flatten(0, 1), RATE)
        gates = F.gumbel_softmax(flat, tau=1.0)
        return self.head((flat * gates).view(x.shape) + torch.rand_like(x))


class Routed(nn.Module):
    """Dropout on the tokens that were routed to a layer: how many they are depends on their values."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.expert, self.drop = nn.Linear(HIDDEN, HIDDEN), nn.Dropout(RATE)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        rows = x[x[..., 0] > 0]
        return self.head(x.masked_scatter(x[..., :1] > 0, self.drop(self.expert(rows))))


class SGLD(torch.optim.Optimizer):
    """Stochastic gradient Langevin dynamics (Welling & Teh 2011), with momentum so that there is state."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    average = self.state[param].setdefault("average", torch.zeros_like(param))
                    average.mul_(0.9).add_(param.grad)
                    param.add_(average, alpha=-group["lr"])
                    param.add_(torch.randn_like(param), alpha=0.01)


class Rounding(torch.optim.Optimizer):
    """SGD whose parameters lie on a grid: a step is rounded up or down at random, right on average."""

    def __init__(self, params: Any, lr: float = 0.05, grid: float = 2.0**-10) -> None:
        super().__init__(params, {"lr": lr, "grid": grid})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    wanted = (param - group["lr"] * param.grad) / group["grid"]
                    param.copy_((wanted + torch.empty_like(wanted).uniform_()).floor() * group["grid"])


class RandomRates(torch.optim.Optimizer):
    """SGD with a random learning rate for each parameter: a draw that is of no element."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] * (0.5 + float(torch.rand(()))))


class Distributed(nn.Module):
    """Draws whose distribution follows from activations: gamma, Dirichlet and Beta with their gradients, Poisson,
    binomial."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        shape = F.softplus(x) + 0.1
        x = x + torch.distributions.Gamma(shape, torch.ones_like(shape)).rsample()
        x = x * torch.distributions.Dirichlet(shape).rsample() + torch.distributions.Beta(shape, 1 + shape).rsample()
        x = x + 0.1 * torch.poisson(3 * shape.detach())
        h = self.up(x).tanh()
        x = x + self.down(h * torch.distributions.Gamma(h.square() + 0.5, 1.0).rsample())
        return self.head(x + 0.1 * torch.binomial(torch.full_like(x, 5.0), x.detach().sigmoid()))


def make(model: Callable[[], nn.Module], **options: object) -> Job:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(VOCAB, (SAMPLES, LENGTH + 1), generator=generator)
    settings: dict[str, object] = {
        "name": "drops",
        "model": model,
        "train": TensorData(x=text[:, :-1], y=text[:, 1:]),
        "loss": cross_entropy,
        "optimizer": partial(torch.optim.Adam, lr=1e-2),
        "global_batch": 12,
        "steps": 6,
        "clip": 1.0,
    }
    return Job(**{**settings, **options})  # type: ignore[arg-type]


JOBS: dict[str, Callable[[], Job]] = {
    "decoder": lambda: make(Decoder),
    "by_hand": lambda: make(partial(Decoder, by_hand=True)),
    "encoder": lambda: make(partial(Encoder, True)),
    "sequence_first": lambda: make(partial(Encoder, False)),
    "recurrent": lambda: make(Recurrent),
    "noisy": lambda: make(Noisy),
    "distributed": lambda: make(Distributed),
    "routed": lambda: make(Routed),
    "sgld": lambda: make(Decoder, optimizer=SGLD),
    "random_rates": lambda: make(Decoder, optimizer=RandomRates),
    "rounding": lambda: make(Decoder, optimizer=Rounding),
}


def __getattr__(name: str) -> Callable[[], Job]:
    if name in JOBS:
        return JOBS[name]
    raise AttributeError(name)

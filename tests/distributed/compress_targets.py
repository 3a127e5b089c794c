"""Functions that the tests of compression run on real ranks."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.compress.compressor import Compressor
from shoal.comm.compress.exchange import Gather, Reduction, run
from shoal.comm.compress.given import Draw, Over, State
from shoal.comm.compress.method import Method
from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Mesh
from shoal.launch.channel import Channel
from shoal.launch.join import join
from shoal.strategy.terms.compress import CompressTerm
from shoal.strategy.text import parse


def parse_term(text: str) -> CompressTerm:
    return parse(f"dp(2, compress={text})").dp_levels[0].compress


def arranged(arguments: dict[str, Any]) -> tuple[Over, int]:
    """All ranks as one group."""
    me = join(backend=arguments.get("backend"))
    members = Mesh([("all", me.world)], rank=me.rank, backend=me.backend).along("all")
    return Over(group=members.group, size=members.size, rank=members.index), me.rank


def everyone(x: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return parts


def gradient(kind: str, shape: list[int], dtype: torch.dtype, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "zeros on one rank" and rank == 1:
        x.zero_()
    if kind == "huge":
        x[rank, 3] = 1e30
    if kind == "alike":
        x = torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    if kind == "ranks of different size":
        x *= 100.0**rank
    return x.to(dtype)


def kept(state: State, name: str, x: torch.Tensor) -> torch.Tensor:
    return state[name].view(x.shape).clone() if name in state else torch.zeros_like(x)


def expected_by_hand(method: Method, value: torch.Tensor, step: int, key: str) -> torch.Tensor | None:
    """The sum of what each rank's codec makes of its part, in the order of ranks; None where payloads add."""
    codec = method.term
    if not isinstance(codec, Compressor) or type(codec).total is not Compressor.total or codec.adds:
        return None
    total = torch.zeros_like(value.view(-1))
    for rank, part in enumerate(everyone(value)):
        draw = Draw(7, step, key, rank)
        total += codec.decode(codec.encode(part.view(-1), draw), total.numel(), total.dtype, draw)
    return total.view(value.shape)


def reduce_and_account(arguments: dict[str, Any], channel: Channel) -> list[dict[str, Any]]:
    """For each case, three steps: the result's bits, the ledger, and how far sent and kept are from the gradient."""
    ranks, rank = arranged(arguments)
    found = []
    for text, kind, shape, dtype_name in arguments["cases"]:
        dtype, term = getattr(torch, dtype_name), parse_term(text)
        method, state, digest, apart, by_hand = Method(term), State(), hashlib.sha256(), 0.0, True
        for step in range(3):
            x = gradient(kind, shape, dtype, rank, step)
            residual, velocity = kept(state, "residual", x), kept(state, "velocity", x)
            decay = term.memory() if isinstance(term, Compressor) else 1.0
            value = torch.add(x, velocity, alpha=0.9).add_(residual, alpha=decay)
            oracle = expected_by_hand(method, value, step, text)
            BOOK.take()
            with BOOK.during("gradient"):
                total = method.reduce(x, state, ranks, Draw(7, step, text, rank))
            ledger = BOOK.take()
            digest.update(total.contiguous().numpy().tobytes())
            if "query" in state:
                digest.update(state["query"].contiguous().numpy().tobytes())
            if oracle is not None:
                by_hand = by_hand and torch.equal(oracle, total)
            wanted = torch.stack(everyone(value)).sum(0)
            got = total + torch.stack(everyone(kept(state, "residual", x))).sum(0)
            size = max(float(part.abs().max()) for part in [*everyone(value), total])
            apart = max(apart, float((got - wanted).abs().max()) / size / torch.finfo(dtype).eps)
        found.append(
            {
                "digest": digest.hexdigest(),
                "roundings_apart": apart,
                "by_hand": by_hand,
                "ledger": ledger.to_json(),
                "state": sorted(state),
                "zeros": float((total == 0).double().mean()),
            }
        )
    return found


def one_rank_overflows(arguments: dict[str, Any], channel: Channel) -> list[list[bool]]:
    """Rank 1's gradient holds an inf: whether every rank sees it, and whether its state is as it was."""
    ranks, rank = arranged(arguments)
    found = []
    for text in arguments["terms"]:
        method, state = Method(parse_term(text)), State()
        method.reduce(gradient("", [33, 65], torch.float32, rank, 0), state, ranks, Draw(7, 0, text, rank))
        before = {name: value.clone() for name, value in state.items()}
        x = gradient("", [33, 65], torch.float32, rank, 1)
        if rank == 1:
            x[5, 5] = float("inf")
        total = method.reduce(x, state, ranks, Draw(7, 1, text, rank))
        same = set(before) == set(state) and all(torch.equal(before[name], state[name]) for name in state)
        found.append([not bool(torch.isfinite(total).all()), same])
    return found


def merge_that_the_tree_drops(arguments: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Element 1 is dropped where ranks 0 and 1 merge, and comes into the result from ranks 2 and 3."""
    ranks, rank = arranged(arguments)
    x = torch.zeros(32, 32, dtype=torch.float64)
    x[0, [0, 1, 1, 1][rank]] = [10.0, 9.0, 8.0, 7.0][rank]
    state = State()
    total = Method(parse_term("gtopk(0.0001)")).reduce(x, state, ranks, Draw(7, 0, "w", rank))
    return {"total": total[0, :2].tolist(), "residual": state["residual"][:2].tolist()}


def low_rank_sum(arguments: dict[str, Any], channel: Channel) -> float:
    """A sum of rank 2 whose parts have different columns: PowerSGD's error, of the sum's size, in its first step."""
    ranks, rank = arranged(arguments)
    right = torch.randn(2, 60, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) @ right
    total = Method(parse_term("powersgd(2)")).reduce(x, {}, ranks, Draw(7, 0, "w", rank))
    whole = torch.stack(everyone(x)).sum(0)
    return float((total - whole).norm() / whole.norm())


def unequal_payloads(arguments: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Two payloads of each rank's own sizes, gathered side by side."""
    ranks, rank = arranged(arguments)
    payloads = [torch.arange(size, dtype=torch.uint8) + 50 * rank for size in arguments["sizes"][rank]]

    def gathering(payload: torch.Tensor) -> Reduction:
        return (yield Gather(payload, equal=False))

    BOOK.take()
    parts = [[part.tolist() for part in each] for each in run([gathering(payload) for payload in payloads], ranks)]
    return {"parts": parts, "bytes": [row["bytes"] for row in BOOK.take().to_json() if row["kind"] == "all_to_all"]}


def side_by_side(arguments: dict[str, Any], channel: Channel) -> list[list[Any]]:
    """For each term: three tensors reduced side by side and one by one: whether results and states are the same to the
    bit, and the ledgers of both."""
    ranks, rank = arranged(arguments)
    found = []
    for text in arguments["terms"]:
        method = Method(parse_term(text))
        tensors = [gradient("", shape, torch.float32, rank, at) for at, shape in enumerate(arguments["shapes"])]
        draws = [Draw(7, 0, f"{text} {at}", rank) for at in range(len(tensors))]
        alone, together = [State() for _ in tensors], [State() for _ in tensors]
        BOOK.take()
        one_by_one = [method.reduce(x, s, ranks, d) for x, s, d in zip(tensors, alone, draws, strict=True)]
        apart = BOOK.take().to_json()
        reductions = [method.reduction(x, s, ranks, d) for x, s, d in zip(tensors, together, draws, strict=True)]
        joined = run(reductions, ranks)
        ledger = BOOK.take().to_json()
        same = all(map(torch.equal, one_by_one, joined)) and all(
            set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)
            for a, b in zip(alone, together, strict=True)
        )
        found.append([same, apart, ledger])
    return found


def quadratic(arguments: dict[str, Any], channel: Channel) -> list[float]:
    """200 steps, from `rate` down to none, of a quadratic problem whose ranks pull to different places: how far from
    the common optimum they end, of the distance at the start."""
    ranks, rank = arranged(arguments)
    curvature = torch.linspace(0.5, 1.0, 32 * 40, dtype=torch.float64).view(32, 40)
    pulls = [torch.randn(32, 40, generator=torch.Generator().manual_seed(9 + r), dtype=torch.float64) for r in range(4)]
    best = sum(pulls[: ranks.size], torch.zeros_like(curvature)) / ranks.size
    found = []
    for text, rate in arguments["cases"]:
        method, state, at = Method(parse_term(text)), State(), torch.zeros_like(curvature)
        for step in range(200):
            x = curvature * (at - pulls[rank]) / ranks.size
            at = at - rate * (1 - step / 200) * method.reduce(x, state, ranks, Draw(7, step, text, rank))
        found.append(float((at - best).norm() / best.norm()))
    return found

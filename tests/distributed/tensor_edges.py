"""What the tests of tensor parallelism run on real ranks: its parts one by one, and what it refuses."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import distributed.tensor_models as models
import shoal.parallel.collectives as c
from distributed.beside import everyone, laid_over
from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Members
from shoal.launch.join import leave
from shoal.layout.cuts import Cut
from shoal.parallel.recompute import recompute_blocks
from shoal.parallel.tensor.cut import cut_tensors, require_even_batch
from shoal.parallel.tensor.vocabulary import cut_vocabulary


def collectives(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Each collective and its gradient beside the same computed from all ranks' tensors on one."""
    members = everyone()
    n, me = members.size, members.index
    found: dict[str, Any] = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for shape, dim in (((4 * n, 3), 0), ((2, 6 * n, 3), 1), ((1, 6 * n, 3), 1), ((2, 3, 5 * n), -1)):
            torch.manual_seed(11)
            wholes = torch.randint(-8, 8, (n, *shape)).to(dtype)
            parts = wholes.chunk(n, dim if dim < 0 else dim + 1)
            mine = parts[me][0]
            label = f"{dtype} {shape} {dim}"

            def tried(
                name: str, got: torch.Tensor, x: torch.Tensor, value: Any, gradient: Any, label: str = label
            ) -> None:
                slopes = torch.randint(-4, 4, (n, *got.shape), generator=torch.Generator().manual_seed(12)).to(
                    got.dtype
                )
                (got * slopes[me]).sum().backward()
                right = torch.equal(got, value) and torch.equal(x.grad, gradient(slopes))
                found[f"{name} {label}"] = right and got.is_contiguous()

            x = wholes[me].clone().requires_grad_()
            tried("copy_in", c.copy_in(x, members) * 1, x, wholes[me], lambda s: s.sum(0))
            x = wholes[me].clone().requires_grad_()
            tried("sum_out", c.sum_out(x, members), x, wholes.sum(0), lambda s: s[me])
            x = mine.clone().requires_grad_()
            tried("gather", c.gather(x, members, dim), x, wholes[0], lambda s: s.sum(0).chunk(n, dim)[me])
            x = wholes[me].clone().requires_grad_()
            summed = wholes.sum(0).chunk(n, dim)[me]
            tried("scatter_sum", c.scatter_sum(x, members, dim), x, summed, lambda s: torch.cat(list(s), dim))
            x = wholes[0].clone().requires_grad_()
            tried("split", c.split(x, members, dim), x, mine, lambda s: torch.cat(list(s), dim))
            x = mine.clone().requires_grad_()
            tried("gather_whole", c.gather_whole(x, members, dim), x, wholes[0], lambda s: s[me].chunk(n, dim)[me])
    for size in (n, n + 1, 2 * n + 1, 5 * n + 2):
        whole = torch.randn(3, size, 2, dtype=torch.float64)
        dist.broadcast(whole, src=0)
        x = whole.clone().requires_grad_()
        part = c.split(x, members, 1)
        again = c.gather_whole(part, members, 1, size)
        again.square().sum().backward()
        # Every rank computes the same, so each part's gradient is right, and split puts them together.
        found[f"uneven {size}"] = torch.equal(again, whole) and torch.allclose(x.grad, 2 * whole)
    for name, call in {
        "uneven sum": lambda: c.scatter_sum(torch.ones(n + 1), members, 0),
        "no such dimension": lambda: c.gather(torch.ones(2), members, 1),
    }.items():
        try:
            call()
            found[name] = False
        except ValueError as error:
            found[name] = bool(str(error))
    alone = Members("tp", (0,), 0, None)
    x = torch.ones(3, requires_grad=True)
    ones = [
        c.copy_in(x, alone),
        c.sum_out(x, alone),
        c.gather(x, alone, 0),
        c.scatter_sum(x, alone, 0),
        c.split(x, alone, 0),
        c.gather_whole(x, alone, 0),
    ]
    found["alone"] = all(y is x for y in ones)
    leave()
    return found


def one_reduction(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Columns share their way in, and nothing is kept alive by it."""
    members = everyone()
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for how in (None, "full", "selective"):
        holder = nn.Module()
        holder.blocks = nn.ModuleList([models.Block()])
        model = holder.double()
        regions = (models.grouped_region("blocks.0.attention"), models.mlp_region("blocks.0.mlp"))
        cut_tensors(model, models.plan(*regions), members)
        if how:
            recompute_blocks(model, how)
        block: Any = model.blocks[0]
        seen: list[Any] = []
        block.norm1.register_forward_hook(lambda m, a, out: seen.append(weakref.ref(out)))
        outs = []
        BOOK.take()
        for _ in range(2):  # Two micro-batches under way at a time.
            with BOOK.during("forward"):
                outs.append(block(torch.randn(2, 12, models.WIDTH, dtype=torch.float64, requires_grad=True)))
        BOOK.take()
        for out in outs:
            with BOOK.during("backward"):
                out.sum().backward()
        counted = {str(key): entry.calls for key, entry in BOOK.take().entries.items()}
        del outs, out
        gc.collect()
        found[str(how)] = {"calls": counted, "alive": sum(ref() is not None for ref in seen)}
    with torch.no_grad(), BOOK.during("evaluate"):
        seen.clear()
        block.eval()(torch.randn(2, 12, models.WIDTH, dtype=torch.float64))
    found["after evaluation"] = sum(ref() is not None for ref in seen)
    leave()
    return found


def refusals(arguments: dict[str, Any], channel: Any) -> dict[str, str]:
    """What is said to plans, models and batches that do not fit."""
    members = everyone()
    said: dict[str, str] = {}

    def hear(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
            said[name] = ""
        except (ValueError, IndexError) as error:
            said[name] = str(error)

    def attention(**options: Any) -> nn.Module:
        holder = nn.Module()
        holder.a = nn.MultiheadAttention(24, 12, **options)
        return holder

    heads = models.Region(
        kind="heads",
        parts=12,
        columns=("a",),
        rows=("a.out_proj",),
        cuts={f"a.{n}": cut for n, cut in models.attention_cuts("", 24).items()},
    )
    mlp, cut = models.mlp_region(), Cut(0, (48,))
    x = torch.randn(2, 12, models.WIDTH)
    hear("parts", lambda: cut_tensors(models.MLP(), models.plan(replace(mlp, parts=3)), members))
    hear("name", lambda: cut_tensors(models.MLP(), models.plan(replace(mlp, cuts={"upp.weight": cut})), members))
    hear(
        "shape",
        lambda: cut_tensors(models.MLP(), models.plan(replace(mlp, cuts={"up.weight": Cut(1, (48,))})), members),
    )
    hear("module", lambda: cut_tensors(models.MLP(), models.plan(replace(mlp, rows=("dwn",))), members))
    hear("scaled", lambda: cut_tensors(models.MLP(), models.plan(replace(mlp, scaled=(("up", "nothing"),))), members))
    hear("bias_k", lambda: cut_tensors(attention(add_bias_kv=True), models.plan(heads), members))
    hear("zero attention", lambda: cut_tensors(attention(add_zero_attn=True), models.plan(heads), members))
    no_sequence = models.plan(mlp, why_no_sequence="blocks.0.mix adds along it")
    hear("sequence", lambda: cut_tensors(models.MLP(), no_sequence, members, between="sequence"))
    ours = attention(batch_first=True)
    cut_tensors(ours, models.plan(heads), members)
    hear("weights used", lambda: ours.a(x, x, x)[1].mean())
    hear("weights in a sum", lambda: torch.ones(1) + ours.a(x, x, x)[1])
    hear("mask", lambda: ours.a(x, x, x, attn_mask=torch.zeros(3, 3)))
    leaking = models.Leaking()
    cut_tensors(leaking, models.plan(mlp), members)
    hear("leak", lambda: leaking(x))
    behind = nn.Module()
    behind.first, behind.second = models.MLP(), models.Leaking()
    pair_of = (models.mlp_region("first"), models.mlp_region("second"))
    for name, param in behind.named_parameters():
        param.requires_grad_(any(name in region.cuts for region in pair_of))
    cut_tensors(behind, models.plan(*pair_of), members)
    hear("leak of frozen parameters", lambda: behind.second(behind.first(x)))
    for option in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        model = nn.Sequential(nn.Embedding(8, 4, **option))
        words = models.Vocabulary(embeddings=("0",), heads=(), cuts={"0.weight": Cut(0, (8,))}, loss_parallel=True)
        hear(next(iter(option)), lambda model=model, words=words: cut_vocabulary(model, words, members))
    model = nn.Sequential(nn.Embedding(8, 4))
    cut_vocabulary(model, words, members)
    hear("word", lambda: model(torch.tensor([0, 8])))
    hear("negative word", lambda: model(torch.tensor([0, -1])))
    few = nn.Sequential(nn.Embedding(1, 4))
    hear("too few", lambda: cut_vocabulary(few, replace(words, cuts={"0.weight": Cut(0, (1,))}), members))
    decoder_model = models.Decoder(64)
    laid_over(decoder_model, models.decoder_plan(64), members, "sequence")
    hear("length", lambda: decoder_model(torch.zeros(2, 11, dtype=torch.long)))
    hear("samples", lambda: require_even_batch(7, members))
    leave()
    return said

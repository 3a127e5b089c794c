"""What the tests of tensor parallelism run on real ranks: whole models, cut in every way, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import distributed.tensor_models as models
from distributed.beside import apart, everyone, gradients_apart, laid_over, pair, predicted, step
from distributed.tensor_libraries import FAMILIES
from shoal.comm.ledger import BOOK
from shoal.launch.join import leave
from shoal.layout.tensor.tokens import stream_blocks
from shoal.parallel.recompute import recompute_blocks
from shoal.parallel.tensor.cut import cut_tensors, split_stream
from shoal.parallel.tensor.logits import CutLogits
from shoal.runtime.float64 import KeepFloat64


def case(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """A case of tensor_models: outputs, gradients of parameters and input, buffers, evaluation, the ledger."""
    members = everyone()
    chosen = models.CASES[arguments["case"]]
    ours, theirs = pair(chosen.model)
    applied = cut_tensors(ours, chosen.plan, members)
    worst = {"output": 0.0, "gradient": 0.0, "input": 0.0, "buffer": 0.0, "evaluation": 0.0}
    torch.manual_seed(1)
    differences: list[str] = []
    for number in range(2):
        inputs = chosen.inputs()
        mine, whole = (tuple(x.clone().requires_grad_(x.is_floating_point()) for x in inputs) for _ in range(2))
        ours.zero_grad()
        theirs.zero_grad()
        BOOK.take()
        applied.tally.take()
        got, expected = step(ours, lambda m: m(*mine)), step(theirs, lambda m: m(*whole))
        if number:
            differences = predicted(applied, members).differences(BOOK.take())
        worst["output"] = max(worst["output"], apart(got, expected))
        worst["gradient"] = max(worst["gradient"], *gradients_apart(ours, theirs, applied, members).values())
        for a, b in zip(mine, whole, strict=True):
            worst["input"] = max(worst["input"], apart(a.grad, b.grad) if b.grad is not None else 0.0)
    uncut = dict(theirs.named_buffers())
    for name, buffer in ours.named_buffers():
        whole_buffer = uncut[name]
        if name in applied.cuts:
            whole_buffer = applied.cuts[name].part(whole_buffer, members.size, members.index)
        worst["buffer"] = max(worst["buffer"], apart(buffer.double(), whole_buffer.double()))
    ours.eval()
    theirs.eval()
    with torch.no_grad(), BOOK.during("evaluate"):
        inputs = chosen.inputs()
        worst["evaluation"] = apart(ours(*inputs), theirs(*inputs))
    leave()
    return {**worst, "ledger": differences, "cuts": sorted(applied.cuts), "partial": sorted(applied.partial)}


def decoder(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """A whole language model with its loss, under any setting; what differs, and the ledger counted and predicted."""
    members = everyone()
    words, tied = arguments.get("words", 257), arguments.get("tied", False)
    block = getattr(models, arguments.get("block", "Block"))
    entries = arguments.get("entries", True)
    plan = models.decoder_plan(
        words,
        tied=tied,
        entries=entries,
        loss_parallel=arguments.get("loss_parallel", True),
        listed=arguments.get("listed", False),
    )
    attention = models.grouped_query if entries else models.Fused
    ours, theirs = pair(lambda: models.Decoder(words, tied, block, arguments.get("padding"), attention))
    between = arguments.get("between", "whole")
    applied = laid_over(ours, plan, members, between)
    if arguments.get("recompute"):
        recompute_blocks(ours, arguments["recompute"])
    options = arguments.get("loss", {})
    torch.manual_seed(2)
    weight = torch.rand(words, dtype=torch.float64) if arguments.get("weighted") else None
    worst: dict[str, float] = {"loss": 0.0}
    differences: list[str] = []
    for _ in range(2):
        tokens, target = torch.randint(0, words, (2, 12)), torch.randint(0, words, (2, 12))
        target[0, :3], tokens[1, 0], tokens[0, 1] = -100, 0, words - 1

        def loss_of(model: nn.Module) -> torch.Tensor:
            return F.cross_entropy(model(tokens).flatten(0, -2), target.flatten(), weight=weight, **options)

        ours.zero_grad()
        theirs.zero_grad()
        BOOK.take()
        applied.tally.take()
        got, expected = step(ours, loss_of), step(theirs, loss_of)
        counted = BOOK.take()
        differences = predicted(applied, members).differences(counted)
        worst["loss"] = max(worst["loss"], apart(got, expected))
        for name, value in gradients_apart(ours, theirs, applied, members).items():
            worst[name] = max(worst.get(name, 0.0), value)
    with torch.no_grad(), BOOK.during("evaluate"):
        ours.eval()
        theirs.eval()
        worst["evaluation"] = apart(loss_of(ours), loss_of(theirs))
    tied_still = ours.head.weight is ours.words.weight
    leave()
    return {
        "worst": max(worst.values()),
        "where": max(worst, key=lambda name: worst[name]),
        "ledger": differences,
        "counted": counted.to_json(),
        "partial": sorted(applied.partial),
        "tied": tied_still,
        "rows": ours.words.weight.shape[0],
    }


def library_sequence(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """The library's encoder with its stream cut along the sequence, whichever dimension that is; masks too."""
    members = everyone()
    batch_first = arguments["batch_first"]
    ours, theirs = pair(lambda: models.Library(batch_first=batch_first))
    dim = 1 if batch_first else 0
    plan = models.library_plan(sequence_dim=dim)
    applied = cut_tensors(ours, plan, members, between="sequence")
    chain = stream_blocks(ours, plan)
    split_stream(ours, chain[0], chain[-1], dim, members, applied.tally)
    torch.manual_seed(3)
    x = torch.randn(*((2, 12) if batch_first else (12, 2)), models.WIDTH, dtype=torch.float64)
    hidden = torch.zeros(2, 12, dtype=torch.bool)
    hidden[1, 9:] = True
    worst = 0.0
    for masks in ((), (hidden,)):
        ours.zero_grad()
        theirs.zero_grad()
        got, expected = step(ours, lambda m: m(x, *masks)), step(theirs, lambda m: m(x, *masks))
        worst = max(worst, apart(got, expected), *gradients_apart(ours, theirs, applied, members).values())
        with torch.no_grad():
            ours.eval()
            theirs.eval()
            seen = ~hidden if batch_first else ~hidden.t()
            worst = max(worst, apart(ours(x, *masks)[seen], theirs(x, *masks)[seen]))
            ours.train()
            theirs.train()
    leave()
    return {"worst": worst, "partial": sorted(applied.partial)}


def attention(arguments: dict[str, Any], channel: Any) -> dict[str, float]:
    """nn.MultiheadAttention called in every way it allows."""
    members = everyone()
    width, found = 2 * models.HEADS, {}
    for batch_first in (True, False):
        for cross in (False, True):
            kv = {"kdim": 10, "vdim": 14} if cross else {}
            ours, theirs = pair(lambda: nn.MultiheadAttention(width, models.HEADS, batch_first=batch_first, **kv))
            cuts = models.attention_cuts("", width)
            if cross:
                del cuts["in_proj_weight"]
                cuts |= {f"{p}_proj_weight": models.Cut(0, (width,)) for p in "qkv"}
            region = models.Region(kind="heads", parts=models.HEADS, columns=("",), rows=("out_proj",), cuts=cuts)
            holder, other = nn.Module(), nn.Module()
            holder.a, other.a = ours, theirs
            region = replace(region, columns=("a",), rows=("a.out_proj",), cuts={f"a.{n}": c for n, c in cuts.items()})
            applied = cut_tensors(holder, models.plan(region), members)
            for name, call in _calls(batch_first, cross, width).items():
                holder.zero_grad()
                other.zero_grad()
                got, expected = step(ours, call), step(theirs, call)
                label = f"{name}, {'samples' if batch_first else 'length'} first, {'cross' if cross else 'self'}"
                found[label] = max(apart(got, expected), *gradients_apart(holder, other, applied, members).values())
    leave()
    return found


def _calls(batch_first: bool, cross: bool, width: int) -> dict[str, Callable[[nn.Module], torch.Tensor]]:
    torch.manual_seed(4)
    samples, length, keys = 2, 5, 6 if cross else 5

    def made(n: int, features: int) -> torch.Tensor:
        return torch.randn(*((samples, n) if batch_first else (n, samples)), features, dtype=torch.float64)

    q = made(length, width)
    k, v = (made(keys, 10), made(keys, 14)) if cross else (q, q)
    padding = torch.zeros(samples, keys, dtype=torch.bool)
    padding[0, -2:] = True
    causal = torch.ones(length, keys, dtype=torch.bool).triu(1)
    by_head = torch.randn(samples * models.HEADS, length, keys, dtype=torch.float64)
    calls: dict[str, dict[str, Any]] = {
        "plain": {},
        "weights dropped": {"need_weights": True},
        "padding": {"key_padding_mask": padding},
        "mask": {"attn_mask": causal},
        "mask by head": {"attn_mask": by_head},
        "both": {"attn_mask": by_head, "key_padding_mask": torch.zeros_like(padding, dtype=torch.float64)},
    }
    if not cross:
        calls["causal"] = {"attn_mask": causal, "is_causal": True}
        calls["causal and padding"] = {"attn_mask": causal, "is_causal": True, "key_padding_mask": padding}
    made_calls = {
        name: (lambda m, options=options: m(q, k, v, **{"need_weights": False, **options})[0])
        for name, options in calls.items()
    }
    first = tuple(x[0] if batch_first else x[:, 0] for x in (q, k, v))
    if not cross:
        first = (first[0],) * 3
    made_calls["one sample"] = lambda m: m(*first, need_weights=False)[0]
    return made_calls


def batch(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Samples dealt out, wide layers cut on the same ranks; gradients are sums over all samples."""
    members = everyone()
    ours, theirs = pair(models.Trick)
    applied = cut_tensors(ours, models.TRICK, members, between="batch")
    torch.manual_seed(5)
    x = torch.randn(2 * members.size, 2, 4, 4, dtype=torch.float64)
    slope = torch.randn(len(x), 5, dtype=torch.float64)
    mine = slice(2 * members.index, 2 * members.index + 2)
    with BOOK.during("forward"):
        got = ours(x[mine])
    with BOOK.during("backward"):
        (got * slope[mine]).sum().backward()
    expected = theirs(x)
    (expected * slope).sum().backward()
    counted = BOOK.take().only("forward", "backward")
    differences = predicted(applied, members).differences(counted)
    worst = max(apart(got, expected[mine]), *gradients_apart(ours, theirs, applied, members).values())
    leave()
    return {
        "worst": worst,
        "ledger": differences,
        "counted": counted.to_json(),
        "partial": sorted(applied.partial),
        "cuts": sorted(applied.cuts),
    }


def library_model(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """A model of the transformers library: its loss by our sum and by its own helper, and its logits."""
    members = everyone()
    make, plan_of = FAMILIES[arguments["family"]]
    ours, theirs = pair(make)
    applied = laid_over(ours, plan_of(), members, arguments["between"])
    if arguments.get("recompute"):
        recompute_blocks(ours, arguments["recompute"])
    torch.manual_seed(6)
    tokens = torch.randint(0, 67, (2, 12))
    worst: dict[str, float] = {}

    def summed(model: nn.Module) -> torch.Tensor:
        logits = model(input_ids=tokens).logits
        return F.cross_entropy(logits.float().flatten(0, -2), tokens.roll(-1, 1).flatten(), reduction="sum")

    with KeepFloat64():
        for name, call in {"sum": summed, "own": lambda m: m(input_ids=tokens, labels=tokens).loss}.items():
            ours.zero_grad()
            theirs.zero_grad()
            BOOK.take()
            applied.tally.take()
            worst[name] = apart(step(ours, call), step(theirs, call))
            differences = predicted(applied, members).differences(BOOK.take())
            worst |= gradients_apart(ours, theirs, applied, members)
        with torch.no_grad():
            ours.eval()
            theirs.eval()
            got, expected = ours(input_ids=tokens), theirs(input_ids=tokens)
            worst["logits"] = apart(got.logits[:, -1] * 1.0, expected.logits[:, -1])
            same = torch.equal(got.logits.argmax(-1), expected.logits.argmax(-1))
            kept = type(got.logits) is CutLogits and type(got[0]) is CutLogits
    leave()
    return {
        "worst": max(worst.values()),
        "where": max(worst, key=lambda name: worst[name]),
        "ledger": differences,
        "same_words": same,
        "stays_cut": kept,
    }


def autocast(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """bfloat16: the loss beside the uncut model's, the bytes on the wire beside float32's."""
    members = everyone()
    torch.manual_seed(0)
    theirs = models.Decoder(64)
    tokens = torch.randint(0, 64, (2, 12))
    found: dict[str, Any] = {}
    for low in (True, False):
        ours = copy.deepcopy(theirs)
        applied = laid_over(ours, models.decoder_plan(64), members, arguments["between"])
        if arguments.get("recompute"):
            recompute_blocks(ours, arguments["recompute"])

        def loss_of(model: nn.Module, low: bool = low) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=low, cache_enabled=False):
                return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

        theirs.zero_grad()
        BOOK.take()
        applied.tally.take()
        got, expected = step(ours, loss_of), step(theirs, loss_of)
        counted = BOOK.take()
        found[f"ledger {low}"] = predicted(applied, members).differences(counted)
        found[f"bytes {low}"] = counted.bytes
        found[f"loss {low}"] = apart(got, expected)
        found[f"gradient {low}"] = max(gradients_apart(ours, theirs, applied, members).values())
        found[f"float32 {low}"] = got.dtype == torch.float32
    leave()
    return found

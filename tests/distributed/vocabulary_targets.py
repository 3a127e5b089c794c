"""What the tests of the cut vocabulary run on real ranks: embeddings, logits put to any use, losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import distributed.tensor_models as models
from distributed.beside import apart, everyone, gradients_apart, pair, step
from shoal.comm.ledger import BOOK
from shoal.launch.join import leave
from shoal.layout.crossings import Tally
from shoal.layout.cuts import Cut
from shoal.parallel.tensor.logits import CutLogits
from shoal.parallel.tensor.vocabulary import cut_vocabulary


def logits(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Whatever is done with cut logits: the result, and whether it was gathered for it."""
    members = everyone()
    words = arguments["words"]
    torch.manual_seed(8)
    whole = torch.randn(2, 3, words, dtype=torch.float64)
    cut = Cut(2, (words,))
    mask, label = torch.rand(2, 3) > 0.4, torch.randint(0, words, (2, 3))

    def made() -> tuple[torch.Tensor, torch.Tensor]:
        part = cut.part(whole, members.size, members.index).clone().requires_grad_()
        made_of = CutLogits.around(part * 1, dim=2, vocabulary=words, members=members, tally=Tally())
        return part, made_of

    uses: dict[str, Callable[[Any], Any]] = {
        "shape": lambda z: list(z.shape),
        "size": lambda z: [*z.size(), z.size(-1), z.size(dim=2), z.numel(), len(z)],
        "dims": lambda z: [z.dim(), z.ndim, str(z.dtype)],
        "is a tensor": lambda z: isinstance(z, torch.Tensor),
        "view": lambda z: z.view(-1, words) * 1,
        "view of given size": lambda z: z.view(-1, z.size(-1)) * 1,
        "reshape open end": lambda z: z.reshape(6, -1) * 1,
        "reshape across": lambda z: z.reshape(2, -1) * 1,
        "reshape to one": lambda z: z.reshape(-1) * 1,
        "view as rows of rows": lambda z: z.view(3, 2, words) * 1,
        "flatten": lambda z: z.flatten(0, 1) * 1,
        "flatten all": lambda z: z.flatten() * 1,
        "flatten by name": lambda z: torch.flatten(z, end_dim=-2) * 1,
        "flatten the end": lambda z: z.flatten(1) * 1,
        "shift": lambda z: z[..., :-1, :] * 1,
        "last": lambda z: z[:, -1] * 1,
        "last, kept": lambda z: z[:, -1:, :] * 1,
        "one row": lambda z: z[0][1] * 1,
        "mask": lambda z: z[mask] * 1,
        "new dimension": lambda z: z[None, :, 0] * 1,
        "new dimension at the end": lambda z: z[..., None] * 1,
        "one word": lambda z: z[..., 1],
        "rows": lambda z: z[[1, 0]],
        "some words": lambda z: z[:, :, 1:4],
        "chosen": lambda z: z[torch.tensor([1, 0]), torch.tensor([2, 2])] * 1,
        "gather": lambda z: z.gather(-1, label[..., None]),
        "transpose": lambda z: z.transpose(1, 2) * 1,
        "permute": lambda z: z.permute(2, 0, 1) * 1,
        "permute given a list": lambda z: torch.permute(z, [0, 2, 1]) * 1,
        "argmax": lambda z: z.argmax(-1),
        "max": lambda z: z.max(-1).values,
        "softmax": lambda z: z.softmax(-1),
        "log_softmax": lambda z: F.log_softmax(z, -1),
        "topk": lambda z: z.topk(3, -1).values,
        "sum": lambda z: z.sum(),
        "compare": lambda z: (z.argmax(-1) == label).sum(),
        "arithmetic": lambda z: 2.0 - z / 3,
        "matmul": lambda z: z @ z.mT,
        "precision": lambda z: z.float().double() * 1,
        "to": lambda z: z.to(torch.float32) * 1,
        "detach": lambda z: z.detach() * 1,
        "stack": lambda z: torch.stack([z, z]),
        "iterate": lambda z: [r.sum() for r in z],
        "item": lambda z: z[0, 0, 0].item(),
        "numpy": lambda z: z.detach().numpy().sum(),
        "where": lambda z: torch.where(z > 0, z, 0),
        "chunk": lambda z: z.chunk(2)[1] * 1,
        "unbind": lambda z: z.unbind(0)[1] * 1,
        "split": lambda z: z.split(1)[0] * 1,
        "einsum": lambda z: torch.einsum("blv,blv->bl", z, z),
        "equal": lambda z: torch.equal(z, whole),
        "nll": lambda z: F.nll_loss(F.log_softmax(z.flatten(0, 1), -1), label.flatten()),
        "cross entropy": lambda z: F.cross_entropy(z.flatten(0, 1), label.flatten()),
        "cross entropy module": lambda z: nn.CrossEntropyLoss()(z.view(-1, words), label.view(-1)),
        "cross entropy of classes second": lambda z: F.cross_entropy(z.transpose(1, 2), label),
        "cross entropy of one": lambda z: F.cross_entropy(z[0, 0], label[0, 0]),
        "cross entropy of probabilities": lambda z: F.cross_entropy(z.flatten(0, 1), whole.flatten(0, 1).softmax(-1)),
        "cross entropy of classes in the middle": lambda z: F.cross_entropy(z, torch.zeros(2, words, dtype=torch.long)),
        "as a target": lambda z: F.mse_loss(whole, z),
        "both": lambda z: z + z.detach(),
        "ones": lambda z: torch.ones_like(z),
    }
    found = {}
    for name, use in uses.items():
        part, ours = made()
        theirs = whole.clone().requires_grad_()
        BOOK.take()
        got, expected = use(ours), use(theirs * 1)
        gathered = any(key.kind == "all_gather" for key in BOOK.take().entries)
        right = got == expected if not isinstance(expected, torch.Tensor) else apart(got, expected) < 1e-13
        right = right and not (isinstance(got, torch.Tensor) and type(got) is CutLogits)
        if isinstance(expected, list) and expected and isinstance(expected[0], torch.Tensor):
            right = all(apart(a, b) < 1e-13 for a, b in zip(got, expected, strict=True))
        if isinstance(expected, torch.Tensor) and expected.requires_grad:
            expected.square().sum().backward()
            got.square().sum().backward()
            assert theirs.grad is not None
            mine = cut.part(theirs.grad, members.size, members.index)
            right = right and part.grad is not None and apart(part.grad, mine) < 1e-12
        found[name] = {"right": bool(right), "gathered": gathered}
    said = {}
    changes: dict[str, Callable[[Any], Any]] = {
        "in place": lambda z: z.div_(2.0),
        "item set": lambda z: z.__setitem__((0, 0), 1.0),
        "added": lambda z: z.__iadd__(1),
        "hook": lambda z: z.register_hook(print),
        "data": lambda z: setattr(z, "data", whole),
    }
    for name, use in changes.items():
        try:
            use(made()[1])
            said[name] = ""
        except ValueError as error:
            said[name] = str(error)
    BOOK.take()
    shown = f"{made()[1]}" + repr(made()[1])
    said["shown without a word"] = shown if not BOOK.take().entries else ""
    leave()
    return {"uses": found, "said": said}


def losses(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Cross entropy on cut logits beside the library's, over everything it may be asked for."""
    members = everyone()
    found: dict[str, float] = {}
    torch.manual_seed(9)
    for words in arguments["words"]:
        for reduction in ("sum", "mean", "none"):
            for smoothing in (0.0, 0.1, 1.0):
                for weighted in (False, True):
                    for spread in (1.0, 1e3):
                        for ignore in (-100, 1):
                            whole = (torch.randn(7, words, 2, dtype=torch.float64) * spread).requires_grad_()
                            target = torch.randint(0, words, (7, 2))
                            target[0] = ignore
                            weight = torch.rand(words, dtype=torch.float64) if weighted else None
                            options: dict[str, Any] = {
                                "reduction": reduction,
                                "label_smoothing": smoothing,
                                "weight": weight,
                                "ignore_index": ignore,
                            }
                            expected = F.cross_entropy(whole, target, **options)
                            slope = torch.randn(expected.shape, dtype=torch.float64)
                            (expected * slope).sum().backward()
                            cut = Cut(1, (words,))
                            part = cut.part(whole.detach(), members.size, members.index).clone().requires_grad_()
                            ours = CutLogits.around(part * 1, dim=1, vocabulary=words, members=members, tally=Tally())
                            got = F.cross_entropy(ours, target, **options)
                            (got * slope).sum().backward()
                            assert whole.grad is not None
                            assert part.grad is not None
                            mine = cut.part(whole.grad, members.size, members.index)
                            largest = float(whole.grad.abs().max())
                            off = float((part.grad - mine).abs().max()) / largest
                            name = (
                                f"{words} {reduction} {smoothing} weighted={weighted} spread={spread} ignore={ignore}"
                            )
                            found[name] = max(apart(got, expected), off)
    leave()
    return {"worst": max(found.values()), "where": max(found, key=lambda name: found[name]), "cases": len(found)}


def odd_losses(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Losses at the edge: nothing counted, an empty batch, infinite logits, words that do not exist, bfloat16."""
    members = everyone()

    def cut_of(whole: torch.Tensor) -> Any:
        part = Cut(1, (whole.shape[1],)).part(whole, members.size, members.index)
        return CutLogits.around(part, dim=1, vocabulary=whole.shape[1], members=members, tally=Tally())

    torch.manual_seed(10)
    z, t = torch.randn(4, 11), torch.tensor([0, 10, 5, 6])
    masked = z.clone()
    masked[:, 3] = -torch.inf
    ignored = torch.full((4,), -100)
    found = {
        "nothing counted, mean": F.cross_entropy(cut_of(z), ignored).isnan().item(),
        "nothing counted, sum": F.cross_entropy(cut_of(z), ignored, reduction="sum").item() == 0.0,
        "empty": F.cross_entropy(cut_of(z[:0]), t[:0], reduction="sum").item() == 0.0,
        "masked word": torch.allclose(F.cross_entropy(cut_of(masked), t), F.cross_entropy(masked, t)),
        "float32": torch.allclose(F.cross_entropy(cut_of(z), t), F.cross_entropy(z, t)),
    }
    low = z.bfloat16()
    got, expected = F.cross_entropy(cut_of(low), t), F.cross_entropy(low, t)
    found["bfloat16"] = got.dtype == expected.dtype and torch.allclose(got, expected, rtol=2e-2)
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = F.cross_entropy(cut_of(low), t), F.cross_entropy(low, t)
    found["autocast"] = got.dtype == expected.dtype and torch.allclose(got, expected, rtol=1e-5)
    for name, target in {"too large": 11, "negative": -1}.items():
        try:
            F.cross_entropy(cut_of(z), torch.tensor([0, 1, 2, target]))
            found[name] = False
        except IndexError as error:
            found[name] = f"Target {target} is out of bounds" in str(error)
    leave()
    return {name: bool(value) for name, value in found.items()}


def embedding(arguments: dict[str, Any], channel: Any) -> dict[str, float]:
    """Embeddings of every kind: padded at either end, sparse, scaled by a subclass, asked for nothing."""
    members = everyone()

    class Scaled(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 3.0

    found = {}
    kinds: dict[str, Callable[[], nn.Module]] = {
        "plain": lambda: nn.Embedding(11, 4),
        "padded at the start": lambda: nn.Embedding(11, 4, padding_idx=0),
        "padded at the end": lambda: nn.Embedding(11, 4, padding_idx=-1),
        "sparse": lambda: nn.Embedding(11, 4, sparse=True),
        "scaled": lambda: Scaled(11, 4, padding_idx=5),
    }
    for name, make in kinds.items():
        ours, theirs = pair(lambda make=make: nn.Sequential(make()))
        words = models.Vocabulary(embeddings=("0",), heads=(), cuts={"0.weight": Cut(0, (11,))}, loss_parallel=True)
        applied = cut_vocabulary(ours, words, members)
        torch.manual_seed(13)
        asked = torch.randint(0, 11, (3, 9))
        asked[0, :3] = torch.tensor([0, 10, 5])
        got, expected = step(ours, lambda m, asked=asked: m(asked)), step(theirs, lambda m, asked=asked: m(asked))
        found[name] = max(apart(got, expected), *gradients_apart(ours, theirs, applied, members).values())
        found[f"{name}, nothing"] = apart(ours(asked[:0]), theirs(asked[:0]))
        found[f"{name}, by name"] = apart(ours[0](input=asked), theirs(asked))
    leave()
    return found

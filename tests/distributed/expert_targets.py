"""What the tests of expert parallelism run on real ranks: a model dealt out beside the same model whole.

Every rank has tokens of its own. The whole model runs on each rank's tokens in turn; the model that is dealt out runs
on all of them at once, one share a rank. Outputs, gradients and buffers are then laid side by side in float64.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from distributed.expert_models import build, tokens_of
from distributed.jobs import moe_layers
from shoal.comm.choice import on_one_host
from shoal.comm.ledger import BOOK, ledger_of
from shoal.comm.mesh import Members, Mesh
from shoal.estimate.expert_traffic import expert_traffic
from shoal.launch.join import join, leave
from shoal.layout.experts.find import ExpertError, find_experts
from shoal.parallel.expert.shard_experts import shard_experts, take_routed
from shoal.parallel.recompute import recompute_blocks


def forward(model: nn.Module, tokens: torch.Tensor, rank: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Outputs, and a loss to which each element counts differently. A rank's random numbers are its own."""
    torch.manual_seed(1000 + rank)
    output = model(tokens)
    output = {key: output[key] for key in ("logits",)} if hasattr(output, "logits") else output
    values = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    loss = sum((v * torch.linspace(-1, 1, v.numel(), dtype=v.dtype).view_as(v)).sum() for v in values)
    return values, loss  # type: ignore[return-value]


def started() -> Members:
    me = join()
    return Mesh([("ep", me.world)], rank=me.rank, backend=me.backend).along("ep")


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    a, b = a.detach(), b.detach()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) if b.numel() else 0.0


def against_whole(arguments: dict[str, Any], channel: Any) -> list[dict[str, Any]]:
    """What each case came to."""
    members = started()
    found = [one_against_whole(case, members) for case in arguments["cases"]]
    leave()
    return found


def one_against_whole(arguments: dict[str, Any], members: Members) -> dict[str, Any]:
    """Differences of outputs, of gradients by kind of parameter, and of buffers; names that are absent or cut."""
    name, shares = arguments["model"], arguments["shares"]
    whole = build(name)
    if arguments.get("lazy"):
        _send_all_to_expert_zero(whole)
    parted = copy.deepcopy(whole)
    layers = find_experts(parted, lambda: parted(tokens_of(name, 0, 4)))
    gone = shard_experts(parted, layers, members)
    if mode := arguments.get("recompute"):
        recompute_blocks(parted, mode)

    everyones, embedded = [], []
    for rank, rows in enumerate(shares):
        tokens = tokens_of(name, rank, rows)
        tokens = tokens.requires_grad_() if tokens.is_floating_point() else tokens
        outputs, loss = forward(whole, tokens * 1 if tokens.requires_grad else tokens, rank)
        if loss.requires_grad:  # a layer that is given no token may well compute nothing
            loss.backward()
        everyones.append(outputs)
        no_gradient = torch.zeros_like(tokens) if tokens.requires_grad else None
        embedded.append(no_gradient if tokens.grad is None else tokens.grad)
    mine = tokens_of(name, members.index, shares[members.index])
    mine = mine.requires_grad_() if mine.is_floating_point() else mine
    take_routed(parted)
    BOOK.take()
    with BOOK.during("forward"):
        outputs, loss = forward(parted, mine * 1 if mine.requires_grad else mine, members.index)
    loss.backward()
    counted = BOOK.take()
    predicted = ledger_of(expert_traffic(take_routed(parted)), on_one_host)
    found = {
        "output": max(apart(a, b) for a, b in zip(outputs, everyones[members.index], strict=True)),
        "input": 0.0,
    }
    if mine.requires_grad:
        found["input"] = apart(torch.zeros_like(mine) if mine.grad is None else mine.grad, embedded[members.index])
    found |= _gradients(whole, parted, layers, members)
    found["absent"] = sorted(set(dict(whole.named_parameters())) - set(dict(parted.named_parameters())))
    found["gone"] = gone
    found["layers"] = [layer.path for layer in layers]
    of_experts = [name for layer in layers for name in layer.parameter_names]
    sizes = [{n: p.numel() for n, p in model.named_parameters() if n in of_experts} for model in (whole, parted)]
    found["held"] = sum(sizes[1].values()) / sum(sizes[0].values())
    found["buffers"] = max([0.0, *(_buffer_apart(a, b) for a, b in _buffers(whole, parted))])
    found["ledger"] = counted.differences(predicted)
    found["bytes"] = counted.bytes
    found["phases"] = sorted({key.phase for key in counted.entries})
    for module in parted.modules():
        if isinstance(module, moe_layers.Awkward):
            found["traces"] = [len(module.balance), module.seen, shares[members.index] * 3]
    return found


def _buffers(whole: nn.Module, parted: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    names = dict(parted.named_buffers())
    return [(names[name], buffer) for name, buffer in whole.named_buffers() if name in names]


def _buffer_apart(mine: torch.Tensor, everyones: torch.Tensor) -> float:
    total = mine.clone().double()
    dist.all_reduce(total)
    # What counts adds up over ranks; what does not change is the same on each.
    return min(apart(total, everyones.double()), apart(mine.double(), everyones.double()))


def _send_all_to_expert_zero(model: nn.Module) -> None:
    """Routers that always choose the first experts: the last rank's get nothing."""
    with torch.no_grad():
        for path, param in model.named_parameters():
            if "router" in path or "gate.weight" in path or path.endswith("gate"):
                param.zero_()
    # Ties are broken by order: choose the lowest numbers.
    for module in model.modules():
        if type(module).__name__ in ("TopTwo", "Pairs", "Stacked"):
            layer = getattr(module, "router", None) or module.gate
            bias = torch.tensor([float(10 - n) for n in range(layer.weight.shape[0])], dtype=torch.float64)
            layer.bias = nn.Parameter(bias)


def _gradients(whole: nn.Module, parted: nn.Module, layers: Any, members: Members) -> dict[str, Any]:
    """The largest difference of gradients, of experts' and of all others', and parameters that have one wrongly."""
    of_experts = {name: layer for layer in layers for name in layer.parameter_names}
    here = dict(parted.named_parameters())
    found: dict[str, Any] = {"experts": 0.0, "others": 0.0, "wrongly": [], "without": []}
    for name, param in whole.named_parameters():
        mine = here.get(name)
        if name in of_experts:
            if mine is None:
                continue
            expected, got = param.grad, mine.grad
            if (expected is None) != (got is None):
                found["wrongly"].append(name)
            if got is None:
                found["without"].append(name)
            if expected is not None and got is not None:
                if of_experts[name].form == "stacked":
                    expected = expected.chunk(members.size)[members.index]
                found["experts"] = max(found["experts"], apart(got, expected))
            continue
        assert mine is not None, name
        total = torch.zeros_like(param) if mine.grad is None else mine.grad.clone()
        dist.all_reduce(total)
        if param.grad is not None:
            found["others"] = max(found["others"], apart(total, param.grad))
    return found


def in_flight(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Three micro-batches of which several are between forward and backward at a time, as in a pipeline; `frozen` is
    what does not learn: nothing, the experts, or all others."""
    name, members = arguments["model"], started()
    whole = build(name)
    of_experts = {
        n for layer in find_experts(whole, lambda: whole(tokens_of(name, 0, 4))) for n in layer.parameter_names
    }
    for path, param in whole.named_parameters():
        param.requires_grad_(arguments["frozen"] != ("experts" if path in of_experts else "others"))
    parted = copy.deepcopy(whole)
    layers = find_experts(parted, lambda: parted(tokens_of(name, 0, 4)))
    shard_experts(parted, layers, members)
    micro = [[tokens_of(name, 10 * rank + number, 2) for number in range(3)] for rank in range(members.size)]
    for tokens in [each for of_rank in micro for each in of_rank]:
        forward(whole, tokens, 0)[1].backward()
    mine = micro[members.index]
    first, second = (forward(parted, tokens, 0)[1] for tokens in mine[:2])
    first.backward()
    third = forward(parted, mine[2], 0)[1]
    second.backward()
    third.backward()
    found = _gradients(whole, parted, layers, members)
    leave()
    return found


def evaluated(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Without gradients: outputs, and the phase the traffic is entered under."""
    members = started()
    whole = build(arguments["model"]).eval()
    parted = copy.deepcopy(whole)
    shard_experts(parted, find_experts(parted, lambda: parted(tokens_of(arguments["model"], 0, 4))), members)
    tokens = tokens_of(arguments["model"], members.index, 3)
    BOOK.take()
    with torch.no_grad(), BOOK.during("evaluate"):
        outputs, _ = forward(parted, tokens, members.index)
    counted = BOOK.take()
    with torch.no_grad():
        expected, _ = forward(whole, tokens, members.index)
    routed = take_routed(parted)
    leave()
    return {
        "output": max(apart(a, b) for a, b in zip(outputs, expected, strict=True)),
        "phases": sorted({key.phase for key in counted.entries}),
        "ledger": counted.differences(ledger_of(expert_traffic(routed), on_one_host)),
    }


def in_half(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Under autocast: outputs beside the whole model's, in units of what bfloat16 can tell apart."""
    members = started()
    whole = build(arguments["model"]).float()
    parted = copy.deepcopy(whole)
    example = tokens_of(arguments["model"], 0, 4)
    example = example.float() if example.is_floating_point() else example
    shard_experts(parted, find_experts(parted, lambda: parted(example)), members)
    # The last rank may have nothing at all: it must know by itself which type the others use.
    tokens = tokens_of(arguments["model"], members.index, arguments["shares"][members.index])
    tokens = tokens.float() if tokens.is_floating_point() else tokens
    with torch.autocast("cpu", torch.bfloat16):
        outputs, loss = forward(parted, tokens, members.index)
        expected, _ = forward(whole, tokens, members.index)
    loss.backward()
    finite = all(bool(p.grad.isfinite().all()) for p in parted.parameters() if p.grad is not None)
    found = max(apart(a.float(), b.float()) for a, b in zip(outputs, expected, strict=True))
    same_types = all(a.dtype == b.dtype for a, b in zip(outputs, expected, strict=True))
    leave()
    return {"output": found, "finite": finite, "same_types": same_types}


def random_numbers(arguments: dict[str, Any], channel: Any) -> list[dict[str, Any]]:
    """Two runs of a layer that draws numbers: whether experts' masks are all different, and repeat with the seed."""
    members = started()
    layer = build("drawing")
    find = find_experts(layer, lambda: layer(tokens_of("drawing", 0, 4)))
    shard_experts(layer, find, members)
    x = torch.ones(64, moe_layers.WIDTH, dtype=torch.float64)
    masks: list[torch.Tensor] = []
    share = 4 // members.size
    for expert in list(layer.experts)[members.index * share : (members.index + 1) * share]:
        expert[1].register_forward_hook(lambda module, args, output: masks.append(output.detach() != 0))
    found = []
    for rate in (0.5, 0.0):
        layer.rate = rate
        outputs = []
        masks.clear()
        for _ in range(2):
            torch.manual_seed(5)
            outputs.append(layer(x).detach())
            outputs.append(layer(x).detach())
        pairs = [(a, b) for n, a in enumerate(masks[:4]) for b in masks[n + 1 : 4]]
        found.append(
            {
                "repeats": torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3]),
                "moves_on": not torch.equal(outputs[0], outputs[1]),
                "masks_differ": all(not torch.equal(a, b) for a, b in pairs),
            }
        )
    leave()
    return found


def refusals(arguments: dict[str, Any], channel: Any) -> dict[str, str]:
    """What is said to models that cannot be dealt out, or that call experts otherwise than when they were found."""
    members = started()
    said = {}

    def hear(name: str, call: Any) -> None:
        try:
            call()
            said[name] = ""
        except ExpertError as error:
            said[name] = str(error)

    x = torch.randn(6, moe_layers.WIDTH, dtype=torch.float64)
    three = moe_layers.Pairs(3).double()
    found = find_experts(three, lambda: three(x))
    hear("indivisible", lambda: shard_experts(three, found, members))
    said["left whole"] = str(all(type(m) is nn.Linear for m in three.first))

    pairs = moe_layers.Pairs(4).double()
    shard_experts(pairs, find_experts(pairs, lambda: pairs(x)), members)
    hear("directly", lambda: [expert(x) for expert in pairs.first])
    pairs.forward.__self__.lists[0].begin_pass()
    hear("extra", lambda: pairs.forward.__self__.lists[0].called(1, (x, True), {}))
    stack = moe_layers.Stacked(4).double()
    shard_experts(stack, find_experts(stack, lambda: stack(x)), members)
    hear("stack", lambda: stack.experts(x, which=x, tokens=x))

    chained = moe_layers.Pairs(4).double()
    layers = find_experts(chained, lambda: chained(x))
    # Found honestly, then the code changes: from now on one expert is asked what another answers.
    shard_experts(chained, layers, members)
    owner = chained.forward.__self__
    owner.plain_forward = lambda x: chained.first[1](torch.nn.functional.pad(chained.first[0](x), (0, 1)))
    hear("chained", lambda: chained(x))
    leave()
    return said


def uneven(arguments: dict[str, Any], channel: Any) -> list[dict[str, Any]]:
    """All-to-alls with uneven parts, through each entrance; what the ledger says of each."""
    me = join()
    sizes = arguments["sizes"]
    sent, received = sizes[me.rank], [line[me.rank] for line in sizes]
    rows = torch.full((sum(sent), 3), float(me.rank))
    BOOK.take()
    found = []

    def entered(arrived: torch.Tensor) -> None:
        expected = torch.cat([torch.full((n, 3), float(rank)) for rank, n in enumerate(received)])
        (row,) = BOOK.take().to_json()
        found.append({"bytes": row["bytes"], "calls": row["calls"], "right": torch.equal(arrived, expected)})

    arrived = torch.empty(sum(received), 3)
    dist.all_to_all_single(arrived, rows, received, sent)
    entered(arrived)
    arrived = torch.empty(sum(received), 3)
    dist.group.WORLD.alltoall_base(arrived, rows, output_split_sizes=received, input_split_sizes=sent).wait()
    entered(arrived)
    leave()
    return found

"""Tensor parallelism: a model cut as planned, and its forwards changed to compute on parts.

The model's own code stays in charge. Parameters are replaced by this rank's parts, sizes that the code reads or
names are divided, and the projections at both ends of a region are wrapped: columns bring their input in, rows add up
what all ranks have. What lies between needs no change, for it treats the cut dimension part by part.

`between` is the layout of the stream between regions: full on every rank; cut along the sequence, so that norms and
residuals are shared out too (Korthikanti et al. 2022); or by samples, where convolutions train data-parallel and the
wide layers behind them tensor-parallel on the same ranks (Krizhevsky 2014).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils.hooks import RemovableHandle

from shoal.comm.mesh import Members
from shoal.layout.crossings import Tally
from shoal.layout.cuts import Cut
from shoal.layout.tensor.plan import Region, TensorPlan, sizes_known_inside
from shoal.layout.tensor.resized import divide_views
from shoal.layout.tensor.tokens import stream_blocks
from shoal.parallel.collectives import gather_whole, require_even, split
from shoal.parallel.tensor import multihead
from shoal.parallel.tensor.parameters import PlanDoesNotFit, cut_parameters, is_transposed
from shoal.parallel.tensor.regions import Between, RunningRegion, note, with_first_tensor, working_precision


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What was cut, and what must be done about the rest."""

    cuts: dict[str, Cut] = field(default_factory=dict)
    """By the names of parameters and buffers."""
    partial: frozenset[str] = frozenset()
    """Uncut parameters of which each rank gets part of the gradient, to be summed over the ranks after backward."""
    tally: Tally = field(default_factory=Tally)
    """What crossed between the ranks since the last `take`, from which the ledger of a step follows."""


def cut_tensors(
    model: nn.Module,
    plan: TensorPlan,
    members: Members,
    *,
    between: Between = "whole",
    tally: Tally | None = None,
    stream: tuple[str, ...] | None = None,
) -> Applied:
    """Cuts every region of the plan ("batch": those of features only). Comes before recomputation is applied.
    `stream`: blocks of the residual stream, if the plan holds the regions of one pipeline stage only."""
    applied = Applied(tally=Tally() if tally is None else tally)
    if members.size == 1:
        return applied
    if between == "sequence" and plan.sequence_dim is None:
        raise PlanDoesNotFit(f"sequence=True: the stream cannot be cut along the sequence: {plan.why_no_sequence}")
    regions = [region for region in plan.regions if between != "batch" or region.kind == "features"]
    if between != "sequence":
        stream = ()
    elif stream is None:
        stream = stream_blocks(model, plan)
    modules = dict(model.named_modules(remove_duplicate=False))
    cuts: dict[str, Cut] = {}
    for region in regions:
        if region.parts % members.size:
            raise PlanDoesNotFit(
                f"{region.columns[0]}: its {region.kind} come in {region.parts} parts, which do not divide among "
                f"{members.size} ranks"
            )
        if between != "whole" and not sizes_known_inside(region):
            raise PlanDoesNotFit(
                f"{region.columns[0]}: {region.views[0].module or 'the model'} asks for sizes of what it is given "
                "before that is gathered; declare its projections whole"
            )
        cuts |= region.cuts
    scaled = dict.fromkeys(pair for region in regions for pair in region.scaled)
    keep = [(_at(modules, path), attribute) for path, attribute in scaled]
    applied = replace(applied, cuts=cut_parameters(model, cuts, members, even=True, keep=keep))
    _divide(keep, members)
    views = [view for region in regions for view in region.views]
    divide_views({view.module: _at(modules, view.module) for view in views}, views, members.size)
    applied = replace(applied, partial=partial_names(model, applied.cuts, regions, between, stream))
    whole = {id(p): name for name, p in model.named_parameters() if name not in applied.cuts}
    summed = {id(p) for name, p in model.named_parameters() if name in applied.partial}
    for region in regions:
        in_stream = any(region.columns[0] == block or region.columns[0].startswith(block + ".") for block in stream)
        running = RunningRegion(
            members,
            name=region.columns[0],
            kind=region.kind,
            between="whole" if between == "sequence" and not in_stream else between,
            dim=0 if between != "sequence" or plan.sequence_dim is None else plan.sequence_dim,
            tally=applied.tally,
            summed=summed,
            whole=whole,
        )
        _wrap(modules, region, running)
    _avoid_fused_layers(model, {path for region in regions for path in (*region.columns, *region.rows)})
    return applied


def split_stream(
    model: nn.Module,
    first_block: str | None,
    last_block: str | None,
    dim: int,
    members: Members,
    tally: Tally | None = None,
) -> list[RemovableHandle]:
    """Cuts the stream along `dim` where it enters the first block, and gathers it where it leaves the last;
    None where another rank runs that block."""
    if members.size == 1:
        return []
    noted = Tally() if tally is None else tally

    def cut(x: torch.Tensor) -> torch.Tensor:
        require_even(x.size(dim), members, what=f"the sequence of {list(x.shape)} that enters {first_block}")
        note(noted, "split", x, gradient=torch.is_grad_enabled() and x.requires_grad)
        return split(x, members, dim)

    def join(x: torch.Tensor) -> torch.Tensor:
        note(noted, "gather_whole", x, times=members.size, gradient=True)
        return gather_whole(x, members, dim)

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return with_first_tensor(args, kwargs, cut, dims=3)

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return join(output)
        if isinstance(output, tuple):
            changed = with_first_tensor(output, {}, join, dims=3)[0]
            return type(output)(*changed) if hasattr(output, "_fields") else changed
        raise PlanDoesNotFit(
            f"{last_block} gives back a {type(output).__name__}; with sequence=True it must be a tensor"
        )

    hooks = []
    if first_block is not None:
        hooks.append(model.get_submodule(first_block).register_forward_pre_hook(before, with_kwargs=True))
    if last_block is not None:
        # First gathered what was cut last: cp has cut the stream before.
        hooks.append(model.get_submodule(last_block).register_forward_hook(after, prepend=True))
    return hooks


def require_even_batch(samples: int, members: Members) -> None:
    """With `between="batch"` every rank must bring equally many samples; call it where the full count is known."""
    require_even(samples, members, what="the samples of a batch")


def _at(modules: dict[str, nn.Module], path: str) -> nn.Module:
    if path not in modules:
        raise PlanDoesNotFit(f"the plan names {path!r}, but the model has no module of that name")
    return modules[path]


def _divide(scaled: Iterable[tuple[nn.Module, str]], members: Members) -> None:
    """Divides sizes that the model's code reads; those in a shared configuration on a copy of it."""
    copied: dict[tuple[int, str], Any] = {}
    done: set[tuple[int, str]] = set()
    for module, attribute in scaled:
        if (id(module), attribute) in done:
            continue  # One module under two names.
        done.add((id(module), attribute))
        holder: Any = module
        *outer, last = attribute.split(".")
        for step in outer:
            known = copied.get((id(holder), step))
            if known is None:
                known = copied[id(holder), step] = copy.copy(getattr(holder, step))
                setattr(holder, step, known)
            holder = known
        size = getattr(holder, last, None)
        if not isinstance(size, int) or size % members.size:
            raise PlanDoesNotFit(
                f"{type(module).__name__}.{attribute} is {size!r}, but must be a whole number that divides among "
                f"{members.size} ranks"
            )
        setattr(holder, last, size // members.size)


def partial_names(
    model: nn.Module, cuts: dict[str, Cut], regions: list[Region], between: Between, stream: tuple[str, ...]
) -> frozenset[str]:
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    inside = {name for region in regions for name in region.partial}
    found = set()
    for aliases in names.values():
        if aliases[0] in cuts:
            continue
        on_stream = [any(name.startswith(block + ".") for block in stream) for name in aliases]
        if any(on_stream) and not all(on_stream):
            raise PlanDoesNotFit(
                f"sequence=True: {aliases[0]!r} and {aliases[-1]!r} are one parameter, used on cut positions and on "
                "whole ones alike; its gradient cannot be summed"
            )
        if between == "batch" or any(on_stream) or inside.intersection(aliases):
            found.add(aliases[0])
    return frozenset(found)


def _wrap(modules: dict[str, nn.Module], region: Region, running: RunningRegion) -> None:
    special = set()
    for path in dict.fromkeys(region.columns):
        module: Any = _at(modules, path)
        if isinstance(module, nn.MultiheadAttention):
            multihead.require_plain(module, path)
            module.forward = partial(multihead.forward, module, running)
            special.add(f"{path}.out_proj")
        else:
            product = module.forward if not is_transposed(module) else partial(transposed_product, module)
            module.forward = partial(_column, running, product)
    for path in dict.fromkeys(region.rows):
        if path not in special:
            module = _at(modules, path)
            module.forward = _wrapped_row(module, running)
    if running.between != "whole" and region.entry is not None and region.entry not in region.columns:
        running.gathered_at_entry = True
        entry: Any = _at(modules, region.entry)
        entry.forward = partial(_enter, running, entry.forward)


def _enter(running: RunningRegion, forward: Any, *args: Any, **kwargs: Any) -> Any:
    def enter(x: torch.Tensor) -> torch.Tensor:
        return running.bring_in(working_precision(x))

    args, kwargs = with_first_tensor(args, kwargs, enter, dims=3 if running.between == "sequence" else 2)
    return forward(*args, **kwargs)


def _column(running: RunningRegion, forward: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = with_first_tensor(args, kwargs, running.enter, dims=1)
    return forward(*args, **kwargs)


def row_parallel(module: Any, running: RunningRegion, product: Any, *args: Any, **kwargs: Any) -> Any:
    result = running.leave(product(*args, **kwargs))
    bias = getattr(module, "bias", None)
    if bias is None:
        return result
    planes = module.weight.dim() - 2 if isinstance(module, _ConvNd) else 0
    return result + bias.to(result.dtype).view(-1, *[1] * planes)


def _own_row(module: Any, running: RunningRegion, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """A row whose forward we do not know, save that it is a product and a bias: what it makes of zeros is its bias."""
    result = running.leave(_with_bias_hidden(module, forward, *args, **kwargs))
    if module._parameters.get("bias") is None:
        return result
    args, kwargs = with_first_tensor(args, kwargs, lambda x: x.new_zeros(*[1] * (x.dim() - 1), x.shape[-1]), dims=1)
    return result + forward(*args, **kwargs)


def transposed_product(module: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, module.weight.t(), module.bias)


def _wrapped_row(module: Any, running: RunningRegion) -> Callable[..., Any]:
    """A row: its product alone, the sum over ranks, and its bias once."""
    if type(module).forward is nn.Linear.forward:
        return partial(row_parallel, module, running, lambda input: F.linear(input, module.weight))
    if is_transposed(module):
        return partial(row_parallel, module, running, lambda x: F.linear(x, module.weight.t()))
    if isinstance(module, _ConvTransposeNd):
        return partial(row_parallel, module, running, partial(_with_bias_hidden, module, module.forward))
    if isinstance(module, _ConvNd):
        return partial(row_parallel, module, running, lambda input: module._conv_forward(input, module.weight, None))
    return partial(_own_row, module, running, module.forward)


def _with_bias_hidden(module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    bias = module._parameters.get("bias")
    if bias is None:
        return forward(*args, **kwargs)
    module._parameters["bias"] = torch.zeros_like(bias)
    try:
        return forward(*args, **kwargs)
    finally:
        module._parameters["bias"] = bias


def _avoid_fused_layers(model: nn.Module, wrapped: set[str]) -> None:
    """The library's fused encoder layer reads weights past their modules; a layer with a hook inside is not fused."""
    for path, module in model.named_modules():
        inside = any(name.startswith(f"{path}.") or not path for name in wrapped)
        if inside and isinstance(module, nn.TransformerEncoderLayer):
            module.self_attn.register_forward_hook(lambda *_: None)
        if inside and isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False

"""Parameters and buffers replaced by this rank's parts of them.

A tied parameter is cut once and stays tied. Modules that remember the sizes of their parameters (in_features,
num_groups, ...) get the new ones, so that they still describe and compute what they hold.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from shoal.comm.mesh import Members
from shoal.job.on_disk import is_on_disk, leave_pages, moved
from shoal.layout.cuts import Cut


class PlanDoesNotFit(ValueError):
    """A plan does not fit the model or the number of ranks."""


def cut_parameters(
    model: nn.Module,
    cuts: Mapping[str, Cut],
    members: Members,
    *,
    even: bool,
    keep: Collection[tuple[nn.Module, str]] = (),
) -> dict[str, Cut]:
    """Replaces what `cuts` names by this rank's part; returns the cuts by the names that the model itself gives.

    `even` demands that every segment divides among the ranks. `keep` are attributes that other code scales.
    """
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for held in (module._parameters, module._buffers):
            for attribute, tensor in held.items():
                if tensor is not None:
                    name = f"{path}.{attribute}" if path else attribute
                    tensors[name] = tensor
                    places.setdefault(id(tensor), []).append((name, module, attribute))
    done: dict[str, Cut] = {}
    for name, cut in cuts.items():
        if name not in tensors:
            raise PlanDoesNotFit(f"the plan cuts {name!r}, but the model has no parameter or buffer of that name")
        full = tensors[name]
        first = places[id(full)][0][0]
        if first in done:
            if done[first] != cut:
                raise PlanDoesNotFit(f"{name!r} and {first!r} are one tensor, but the plan cuts them in different ways")
            continue
        done[first] = cut
        part = _part(name, full, cut, members, even=even)
        for _, module, attribute in places[id(full)]:
            held = module._parameters if attribute in module._parameters else module._buffers
            held[attribute] = part  # type: ignore[assignment]
        if is_on_disk(full):
            leave_pages()
    kept = {(id(module), attribute) for module, attribute in keep}
    touched = {id(m): (m, done[name]) for name in done for _, m, a in places[id(tensors[name])] if a != "bias"}
    for module, cut in touched.values():
        _remember_sizes(module, cut, members, kept)
    return done


def _part(name: str, full: torch.Tensor, cut: Cut, members: Members, *, even: bool) -> Any:
    if not 0 <= cut.dim < full.dim() or full.shape[cut.dim] != cut.size:
        raise PlanDoesNotFit(
            f"the plan cuts {name!r} into {cut.segments} along dimension {cut.dim}, but its shape is {list(full.shape)}"
        )
    uneven = [size for size in cut.segments if size % members.size]
    if even and uneven:
        raise PlanDoesNotFit(f"{name!r}: {uneven[0]} does not divide among the {members.size} ranks of {members.axis}")
    if min(cut.segments) < members.size:
        raise PlanDoesNotFit(
            f"{name!r}: {min(cut.segments)} is too little for the {members.size} ranks of {members.axis}"
        )
    with torch.no_grad():
        part = cut.part(full.detach(), members.size, members.index).clone(memory_format=torch.contiguous_format)
        part = moved(part) if is_on_disk(full) else part
    if isinstance(full, nn.Parameter):
        part = nn.Parameter(part, requires_grad=full.requires_grad)
        part.__dict__.update(full.__dict__)  # What others noted on it, for example for their optimiser.
    return part


def is_transposed(module: nn.Module) -> bool:
    """Whether a module computes x @ weight + bias with a weight of [inputs, outputs], as GPT-2's projections do."""
    weight = getattr(module, "weight", None)
    sizes = (getattr(module, "nx", None), getattr(module, "nf", None))
    return isinstance(weight, nn.Parameter) and weight.dim() == 2 and not isinstance(module, nn.Linear) and all(sizes)


def _remember_sizes(module: nn.Module, cut: Cut, members: Members, kept: set[tuple[int, str]]) -> None:
    def resize(**sizes: int) -> None:
        for attribute, size in sizes.items():
            if (id(module), attribute) not in kept:
                setattr(module, attribute, size)

    def divided(attribute: str) -> int:
        size = getattr(module, attribute)
        if size % members.size:
            raise PlanDoesNotFit(
                f"{type(module).__name__}.{attribute} = {size} does not divide among {members.size} ranks"
            )
        return size // members.size

    weight: Any = getattr(module, "weight", None)
    if isinstance(module, nn.Linear):
        resize(out_features=weight.shape[0], in_features=weight.shape[1])
    elif isinstance(module, _ConvNd):
        if module.groups > 1 and cut.dim == 0:
            resize(groups=divided("groups"))
        inner, outer = weight.shape[1] * module.groups, weight.shape[0]
        resize(in_channels=outer if module.transposed else inner, out_channels=inner if module.transposed else outer)
    elif isinstance(module, nn.GroupNorm):
        resize(num_groups=divided("num_groups"), num_channels=divided("num_channels"))
    elif isinstance(module, _NormBase):
        resize(num_features=divided("num_features"))
    elif isinstance(module, nn.Embedding):
        resize(num_embeddings=weight.shape[0], embedding_dim=weight.shape[1])
    elif is_transposed(module):
        resize(nx=weight.shape[0], nf=weight.shape[1])

"""The blocks of a network, found from the module tree.

A block is a child of a `ModuleList` or `Sequential` that holds parameters and is not itself such a container; a child
that is never called (a `ModuleDict`, a `ParameterList`) is searched instead. Patterns that the job declares replace
this search. ZeRO-3 gathers one block at a time, and recomputation keeps only the input of a block. Parameters in no
block (embeddings, the head, tied weights) belong to the root.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from shoal.job.errors import JobError, did_you_mean
from shoal.job.hints import BLOCKS_ATTRIBUTE

CONTAINERS = (nn.Sequential, nn.ModuleList)


@dataclass(frozen=True)
class Unit:
    """A module and the trainable parameters that no other unit holds."""

    name: str
    module: nn.Module
    params: tuple[tuple[str, nn.Parameter], ...]


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost blocks, in the order of the module tree; each module once."""
    declared = getattr(model, BLOCKS_ATTRIBUTE, None)
    if declared is not None:
        return _declared(model, declared)
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def walk(module: nn.Module, name: str, in_container: bool) -> None:
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            is_called = type(child).forward is not nn.Module.forward
            plain = is_called and not isinstance(child, CONTAINERS)
            if in_container and plain and any(True for _ in child.parameters()):
                if id(child) not in seen:
                    seen.add(id(child))
                    found.append((path, child))
            else:
                walk(child, path, isinstance(child, CONTAINERS) or (in_container and not is_called))

    walk(model, "", isinstance(model, CONTAINERS))
    return found


def _declared(model: nn.Module, patterns: tuple[str, ...]) -> list[tuple[str, nn.Module]]:
    """The outermost modules that match a pattern, are called and hold parameters."""
    found: list[tuple[str, nn.Module]] = []
    used: set[str] = set()
    seen: set[int] = set()

    def walk(module: nn.Module, name: str) -> None:
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            matching = [pattern for pattern in patterns if fnmatchcase(path, pattern)]
            is_called = type(child).forward is not nn.Module.forward
            if matching and is_called and any(True for _ in child.parameters()):
                used.update(matching)
                if id(child) not in seen:
                    seen.add(id(child))
                    found.append((path, child))
            else:
                walk(child, path)

    walk(model, "")
    unused = next((pattern for pattern in patterns if pattern not in used), None)
    if unused is not None:
        within = next((path for path, _ in found if any(fnmatchcase(p, unused) for p in _below(path, model))), None)
        if within is not None:
            raise JobError(f"layout: blocks names {unused!r}, which lies within the block {within}; name one of them")
        there = [path for path, module in model.named_modules() if path and any(True for _ in module.parameters())]
        raise JobError(
            f"layout: blocks names {unused!r}, but no module with parameters has that name; "
            f"the model has {', '.join(there[:8])}{', ...' if len(there) > 8 else ''}.{did_you_mean(unused, there)}"
        )
    return found


def _below(path: str, model: nn.Module) -> list[str]:
    return [f"{path}.{name}" for name, _ in model.get_submodule(path).named_modules() if name]


def units(model: nn.Module) -> list[Unit]:
    """The root first, then every block. A parameter used by two blocks, or by a block and the root, is the root's."""
    found = blocks(model)
    owners: dict[int, set[int]] = {}
    in_blocks: set[int] = {id(m) for _, block in found for m in block.modules()}
    for number, (_, block) in enumerate(found):
        for param in block.parameters():
            owners.setdefault(id(param), set()).add(number)
    for module in model.modules():
        if id(module) not in in_blocks:
            for param in module.parameters(recurse=False):
                owners.setdefault(id(param), set()).add(-1)
    held: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            owner = owners[id(param)]
            held.setdefault(next(iter(owner)) if len(owner) == 1 else -1, []).append((name, param))
    root = Unit("", model, tuple(held.get(-1, ())))
    return [root] + [Unit(name, block, tuple(held[n])) for n, (name, block) in enumerate(found) if n in held]

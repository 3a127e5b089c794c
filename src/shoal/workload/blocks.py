"""Which modules are treated as one: the blocks of a network, found from the module tree.

A block is a child of a `ModuleList` or `Sequential` that holds parameters and is not itself such a container; a child
that is never called (a `ModuleDict`, a `ParameterList`) is looked into instead.
ZeRO-3 gathers a block at a time and recomputation keeps a block's input only. What lies in no block (embeddings,
the head, tied weights) belongs to the root.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

CONTAINERS = (nn.Sequential, nn.ModuleList)


@dataclass(frozen=True)
class Unit:
    """A module and the trainable parameters that are its own and nobody else's."""

    name: str
    module: nn.Module
    params: tuple[tuple[str, nn.Parameter], ...]


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost blocks, in the order of the module tree; each module once."""
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

"""`LayoutHints`: what a job declares about how its model may be partitioned. By default all of it is inferred from the
model; a hint overrides the inference. Pure Python: names of modules, no torch.

    job = Job(..., layout=LayoutHints(roles={"blocks.*.gate": "whole"}, stages=("blocks.3",)))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from shoal.job.errors import JobError, did_you_mean

Role = Literal["column", "row", "whole"]
ROLES: tuple[str, ...] = get_args(Role)

BLOCKS_ATTRIBUTE = "shoal_blocks"
"""Attribute of a built model that holds the patterns of its blocks: code that looks for blocks has only the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutHints:
    """A job's hints about its model's layout. Patterns are paths of modules in which * stands for any text."""

    roles: Mapping[str, Role] = field(default_factory=dict)
    """Pattern of projections -> "column" (output is split), "row" (input is split) or "whole" (not split by tp)."""
    stages: tuple[str, ...] | None = None
    """Paths of the pieces that start a pipeline stage, without the first stage. None: Shoal chooses."""
    balanced: bool = True
    """Whether Shoal chooses stages of equal cost, or of equal numbers of pieces."""
    experts: bool = True
    """Whether ep may distribute experts over ranks."""
    blocks: tuple[str, ...] | None = None
    """Patterns of the blocks, where the module tree does not show them (`self.layer1`, `self.layer2`, ...)."""

    def __post_init__(self) -> None:
        if not isinstance(self.roles, Mapping):
            raise JobError(
                f"layout: roles is {self.roles!r}, but must map patterns to roles: {{'blocks.*.up': 'column'}}"
            )
        for pattern, role in self.roles.items():
            if not isinstance(pattern, str) or not pattern:
                raise JobError(f"layout: roles has the pattern {pattern!r}, but a pattern is a module's path")
            if role not in ROLES:
                near = did_you_mean(role, ROLES) if isinstance(role, str) else ""
                raise JobError(
                    f"layout: {pattern!r} is declared {role!r}, but a role is one of {', '.join(ROLES)}.{near}"
                )
        for what in ("balanced", "experts"):
            if not isinstance(getattr(self, what), bool):
                raise JobError(f"layout: {what} is {getattr(self, what)!r}, but must be True or False")
        object.__setattr__(self, "roles", dict(self.roles))
        object.__setattr__(self, "stages", _paths("stages", self.stages))
        object.__setattr__(self, "blocks", _paths("blocks", self.blocks))


def _paths(what: str, given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    if isinstance(given, str):
        raise JobError(f"layout: {what} is the text {given!r}, but must be a tuple of paths: write ({given!r},)")
    try:
        paths = tuple(given)
    except TypeError:
        raise JobError(f"layout: {what} is {given!r}, but must be a tuple of paths") from None
    wrong = [path for path in paths if not isinstance(path, str) or not path]
    if wrong or not paths:
        raise JobError(f"layout: {what} is {given!r}, but must be a tuple of paths of modules, at least one")
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise JobError(f"layout: {what} names {twice!r} twice; once is enough")
    return paths


class WithBlocks:
    """A job's `model` that marks every model it builds with the patterns of its blocks."""

    def __init__(self, build: Callable[[], Any], patterns: tuple[str, ...]) -> None:
        # A job made from another one by `replace` passes a model that is already wrapped.
        self.build: Callable[[], Any] = build.build if isinstance(build, WithBlocks) else build
        self.patterns = patterns

    def __call__(self) -> Any:
        model = self.build()
        setattr(model, BLOCKS_ATTRIBUTE, self.patterns)
        return model

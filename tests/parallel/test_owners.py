"""Whose parameters are: one kind of owner for each answer, and no other code that asks."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import shoal
from shoal.comm.mesh import Mesh
from shoal.parallel.owner.base import Owner
from shoal.parallel.owner.fully_sharded import FullySharded
from shoal.parallel.owner.kinds import owner_kind
from shoal.parallel.owner.replicated import ReplicatedOwner
from shoal.parallel.owner.sharded import ShardedOwner
from shoal.parallel.owner.shared_memory import SharedMemoryOwner
from shoal.parallel.placement import Placement
from shoal.strategy import parse

SOURCE = Path(shoal.__file__).parent
ROOMS = ("parallel", "runtime", "checkpoint", "training", "proof")
ASKS = {"gathering", "memory", "shared_memory", "one_memory"}
"""Attributes by which code could tell one kind of owner from another."""


def asking(path: Path) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    found = {node.attr for node in nodes if node.attr in ASKS}
    return found | {"zero" for node in nodes if node.attr == "zero" and ast.unparse(node.value).endswith("placement")}


def test_no_code_but_the_owners_asks_who_owns_the_parameters() -> None:
    paths = [path for room in ROOMS for path in (SOURCE / room).rglob("*.py")]
    found = {path.relative_to(SOURCE).as_posix() for path in paths if asking(path)}
    assert {name for name in found if not name.startswith("parallel/owner/")} == {"parallel/placement.py"}
    assert "parallel/owner/kinds.py" in found


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("dp(1)", ReplicatedOwner),
        ("dp(1, zero=1)", ShardedOwner),
        ("dp(1, zero=2)", ShardedOwner),
        ("dp(1, zero=3)", FullySharded),
        ("dp(1, via=shared())", SharedMemoryOwner),
    ],
)
def test_a_strategy_names_its_owner(strategy: str, kind: type[Owner]) -> None:
    mesh = Mesh([(axis.name, axis.size) for axis in parse(strategy).axes], rank=0, backend=None)
    assert owner_kind(Placement(parse(strategy), mesh)) is kind

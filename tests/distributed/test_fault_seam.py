"""Faults are planted at public names only, and these are listed in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed.faults import SEAM

FILES = sorted(Path(__file__).parent.glob("*faults.py"))
FILES = [path for path in FILES if not path.name.startswith("test_")]
OF_TORCH = {"_parameters"}


def replaced(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(Class or module, name) of every imported thing's attribute that a file assigns to."""
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            for each in target.elts if isinstance(target, ast.Tuple) else (target,):
                if isinstance(each, ast.Attribute) and ast.unparse(each).split(".")[0] in names:
                    yield ast.unparse(each.value), each.attr


def private(tree: ast.Module) -> set[str]:
    """Private names of other objects that a file reads or writes."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    found = {node.attr for node in nodes if node.attr.startswith("_") and not node.attr.endswith("__")}
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    found |= {alias.name for node in imported for alias in node.names if alias.name.startswith("_")}
    return found - OF_TORCH


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_faults_replace_only_what_the_seam_lists(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert private(tree) == set()
    assert set(replaced(tree)) <= {(where, name) for where, names in SEAM.items() for name in names}


def test_every_name_of_the_seam_is_used() -> None:
    used = {pair for path in FILES for pair in replaced(ast.parse(path.read_text()))}
    assert used == {(where, name) for where, names in SEAM.items() for name in names}


def test_a_private_name_would_be_found() -> None:
    tree = ast.parse("from shoal.parallel.data import GradientReduction\nGradientReduction._send = None\n")
    assert private(tree) == {"_send"}
    assert list(replaced(tree)) == [("GradientReduction", "_send")]

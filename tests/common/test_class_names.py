"""A class name is used once: a reader who has met a `Bucket` need not ask which."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import shoal


def test_no_two_classes_of_the_package_have_the_same_name() -> None:
    found = defaultdict(list)
    package = Path(shoal.__file__).parent
    for path in sorted(package.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(package)))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
    assert len(found) > 300

"""Nothing passes the counting group by: every method of ProcessGroup is accounted for."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from shoal.comm.backend import ShoalGroup
from shoal.comm.counted import REFUSED, CountedGroup
from shoal.comm.group import COUNTED, PASSIVE, CountingGroup, GlooGroup
from shoal.comm.wire import FORMULAS


def methods() -> list[str]:
    """Everything a process group can be asked for, apart from what every Python object has."""
    return [name for name in dir(dist.ProcessGroup) if not (name.startswith("__") and name.endswith("__"))]


@pytest.mark.parametrize("name", methods())
def test_each_method_is_either_counted_or_refused_or_passive(name: str) -> None:
    assert [name in COUNTED, name in REFUSED, name in PASSIVE].count(True) == 1


def test_no_method_is_listed_that_torch_does_not_have() -> None:
    assert {*COUNTED, *REFUSED, *PASSIVE} <= set(methods())


@pytest.mark.parametrize("cls", [CountingGroup, GlooGroup, ShoalGroup])
@pytest.mark.parametrize("name", [*COUNTED, *REFUSED])
def test_each_counted_or_refused_method_is_overridden(cls: type, name: str) -> None:
    # One that is not would fall through to the backend below, silently.
    owner = next(base for base in cls.__mro__ if name in vars(base))
    assert issubclass(owner, CountedGroup)


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in COUNTED.values()}))
def test_each_kind_has_its_formula(kind: str) -> None:
    assert kind in FORMULAS

"""Which backend, and so which devices, rank 0 decides for: by what is asked, and by what every rank reports."""

from __future__ import annotations

import pytest

from shoal.launch.agree import CannotAgree, choose
from shoal.launch.devices import DevicesHere


def ranks(*counts: int, kind: str = "cuda", backend: str = "nccl") -> list[DevicesHere]:
    """Ranks of one host that see this number of devices each."""
    return [
        DevicesHere(kind=kind if n else None, backend=backend if n else None, count=n, local_rank=place)
        for place, n in enumerate(counts)
    ]


def chosen(everyone: list[DevicesHere], asked: str | None = None, *, emulates: bool = False) -> tuple[str, str | None]:
    return choose(asked, everyone, calibrated=None, emulates=emulates)


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_BACKEND", raising=False)


def test_accelerators_are_used_where_every_rank_has_one() -> None:
    assert chosen(ranks(2, 2)) == ("nccl", None)
    assert chosen(ranks(2, 2, 2))[0] == "shoal"
    assert chosen(ranks(2, 0))[0] == "shoal"
    assert chosen(ranks(0, 0)) == ("shoal", None)


def test_what_is_asked_for_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(ranks(2, 2), "gloo") == chosen(ranks(2, 2), "shoal-gloo") == ("gloo", None)
    assert chosen(ranks(2, 2), emulates=True) == ("shoal", None)
    monkeypatch.setenv("SHOAL_BACKEND", "shoal")
    assert chosen(ranks(2, 2)) == ("shoal", None)
    assert chosen(ranks(2, 2), "nccl") == ("nccl", None)


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(CannotAgree, match=r"^--backend nccl: expected shoal or gloo \(there is no accelerator here\)$"):
        chosen(ranks(0, 0), "nccl")
    with pytest.raises(CannotAgree, match=r"^--backend pigeon: expected shoal, gloo or nccl$"):
        chosen(ranks(1), "pigeon")
    with pytest.raises(CannotAgree, match=r"^--backend nccl: rank 2 has no cuda device of its own, since its host"):
        chosen(ranks(2, 2, 2), "nccl")

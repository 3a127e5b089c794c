"""What makes a gradient smaller before it is sent: fewer bits, fewer elements, a sketch, or a low rank.

Compression acts on one level of data parallelism, once per optimiser step. Methods that lose something keep
the rest back and add it to the next gradient (error feedback), or round at random so that nothing is lost on
average (unbiased).

A method is one file of `technique/compress`: a subclass with its words, its bytes, its cost and its codec. Everything
else (parser, rules, tables, traffic, estimates, calibration) reads what is declared here, and names none.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar, NamedTuple

from shoal.strategy.terms.numerals import percent
from shoal.strategy.terms.term import REGISTRY, Promise, Term


class Transfer(NamedTuple):
    """One collective of a reduction."""

    kind: str
    payload_bytes: int
    """As `comm/wire.py` defines it."""


class CompressTerm(Term):
    """A compression of gradients."""

    family = "compress"
    where = "slow links"
    sends: ClassVar[str] = ""
    """What a rank makes of n elements of s bytes, in bytes, for tables."""
    loss: ClassVar[str] = "feedback"
    """What becomes of the error: "none", "rounding", "feedback" (kept and added later) or "unbiased" (zero on
    average).
    """
    collective_only: ClassVar[bool] = False
    """Whether the method is itself a collective, so that no server or neighbour can take its place."""
    between_groups: ClassVar[bool] = False
    """Whether it works between groups that sum densely inside, and so needs such groups."""
    whole_rows: ClassVar[bool] = False
    """Whether a part of a parameter is compressed in whole rows, as a matrix."""
    sends_places: ClassVar[bool] = False
    """Whether elements are sent with indices, which have 32 bits."""
    sized_by_data: ClassVar[bool] = False
    """Whether the values decide how much is sent, so that nothing can be predicted."""
    within: ClassVar[float] = 0.05
    """How far above the dense run's the validation loss may end after as many steps. Measured on the language task with
    AdamW, whose second moments suffer from what comes late and in lumps; docs/compression.md has the figures."""
    reaches_target: ClassVar[bool] = False
    """Whether it reached the target of that task in no more steps than the dense run (`benchmarks/slow_link.py`)."""
    passes: ClassVar[tuple[float, float] | None] = None
    """What it computes, for estimates: passes over the gradient for a rank's own part, and for the payload of each rank
    that is added (`estimate/codecs.py`). None where the values decide."""
    searched: ClassVar[bool] = False
    """Whether plans try it by themselves. They estimate any method whose traffic is known; a few of each kind are
    enough to search."""

    @classmethod
    def measured(cls) -> tuple[CompressTerm, ...]:
        """The terms that `shoal calibrate` times."""
        return (cls.sample(),) if cls.passes is not None else ()

    def payload_bytes(self, num_elements: int, itemsize: int, *, step: int = 0) -> int | None:
        """What one rank makes of a tensor for an all-gather; None where the data decide, or where nothing is
        gathered."""
        return None

    def pushed_bytes(self, num_elements: int, itemsize: int, *, step: int = 0) -> int | None:
        """What a worker sends a server of a tensor; None where the data decide, or where a payload means nothing
        without those of the other ranks. `step`: of the worker's own pushes."""
        return self.payload_bytes(num_elements, itemsize, step=step)

    def transfers(
        self, shape: Sequence[int], itemsize: int, ranks: int, step: int, *, rank: int = 0
    ) -> list[Transfer] | None:
        """The collectives of one reduction as rank `rank` of several makes them; None where data decide."""
        payload = self.payload_bytes(prod(shape), itemsize, step=step)
        return None if payload is None else [Transfer("all_gather", ranks * payload)]

    def ring_bytes(self, elements: Any, sides: Any, *, ranks: Any, itemsize: int) -> tuple[Any, float] | None:
        """For plans, whose gradients are columns of numbers: bytes of what goes around a ring of ranks, and how often
        (an all-gather once, an all-reduce twice); None where no plan can say. `sides`: rows and columns of all
        matrices."""
        many = 10**9
        payload = self.payload_bytes(many, itemsize, step=many)
        return None if payload is None else (ranks * elements * (payload / many), 1.0)

    def lossy(self) -> Promise | None:
        """How the compression departs from the dense gradient; None when it does not."""
        why = {
            "rounding": "rounds every element",
            "feedback": "sends a part of the gradient and keeps the rest for later steps",
            "unbiased": "rounds at random: right on average, with more noise",
        }
        if self.loss == "none":
            return None
        band = f"reaches the target of the dense run, validation loss within {percent(self.within)} after as many steps"
        return Promise("statistical", f"{self} {why[self.loss]}", band=band, within=self.within)


class none(CompressTerm):
    """Nothing is compressed."""

    title = "no compression"
    loss = "none"
    where = "any links"
    reaches_target = True

    def words(self) -> str:
        return "gradients are sent as they are"

    def transfers(
        self, shape: Sequence[int], itemsize: int, ranks: int, step: int, *, rank: int = 0
    ) -> list[Transfer] | None:
        return [Transfer("all_reduce", prod(shape) * itemsize)]


REGISTRY.find("compress")


def compressors() -> list[type[CompressTerm]]:
    """Every method, `none` included."""
    found = [REGISTRY[name] for name in REGISTRY.of("compress")]
    return [term for term in found if issubclass(term, CompressTerm)]


def __getattr__(name: str) -> Any:
    """A method that is a file of its own."""
    if name in REGISTRY.of("compress"):
        return REGISTRY[name]
    raise AttributeError(f"there is no compression called {name}")

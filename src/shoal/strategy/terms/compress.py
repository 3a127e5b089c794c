"""What makes a gradient smaller before it is sent: fewer bits, fewer elements, a sketch, or a low rank.

Compression acts on one level of data parallelism, once per optimiser step. Methods that lose something keep
the rest back and add it to the next gradient (error feedback), or round at random so that nothing is lost on
average (unbiased).
"""

from __future__ import annotations

from typing import ClassVar

from shoal.strategy.terms.arguments import LARGEST_SIZE, real, whole
from shoal.strategy.terms.numerals import counted, percent
from shoal.strategy.terms.term import Promise, Term


class CompressTerm(Term):
    """A compression of gradients."""

    family = "compress"
    where = "slow links"
    loss: ClassVar[str] = "feedback"
    """What becomes of the error: "none", "rounding", "feedback" (kept and added later) or "unbiased" (zero on
    average).
    """
    collective_only: ClassVar[bool] = False
    """Whether the method is itself a collective, so that no server or neighbour can take its place."""
    within: ClassVar[float] = 0.05
    """How far above the dense run's the validation loss may end after as many steps. Measured on the language task with
    AdamW, whose second moments suffer from what comes late and in lumps; docs/compression.md has the figures."""

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

    def words(self) -> str:
        return "gradients are sent as they are"


class fp16(CompressTerm):
    """Half precision on the wire."""

    title = "half precision on the wire"
    loss = "rounding"

    def words(self) -> str:
        return "gradients are sent in 16 bits"


class int8(CompressTerm):
    """Eight-bit integers with a scale for each block."""

    title = "8-bit integers"

    def words(self) -> str:
        return "gradients are sent as 8-bit integers with a scale for each block"


class qsgd(CompressTerm):
    """QSGD: random rounding to a few levels of the norm."""

    bits: int = whole(1, 16)

    title = "QSGD"
    loss = "unbiased"

    def words(self) -> str:
        return f"every element is rounded at random to one of the levels that {counted(self.bits, 'bit')} can say"


class ternary(CompressTerm):
    """TernGrad: each element becomes -1, 0 or 1 at random, times the largest."""

    title = "TernGrad"
    loss = "unbiased"

    def words(self) -> str:
        return "every element becomes -1, 0 or +1 at random, times the largest"


class onebit(CompressTerm):
    """1-bit SGD: the sign of each element, and the mean of the positive and of the negative ones."""

    title = "1-bit SGD"
    within = 0.3

    def words(self) -> str:
        return "one bit per element says above or below zero; two means say how far; the error waits for the next step"


class sign(CompressTerm):
    """Sign SGD with error feedback: the sign of each element and one scale."""

    title = "sign SGD with error feedback"
    within = 0.3

    def words(self) -> str:
        return "the sign of every element is sent, with one scale; the error waits for the next step"


class topk(CompressTerm):
    """The largest elements, a fraction r of them."""

    r: float = real(0.0, 1.0)

    title = "top-k"
    within = 0.15

    def words(self) -> str:
        return (
            f"the largest {percent(self.r)} of the elements are sent with their places; the rest waits for "
            "the next step"
        )


class randomk(CompressTerm):
    """Elements at random, a fraction r of them, the same on all replicas."""

    r: float = real(0.0, 1.0)

    title = "random-k"
    within = 0.3

    def words(self) -> str:
        return (
            f"{percent(self.r)} of the elements, drawn alike on all replicas, are sent; the rest waits for "
            "the next step"
        )


class threshold(CompressTerm):
    """Every element whose magnitude is at least t."""

    t: float = real(0.0, 1e30)

    title = "threshold"
    within = 0.15

    def words(self) -> str:
        return f"elements of magnitude {self.t:g} and more are sent with their places; the rest waits for the next step"


class dgc(CompressTerm):
    """Deep gradient compression: top-k with momentum correction, local clipping and warm-up."""

    r: float = real(0.0, 1.0)

    title = "deep gradient compression"
    within = 0.3

    def words(self) -> str:
        return (
            f"the largest {percent(self.r)} of the elements are sent, with corrected momentum, clipping "
            "before the choice "
            "and a gentle start (DGC)"
        )


class mstopk(CompressTerm):
    """MSTopK: exactly k elements above a threshold found by bisection, without a sort."""

    r: float = real(0.0, 1.0)

    title = "MSTopK"
    within = 0.15

    def words(self) -> str:
        return (
            f"the largest {percent(self.r)} of the elements, found by bisecting a threshold instead of "
            "sorting, are sent"
        )


class gtopk(CompressTerm):
    """gTop-k: a tree of merges keeps the k largest of the sum, not k from each replica."""

    r: float = real(0.0, 1.0)

    title = "gTop-k"
    collective_only = True
    within = 0.3

    def words(self) -> str:
        return f"a tree of pairwise merges keeps the largest {percent(self.r)} of the sum of all replicas"


class hitopk(CompressTerm):
    """HiTopKComm: dense inside a host, the top-k of each shard between hosts."""

    r: float = real(0.0, 1.0)

    title = "HiTopKComm"
    collective_only = True
    within = 0.15

    def words(self) -> str:
        return (
            f"hosts sum densely inside; of every shard the largest {percent(self.r)} of the elements go between hosts"
        )


class sketch(CompressTerm):
    """A count sketch: a table of `rows` x `columns` random sums. Sketches add, so servers and trees can sum
    them.
    """

    rows: int = whole(1, 1024)
    columns: int = whole(1)

    title = "count sketch"
    within = 0.3

    def words(self) -> str:
        return (
            f"a count sketch of {self.rows:,} x {self.columns:,} sums stands for the gradient; sketches add, "
            "and the heavy elements are read back from the sum"
        )


class powersgd(CompressTerm):
    """PowerSGD: each gradient matrix as a product of two thin ones, by one step of power iteration."""

    rank: int = whole(1, LARGEST_SIZE)

    title = "PowerSGD"
    within = 0.15

    def words(self) -> str:
        return (
            f"each gradient matrix is sent as a product of two thin ones of rank {self.rank}; the error "
            "waits for the next step"
        )

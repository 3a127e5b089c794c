"""The axes: each cuts the batch, the model or the sequence into parts and gives every part to a rank.

Axes multiply, left to right from the slowest links to the fastest. What an axis cuts decides its place in the
taxonomies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from shoal.strategy.terms.arguments import choice, flag, integer, nested, size
from shoal.strategy.terms.compress import CompressTerm, none
from shoal.strategy.terms.numerals import capital, count, counted, share, shares
from shoal.strategy.terms.sync import SAME_TARGET, SyncTerm, asp, bsp, hogwild, softsync, ssp
from shoal.strategy.terms.term import Promise, Term
from shoal.strategy.terms.via import ViaTerm, allreduce, ps, shared

Cut = Literal["batch", "layer", "layers"]


class AxisTerm(Term):
    """A factor with a size: `n` parts."""

    family = "axis"
    n: int
    cuts: ClassVar[tuple[Cut, ...]] = ("batch",)
    """What its ranks hold parts of: the batch, each layer, or the stack of layers. An axis may cut more than
    one.
    """

    def patterns(self) -> tuple[str, ...]:
        """The communication patterns along this axis."""
        return ("ring/butterfly",)


def _natural_path(values: Mapping[str, Any]) -> ViaTerm:
    """The path that a synchronisation takes if none is named: a server where no replica waits for all, else an
    all-reduce.
    """
    if isinstance(values["sync"], hogwild):
        return shared()
    if isinstance(values["sync"], (softsync, ssp, asp)):
        return ps(values["n"], colocated=True)
    return allreduce()


class dp(AxisTerm):
    """Data parallelism: replicas of the model, each with a part of the batch. May repeat, outer level to
    inner.

    `zero` splits what replicas would hold twice: 1 optimiser state, 2 gradients too, 3 parameters too.
    """

    n: int = size()
    zero: int = integer(0, 3, default=0, kw_only=True)
    sync: SyncTerm = nested("sync", default=bsp(), kw_only=True)
    via: ViaTerm = nested("via", default=_natural_path, kw_only=True)
    compress: CompressTerm = nested("compress", default=none(), kw_only=True)

    title = "data parallelism, ZeRO stages 1-3"
    where = "any links"

    def words(self) -> str:
        replicas = f"{capital(counted(self.n, 'replica'))} {'takes' if self.n == 1 else 'each take'}"
        parts = [f"{replicas} {share(self.n)}{' of' if self.n > 1 else ''} the batch"]
        if self.zero:
            split = (
                "optimiser state is",
                "optimiser state and gradients are",
                "optimiser state, gradients and parameters are",
            )
            parts.append(f"{split[self.zero - 1]} split {shares(self.n)}")
            moved = {
                1: "gradients are reduce-scattered, and the updated parameters are gathered once a step",
                2: "gradients are reduce-scattered as they appear, and the updated parameters are gathered once a step",
                3: "parameters are gathered block by block before use and dropped after, gradients are "
                "reduce-scattered",
            }
            parts.append(moved[self.zero])
        what = "gradients are summed" if self.sync.exchanges == "gradient" else "models are averaged"
        path = self.sync.path or self.via.words()
        if not self.zero:
            parts.append(f"{what} {path}")
        parts.append(self.sync.words())
        if not isinstance(self.compress, none):
            parts.append(self.compress.words())
        return "; ".join(parts) + "."

    def promises(self) -> tuple[Promise, ...]:
        both = (self.sync.drift(self.n), self.compress.lossy())
        return tuple(promise for promise in both if promise is not None)

    def patterns(self) -> tuple[str, ...]:
        return ("gossip",) if self.sync.neighbours else (self.via.pattern(),)


class pp(AxisTerm):
    """Pipeline parallelism: consecutive layers form stages, and micro-batches flow through them.

    `micro` is the number of micro-batches in a step, as many as stages by default; `chunks` the number of
    pieces of the model on each rank. `predict` lets pipedream run forward with the weights that it expects at the
    time of the backward pass.
    """

    n: int = size()
    schedule: str = choice("gpipe", "1f1b", "interleaved", "zero-bubble", "pipedream", default="1f1b")
    micro: int = integer(1, default=lambda values: values["n"], kw_only=True)
    chunks: int = integer(1, 1024, default=1, kw_only=True)
    predict: bool = flag(default=False, kw_only=True)

    title = "pipeline parallelism: GPipe, 1F1B, interleaved, zero-bubble, PipeDream"
    where = "any links"
    cuts = ("layers",)

    def words(self) -> str:
        flow = {
            "gpipe": "all forward passes run first, then all backward passes, then one step",
            "1f1b": "forward and backward passes take turns, so no rank keeps more micro-batches than "
            "there are stages, then one step",
            "interleaved": "each rank holds several thin pieces of the model, which shortens the time in "
            "which ranks idle",
            "zero-bubble": "the backward pass is split, and weight gradients fill the time in which ranks would idle",
            "pipedream": "there is no flush: each micro-batch steps, and uses the stashed weights of its forward pass",
        }[self.schedule]
        stages = f"the layers form {counted(self.n * self.chunks, 'stage')} on {counted(self.n, 'rank')}"
        batches = counted(self.micro, "micro-batch", "micro-batches")
        ahead = "; these are predicted from the last update" if self.predict else ""
        return f"{capital(stages)}; a step sends {batches} through; {flow}{ahead}."

    def promises(self) -> tuple[Promise, ...]:
        if self.schedule != "pipedream" or self.n == 1:
            return ()
        stale = self.n - 1
        reason = f"pipedream does not flush: the first stage computes with weights {counted(stale, 'update')} old"
        return (Promise("bounded", reason, staleness=stale),)

    def patterns(self) -> tuple[str, ...]:
        return ("point-to-point",)


class tp(AxisTerm):
    """Tensor parallelism: the matrices (or channels) of each layer are cut by columns and rows.

    Between the cut layers activations are full, or cut along the `sequence`, or along the `batch`: then only fully
    connected layers are cut, and for the rest of the model these ranks are replicas ("one weird trick").
    """

    n: int = size()
    sequence: bool = flag(default=False, kw_only=True)
    batch: bool = flag(default=False, kw_only=True)

    title = "tensor parallelism: columns and rows, channels and filters"
    where = "fast links"
    cuts = ("layer",)

    def words(self) -> str:
        sequence = " Between the cut layers activations are cut along the sequence as well." if self.sequence else ""
        if self.batch:
            return (
                f"The matrices of the fully connected layers are cut {shares(self.n)}, by columns and then by rows; "
                "for the other layers these ranks are replicas, each with its part of the batch, which is gathered "
                "before a pair of cut layers and split again after it."
            )
        return (
            f"The matrices of every layer are cut {shares(self.n)}, by columns and then by rows; "
            f"partial results are summed after each pair.{sequence}"
        )


class cp(AxisTerm):
    """Context parallelism: the sequence is cut, and attention reaches across the cuts."""

    n: int = size()
    method: str = choice("ring", "ulysses", default="ring")

    title = "context parallelism: ring attention, Ulysses"
    where = "fast links"
    cuts = ("layer",)

    def words(self) -> str:
        how = {
            "ring": "keys and values travel around a ring, and every rank attends to each part as it passes",
            "ulysses": "an all-to-all turns parts of the sequence into full sequences of some heads, and "
            "back after attention",
        }[self.method]
        return f"The sequence is cut {shares(self.n)}; {how}."

    def patterns(self) -> tuple[str, ...]:
        return ("ring/butterfly",) if self.method == "ring" else ("all-to-all",)


class ep(AxisTerm):
    """Expert parallelism: the experts are split among ranks, and tokens travel to theirs. For the dense part its
    ranks are replicas.
    """

    n: int = size()

    title = "expert parallelism"
    where = "fast links"
    cuts = ("batch", "layer")

    def words(self) -> str:
        return (
            f"The experts are split among {counted(self.n, 'rank')}; tokens travel to their experts and "
            "back by all-to-all. "
            "For the rest of the model these ranks are replicas, each with its part of the batch."
        )

    def patterns(self) -> tuple[str, ...]:
        return ("all-to-all",)


class spatial(AxisTerm):
    """Spatial parallelism: image planes are cut, and convolutions exchange the rows at the cuts (halos)."""

    n: int = size()
    split: str = choice("height", "width", "both", default="height")

    title = "spatial parallelism with halo exchange"
    where = "fast links"
    cuts = ("layer",)

    @property
    def grid(self) -> tuple[int, int]:
        """Parts along the height and along the width; "both" makes the grid as square as n allows."""
        if self.split == "height":
            return self.n, 1
        if self.split == "width":
            return 1, self.n
        rows = next(rows for rows in range(int(self.n**0.5 + 1e-9), 0, -1) if self.n % rows == 0)
        return self.n // rows, rows

    def of(self, n: int) -> spatial:
        """The same for another number of ranks."""
        return spatial(n, self.split)

    def fits(self, height: int, width: int) -> bool:
        """Whether every rank gets a part of such an image."""
        return self.grid[0] <= height and self.grid[1] <= width

    def words(self) -> str:
        rows, columns = self.grid
        along = {"height": "by height", "width": "by width", "both": f"into {rows} x {columns} tiles"}[self.split]
        return (
            f"Every image is cut {along} for {counted(self.n, 'rank')}; "
            "convolutions fetch the borders that they need from the neighbours."
        )

    def patterns(self) -> tuple[str, ...]:
        return ("point-to-point",)


class ensemble(AxisTerm):
    """Independent members: each trains a model of its own; predictions are averaged, or distilled into one
    network.
    """

    n: int = size()
    distill: bool = flag(default=False, kw_only=True)

    title = "ensembles and distillation"
    where = "slow links"

    def words(self) -> str:
        after = "then one network learns from all of them" if self.distill else "and their predictions are averaged"
        members = "member" if self.n == 1 else "members"
        return f"{capital(count(self.n))} independent {members} train separately, {after}."

    def promises(self) -> tuple[Promise, ...]:
        reason = (
            f"the {count(self.n)} members are different models from different seeds, judged by their joint prediction"
        )
        return (Promise("statistical", reason, band=SAME_TARGET),) if self.n > 1 or self.distill else ()

    def patterns(self) -> tuple[str, ...]:
        return ()

"""Gossip: an island exchanges models with its neighbours in a graph only (`strategy/graphs.py`); no collective of all.

"sync" (D-PSGD; Lian et al. 2017): every h steps, with weights w_ij that are 1 / (1 + neighbours) and sum to 1 over i
and over j, so that the mean of all islands stays:

    x_i <- sum_j w_ij x_j

With an outer momentum (NoLoCo; Kolehmainen et al. 2025, arXiv 2506.10911; graph="random" draws its pairs), where phi_i
is what island i began the round with:

    b_i   <- momentum b_i + lr sum_j w_ij (x_j - phi_j) - pull (phi_i - sum_j w_ij phi_j)
    phi_i <- phi_i + b_i,   x_i <- phi_i

lr = pull = 1 without momentum is the line above. With lr = pull one model is sent to each neighbour, otherwise two.

"push-sum" (SGP; Assran et al. 2019): for directed graphs. Island i keeps a biased model y_i and a weight a_i, and
computes with x_i = y_i / a_i. A round adds the change of x_i to y_i and splits both equally among the island and those
that it sends to:

    y_i <- sum_j p_ij y_j,   a_i <- sum_j p_ij a_j          the sums of all y and of all a stay

"async" (AD-PSGD; Lian et al. 2018): each island steps by itself. In a graph of two colours the islands of one colour
ask a neighbour drawn at random after every h steps, and both become their mean; those of the other colour answer at any
time.

Islands differ after an exchange and keep their own buffers; the mean of all is evaluated and saved (under push-sum, all
y over all a).
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, NamedTuple

from shoal.parallel.sync.scheme import Kept, Scheme
from shoal.strategy.graphs import GRAPHS, neighbours, rounds_to_all, targets, two_colours
from shoal.strategy.terms.arguments import choice, integer, real
from shoal.strategy.terms.numerals import every
from shoal.strategy.terms.sync import SAME_TARGET, Sendable, pair_calls
from shoal.strategy.terms.term import Promise

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shoal.parallel.sync.outer import OuterLevel
    from shoal.parallel.sync.pairs import PairRule

NUMBERS_BYTES = 16
"""That travel with each model: when to stop, and a weight."""


class Turn(NamedTuple):
    """Which exchange it is, counted from 0, and of which of how many islands."""

    round: int
    island: int
    islands: int


class gossip(Scheme):
    """Gossip: no replica knows all others; each averages its weights with its neighbours in a graph."""

    graph: str = choice(*GRAPHS)
    mode: str = choice("sync", "async", "push-sum", default="sync")
    h: int = integer(1, default=1, kw_only=True)
    momentum: float = real(0.0, 1.0, default=0.0, kw_only=True, inclusive=True)
    lr: float = real(0.0, 10.0, default=1.0, kw_only=True)
    pull: float = real(0.0, 2.0, default=1.0, kw_only=True)
    seed: int = integer(0, default=0, kw_only=True)

    title = "gossip: D-PSGD, AD-PSGD, push-sum"
    where = "any links"
    equal = False
    neighbours = True
    path = "neighbour to neighbour"

    def words(self) -> str:
        when = every(self.h, "step")
        averaged = {
            "sync": f"{when} each replica averages its weights with its neighbours'",
            "async": "each replica steps when it can, and averages its weights with one neighbour at a "
            "time, waiting for no other",
            "push-sum": f"{when} each replica pushes a weighted share of its weights to its successors, "
            "and divides by the weight it has gathered",
        }
        article = "an" if self.graph == "exponential" else "a"
        outer = "; how it moved since the last time is taken with an outer momentum" if self.outer else ""
        return f"{averaged[self.mode]}, in {article} {self.graph} graph{outer}"

    def drift(self, replicas: int) -> Promise | None:
        if replicas == 1 and not self.outer:
            return None
        reason = f'gossip("{self.graph}") mixes neighbours only, so replicas agree on average and not exactly'
        return Promise("statistical", reason, band=SAME_TARGET)

    @property
    def outer(self) -> bool:
        """Whether there is an outer optimiser."""
        return (self.momentum, self.lr, self.pull) != (0.0, 1.0, 1.0)

    @property
    def scheduling(self) -> str:  # type: ignore[override]
        return "asynchronous" if self.mode == "async" else "synchronous"

    @property
    def period(self) -> int:
        return self.h

    def targets(self, turn: Turn) -> list[list[int]]:
        """The islands that each sends to."""
        directed = self.mode == "push-sum"
        return targets(self.graph, turn.islands, round=turn.round, seed=self.seed, directed=directed)

    def calls(self, clock: int, held: Sendable) -> list[tuple[str, int]]:
        if self.mode == "async":
            passive = self._answers(held.island, held.islands)
            return pair_calls(held, held.asked if passive else int((clock + 1) % self.h == 0))
        if (clock + 1) % self.h:
            return []
        sending = self.targets(Turn((clock + 1) // self.h - 1, held.island, held.islands))
        message = [*held.slices, NUMBERS_BYTES]
        if self.outer and self.lr != self.pull:
            message = [*held.slices, *message]
        times = {"send": len(sending[held.island]), "recv": sum(held.island in to for to in sending)}
        return [(kind, size) for kind, number in times.items() for _ in range(number) for size in message]

    def _answers(self, island: int, islands: int) -> bool:
        """Whether an island answers under "async"; the others ask."""
        return bool((two_colours(self.graph, islands) or [1])[island])

    @property
    def by_tickets(self) -> bool:
        return self.mode == "async"

    def pairs(self, island: int, islands: int) -> PairRule | None:
        if self.mode != "async":
            return None
        from shoal.parallel.sync.pairs import PairRule

        passive, joined = self._answers(island, islands), neighbours(self.graph, islands)[island]

        def partner(round: int) -> int | None:
            return None if passive else Random(f"{self.seed} {island} {round}").choice(joined)

        return PairRule(partner, answers_with="model" if passive else None, part=0.5)

    def act(self, level: OuterLevel, clock: int, *, stop: bool) -> bool:
        if level.pairs is not None:
            return level.pairs.step(stop=stop)
        if (clock + 1) % self.h:
            return False
        known = (
            rounds_to_all(
                self.graph,
                level.islands.size,
                origin=level.islands.index,
                round=int(level.kept.numbers["round"]),
                seed=self.seed,
                directed=self.mode == "push-sum",
            )
            if stop
            else 0
        )
        return level.meet_neighbours(known, stop)

    def begin(self, parameters: Sequence[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        if self.mode != "sync":
            names = ("biased",) if self.mode == "push-sum" else ("model", "read")
            return {name: [p.clone() for p in parameters] for name in names}
        if self.outer:
            return {"anchor": [p.clone() for p in parameters], "momentum": [p.clone().zero_() for p in parameters]}
        return {}

    def numbers(self) -> dict[str, float]:
        return {"sync": {"round": 0.0}, "push-sum": {"round": 0.0, "weight": 1.0}, "async": {"clock": 0.0}}[self.mode]

    def exchange(self, level: OuterLevel, weight: float) -> None:
        turn = Turn(int(level.kept.numbers["round"]), level.islands.index, level.islands.size)
        level.kept.numbers["round"] += 1
        if self.mode == "push-sum":
            self._push(level, turn)
        elif not self.outer:
            self._mix(level, turn, level.masters)
        else:
            self._step(level, turn)

    def _mix(self, level: OuterLevel, turn: Turn, tensors: Sequence[torch.Tensor]) -> None:
        """Tensors become the weighted mean of this island's and its neighbours'."""
        sending = self.targets(turn)
        sources = [source for source, to in enumerate(sending) if turn.island in to]
        arrived = level.messages.exchange(sending[turn.island], sources, tensors)
        weights = [1 / (1 + len(sending[each.source])) for each in arrived]
        for at, tensor in enumerate(tensors):
            # The weight of a neighbour that was lost falls to the island itself.
            tensor.mul_(1 - sum(weights))
            for each, weight in zip(arrived, weights, strict=True):
                tensor.add_(each.tensors[at], alpha=weight)

    def _step(self, level: OuterLevel, turn: Turn) -> None:
        anchors, momenta = level.kept["anchor"], level.kept["momentum"]
        if self.lr == self.pull:
            mixed = [now.clone() for now in level.masters]
            self._mix(level, turn, mixed)
            forces = [self.lr * (mean - anchor) for mean, anchor in zip(mixed, anchors, strict=True)]
        else:
            both = [now - anchor for now, anchor in zip(level.masters, anchors, strict=True)]
            both += [anchor.clone() for anchor in anchors]
            self._mix(level, turn, both)
            moved, means = both[: len(anchors)], both[len(anchors) :]
            forces = [
                self.lr * move - self.pull * (anchor - mean)
                for move, anchor, mean in zip(moved, anchors, means, strict=True)
            ]
        for now, anchor, momentum, force in zip(level.masters, anchors, momenta, forces, strict=True):
            momentum.mul_(self.momentum).add_(force)
            anchor.add_(momentum)
            now.copy_(anchor)

    def _biased(self, level: OuterLevel) -> list[torch.Tensor]:
        """The biased model with all that the island has learned since the last round."""
        weight = level.kept.numbers["weight"]
        rows = zip(level.masters, level.kept["biased"], strict=True)
        return [biased + (now - biased / weight) for now, biased in rows]

    def _push(self, level: OuterLevel, turn: Turn) -> None:
        sending = self.targets(turn)[turn.island]
        sources = [source for source, to in enumerate(self.targets(turn)) if turn.island in to]
        part = 1 / (1 + len(sending))
        shares, weight = [part * biased for biased in self._biased(level)], part * level.kept.numbers["weight"]
        arrived = level.messages.exchange(sending, sources, shares, weight)
        level.kept.numbers["weight"] = total = weight + sum(each.number for each in arrived)
        for at, (now, biased) in enumerate(zip(level.masters, level.kept["biased"], strict=True)):
            biased.copy_(shares[at])
            for each in arrived:
                biased.add_(each.tensors[at])
            now.copy_(biased).div_(total)

    def agree(self, level: OuterLevel, weight: float) -> None:
        if self.mode == "push-sum":
            mean = level.total(level.kept.numbers["weight"]) * weight
            for now, biased in zip(level.masters, self._biased(level), strict=True):
                now.copy_(biased).div_(mean)
        level.average(weight)

    def simulate(
        self, islands: Sequence[Sequence[torch.Tensor]], weights: Sequence[float], kept: Sequence[Kept]
    ) -> None:
        mixing = self._matrix(len(islands), int(kept[0].numbers["round"]))
        before = [[tensor.clone() for tensor in tensors] for tensors in islands]
        masses = [each.numbers.get("weight", 1.0) for each in kept]
        for row, each in zip(mixing, kept, strict=True):
            each.numbers["round"] += 1
            if self.mode == "push-sum":
                each.numbers["weight"] = sum(share * mass for share, mass in zip(row, masses, strict=True))
        for at in range(len(before[0])):
            now = [tensors[at] for tensors in before]
            if self.mode == "push-sum":
                biased = [each["biased"][at] for each in kept]
                now = [y + x - y / a for x, y, a in zip(now, biased, masses, strict=True)]
            began = [each["anchor"][at] for each in kept] if self.outer else []
            for place, (row, tensors, each) in enumerate(zip(mixing, islands, kept, strict=True)):
                mean = sum(share * tensor for share, tensor in zip(row, now, strict=True))
                if self.mode == "push-sum":
                    each["biased"][at] = mean
                    tensors[at].copy_(mean / each.numbers["weight"])
                elif self.outer:
                    common = sum(share * tensor for share, tensor in zip(row, began, strict=True))
                    change = self.lr * (mean - common) - self.pull * (began[place] - common)
                    each["momentum"][at] = self.momentum * each["momentum"][at] + change
                    each["anchor"][at] = began[place] + each["momentum"][at]
                    tensors[at].copy_(each["anchor"][at])
                else:
                    tensors[at].copy_(mean)

    def simulate_pair(self, asking: Kept, asked: Kept) -> None:
        for at, (mine, theirs) in enumerate(zip(asking["model"], asked["model"], strict=True)):
            mean = (mine + theirs) / 2
            asking["model"][at], asked["model"][at] = mean.clone(), mean.clone()

    def simulate_agreed(self, islands: Sequence[Sequence[torch.Tensor]], kept: Sequence[Kept]) -> list[torch.Tensor]:
        if self.mode == "async":
            return super().simulate_agreed([each["model"] for each in kept], kept)
        if self.mode == "sync":
            return super().simulate_agreed(islands, kept)
        total = sum(each.numbers["weight"] for each in kept)
        return [
            sum(
                each["biased"][at] + tensors[at] - each["biased"][at] / each.numbers["weight"]
                for tensors, each in zip(islands, kept, strict=True)
            )
            / total
            for at in range(len(islands[0]))
        ]  # type: ignore[misc]

    def _matrix(self, n: int, round: int) -> list[list[float]]:
        """What island i takes of island j, for a simulation: from the definition of each graph."""
        powers = [2**k for k in range(n) if 2**k < n]
        columns = max((side for side in range(1, n) if n % side == 0 and side * side >= n), default=n)
        directed = self.mode == "push-sum"
        drawn = targets(self.graph, n, round=round, seed=self.seed, directed=directed) if self.graph == "random" else []

        def sends(j: int, i: int) -> bool:
            ahead, back = (i - j) % n, (j - i) % n
            if self.graph == "ring":
                return ahead == 1 or (not directed and back == 1)
            if self.graph == "exponential":
                return ahead in powers or (not directed and back in powers)
            if self.graph == "one-peer":
                return ahead == powers[round % len(powers)]
            if self.graph == "torus":
                down, right = (i // columns - j // columns) % (n // columns), (i - j) % columns
                wanted = (1,) if directed else (1, columns - 1)
                sideways = i // columns == j // columns and right in wanted
                return sideways or (right == 0 and down in ((1,) if directed else (1, n // columns - 1)))
            return i in drawn[j] if drawn else True

        joined = [[i != j and sends(j, i) for j in range(n)] for i in range(n)]
        degrees = [sum(row[j] for row in joined) for j in range(n)]
        return [[(joined[i][j] or i == j) / (1 + degrees[j]) for j in range(n)] for i in range(n)]

"""A way to keep islands together that runs: the base of every file in `technique/sync`.

It is a term, a frozen value: what it keeps from exchange to exchange is in the level it is handed. Files are read
wherever a strategy names one, so what needs torch is imported inside functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from shoal.strategy.terms.sync import SyncTerm

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shoal.parallel.sync.outer import OuterLevel
    from shoal.parallel.sync.pairs import PairRule


class Kept(dict[str, "list[torch.Tensor]"]):
    """What a scheme keeps for one island: tensors laid out as the parameters are, and numbers."""

    def __init__(self, scheme: Scheme, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(scheme.begin(parameters))
        self.numbers = scheme.numbers()


class Scheme(SyncTerm):
    """Islands that exchange models every `period` steps."""

    family = "sync"
    exchanges = "model"
    spectrum = "model averaging / elastic averaging"
    where = "slow links"
    compresses = False
    equal: ClassVar[bool] = True
    """Whether all islands hold the same model after an exchange. Where they do not, each keeps its own buffers as well,
    and what is evaluated and saved is what `agree` makes of them."""

    @property
    def period(self) -> int:
        """Steps from one exchange to the next."""
        raise TypeError(f"{self} does not define when islands exchange")

    def begin(self, parameters: Sequence[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        """What it keeps for each element of the parameters, by name, as it is at the start. An exchange
        changes it in place (it is undone where an island is lost meanwhile). It is part of a checkpoint."""
        return {}

    def numbers(self) -> dict[str, float]:
        """Numbers that it keeps for each island, by name, as they are at the start (`Kept.numbers`)."""
        return {}

    def agree(self, level: OuterLevel, weight: float) -> None:
        """Makes this island's values what is evaluated and saved; the level restores its own afterwards. `weight` is as
        in `exchange`, and the same for all islands where they are not equal after an exchange."""
        level.average(weight)

    @property
    def by_tickets(self) -> bool:
        """Whether islands run at their own speed, and a free one takes the next share of the data."""
        return False

    @property
    def merges(self) -> bool:
        """Whether the first island merges what others send it at any time."""
        return False

    def start_turns(self, level: OuterLevel, step: int) -> None:
        """Where islands run at their own speed: all of them stand at a step."""

    def turn(self, level: OuterLevel, before: int, after: int) -> None:
        """Likewise: this one stood at one step and stands at another one now, later or not."""

    def synchronous(self, clock: int) -> bool:
        """Whether all islands sum their gradients in a step (from 0), as if they were one."""
        return False

    def pairs(self, island: int, islands: int) -> PairRule | None:
        """How this island exchanges with one other at a time, when it is ready; None for schemes in which islands
        exchange together. What is exchanged is kept as "model", what a step computed with as "read", and the number of
        updates as the number "clock" (`pairs.py`)."""
        return None

    def act(self, level: OuterLevel, clock: int, *, stop: bool) -> bool:
        """After each update, of step `clock` (from 0). Returns whether all islands stop here; `stop`: whether this one
        was asked to. Most schemes do nothing but an `exchange` every `period` steps."""
        return level.meet(stop) if (clock + 1) % self.period == 0 else False

    def exchange(self, level: OuterLevel, weight: float) -> None:
        """Brings the islands together; `weight` is this island's part of all that they learned from."""
        raise TypeError(f"{self} does not define what islands exchange")

    def simulate(
        self, islands: Sequence[Sequence[torch.Tensor]], weights: Sequence[float], kept: Sequence[Kept]
    ) -> None:
        """The same in one process, for proofs: plain PyTorch, nothing of the engine. `islands` are the parameters of
        each, `kept` what `begin` gave for each. Buffers are averaged by the proof itself."""
        raise TypeError(f"{self} does not define what an exchange does in one process")

    def simulate_pair(self, asking: Kept, asked: Kept) -> None:
        """An exchange of two islands, in one process, where `pairs` gives a rule."""
        raise TypeError(f"{self} does not define what an exchange of two does in one process")

    def simulate_step(self, clock: int, islands: Sequence[Any]) -> bool:
        """What `act` does, in one process: for schemes that act at other steps than the last of a period. `islands` are
        those of `proof/islands.py`. Returns False where `simulate` describes all that is done."""
        return False

    def simulate_agreed(self, islands: Sequence[Sequence[torch.Tensor]], kept: Sequence[Kept]) -> list[torch.Tensor]:
        """The parameters that are evaluated, where islands are not equal after an exchange: their mean, or the
        scheme's own. Plain PyTorch, as `simulate`."""
        return [sum(tensors) / len(tensors) for tensors in zip(*islands, strict=True)]  # type: ignore[misc]

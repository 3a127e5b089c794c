"""A wrong expert parallelism, planted on purpose; see faults.py for the others.

It sends what an honest run sends, so the numbers alone must give it away.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from distributed.expert_targets import against_whole
from shoal.parallel.expert.listed import ListedExperts
from shoal.parallel.expert.stacked import StackedExperts
from shoal.proof.entry import parallel_run


def _divide_by_the_wrong_group() -> None:
    """Experts' gradients are divided by the ranks among which experts are dealt out, as if these held replicas."""
    stack, deal = StackedExperts.__init__, ListedExperts.__init__

    def divided(modules: list[nn.Module], ranks: int) -> None:
        for module in modules:
            for param in module.parameters():
                param.register_hook(lambda gradient: gradient / ranks)

    def faulty_stack(self: StackedExperts, module: nn.Module, layer: Any, members: Any, history: Any) -> None:
        stack(self, module, layer, members, history)
        divided([module], members.size)

    def faulty_list(self: ListedExperts, model: nn.Module, layer: Any, members: Any, history: Any) -> None:
        deal(self, model, layer, members, history)
        divided(self.mine, members.size)

    StackedExperts.__init__, ListedExperts.__init__ = faulty_stack, faulty_list


def divides_experts_by_the_wrong_group(arguments: dict[str, Any], channel: Any) -> Any:
    """For the proof: breaks the engine in its rank and runs it."""
    _divide_by_the_wrong_group()
    return parallel_run(arguments, channel)


def divided_against_whole(arguments: dict[str, Any], channel: Any) -> Any:
    """The same fault beside the whole model, without an engine."""
    _divide_by_the_wrong_group()
    return against_whole(arguments, channel)

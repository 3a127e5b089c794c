"""How the routers of a mixture of experts decided in a step, seen where the model hands its tokens to experts.

Which expert a token goes to depends on the data, so what expert parallelism sends cannot be known before the step. It
follows from the routers' decisions, which are observed here at the calls of experts, before any exchange; the
exchange's own account is not asked. How many rows come from other ranks is what those ranks observed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.comm.json_exchange import exchange
from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Members
from shoal.estimate.expert_traffic import COUNT_BYTES, expert_traffic
from shoal.estimate.traffic import Call
from shoal.layout.experts.find import ExpertLayer
from shoal.layout.experts.listed import only_tensor
from shoal.layout.experts.stacked import routed
from shoal.layout.forward import Forward
from shoal.layout.routed import Routed
from shoal.parallel.expert.shard_experts import before_runs, callers
from shoal.parallel.recompute import recomputing


@dataclass
class _Run:
    """One run of a layer: rows for each of its experts, over all passes of the code that calls them."""

    layer: ExpertLayer
    again: bool
    trained: bool
    passes: int
    rows: list[int]
    itemsize: int = 0
    weight_itemsize: int = 0


@dataclass
class Routing:
    """The decisions of all routers of this rank, until they are forgotten."""

    members: Members
    runs: list[_Run] = field(default_factory=list)

    def watch(self, model: nn.Module, layers: list[ExpertLayer]) -> None:
        """Puts hooks on the layers of this rank."""
        by_owner: dict[str, list[ExpertLayer]] = {}
        for layer in layers:
            if layer.form == "stacked":
                module = model.get_submodule(layer.path)
                module.register_forward_pre_hook(self._stacked(layer), with_kwargs=True)
            else:
                by_owner.setdefault(layer.owner, []).append(layer)
        for owner, lists in by_owner.items():
            before_runs(model, owner).append(partial(self._begin, lists))
            for layer in lists:
                for place, caller in enumerate(callers(model, layer.path)):
                    caller.register_forward_pre_hook(self._called(layer, place), with_kwargs=True)

    def _stacked(self, layer: ExpertLayer) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            asked = routed(args, kwargs)
            if asked is None or BOOK.phase == "evaluate":
                return
            numbers = asked.index.reshape(-1)
            chosen = numbers[(numbers >= 0) & (numbers < layer.count)]
            run = self._new(layer, passes=1)
            run.rows = torch.bincount(chosen, minlength=layer.count).tolist()
            run.itemsize, run.weight_itemsize = asked.hidden.element_size(), asked.weights.element_size()
            same = asked.hidden.dtype == asked.weights.dtype
            run.weight_itemsize = 0 if same else run.weight_itemsize

        return hook

    def _begin(self, lists: list[ExpertLayer]) -> None:
        if BOOK.phase != "evaluate":
            for layer in lists:
                self._new(layer, passes=len(lists) + 1)

    def _called(self, layer: ExpertLayer, place: int) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            tokens = only_tensor(args, kwargs)
            run = next((run for run in reversed(self.runs) if run.layer is layer), None)
            if run is not None and tokens is not None and BOOK.phase != "evaluate":
                run.rows[place] += tokens.numel() // layer.width
                run.itemsize = tokens.element_size()

        return hook

    def _new(self, layer: ExpertLayer, *, passes: int) -> _Run:
        self.runs.append(_Run(layer, recomputing(), torch.is_grad_enabled(), passes, [0] * layer.count))
        return self.runs[-1]

    def forget(self) -> None:
        self.runs = []

    def calls(self, forward: Forward) -> Iterator[Call]:
        """The collectives that these decisions ask for. Collective."""
        ranks, index = self.members.size, self.members.index
        mine = [[rows // run.passes for rows in run.rows] for run in self.runs]
        reports = exchange({"rows": mine, "sizes": [run.itemsize for run in self.runs]})
        for number, run in enumerate(self.runs):
            share = run.layer.count // ranks
            itemsize = run.itemsize or max(reports[rank]["sizes"][number] for rank in self.members.ranks)
            sent = [sum(mine[number][rank * share : (rank + 1) * share]) for rank in range(ranks)]
            received = [
                sum(reports[rank]["rows"][number][index * share : (index + 1) * share]) for rank in self.members.ranks
            ]
            stacked = run.layer.form == "stacked"
            packed = stacked and not run.weight_itemsize
            yield from expert_traffic(
                [
                    Routed(
                        axis=self.members.axis,
                        index=index,
                        phase="backward" if run.again else "forward",
                        trained=run.trained and not run.again,
                        counts_bytes=ranks * (2 * share + 2) * COUNT_BYTES,
                        sent_rows=tuple(sent),
                        received_rows=tuple(received),
                        row_bytes=(run.layer.width + packed) * itemsize,
                        weight_bytes=run.weight_itemsize,
                        answer_bytes=run.layer.result_width
                        * (itemsize if stacked else _answers(run, forward, itemsize)),
                    )
                ]
            )


def _answers(run: _Run, forward: Forward, itemsize: int) -> int:
    """Bytes of a number that a listed expert answers, as in the serial forward."""
    for key in run.layer.members:
        path = f"{run.layer.path}.{key}" if run.layer.path else key
        for call in forward.calls_of(path):
            flow = next((f for f in call.results if f is not None), None)
            if flow is not None:
                return flow.itemsize
    return itemsize

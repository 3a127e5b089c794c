"""Stacked experts over ranks: the module keeps the rows of its own experts and computes on tokens of all ranks.

Each (token, slot) becomes a row. Rows travel to the rank of their expert, sorted, with the weight as one more column;
there the module's own forward runs on them as tokens with one slot each, and home each token adds up its slots.
Numbers outside 0..E-1 mean "no expert" and are dropped.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import nn

from shoal.comm.mesh import Members
from shoal.layout.experts.find import ExpertError, ExpertLayer
from shoal.layout.experts.stacked import RoutedArguments as Asked
from shoal.layout.experts.stacked import counting, routed
from shoal.layout.routed import Routed
from shoal.parallel.expert.exchange import Round, first_thread, tied


class StackedExperts:
    """The forward of a module that holds a share of its experts."""

    def __init__(self, module: nn.Module, layer: ExpertLayer, members: Members, history: deque[Routed]) -> None:
        self.module = module
        self.layer = layer
        self.members = members
        self.history = history
        self.whole_forward = module.forward
        share = layer.count // members.size
        mine = slice(members.index * share, (members.index + 1) * share)
        for name, param in list(module.named_parameters(recurse=False)):
            kept = nn.Parameter(param.detach()[mine].clone(), requires_grad=param.requires_grad)
            kept.__dict__.update(param.__dict__)
            module._parameters[name] = kept
        module.forward = self.__call__  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        asked = routed(args, kwargs)
        if asked is None:
            raise ExpertError(
                f"{self.layer.path}: called with {_described((*args, *kwargs.values()))}, but expected tokens [T, H], "
                "the numbers of their experts [T, k] and their weights [T, k]: run it as it ran when it was found"
            )
        hidden, slots = asked.hidden, asked.index.shape[1]
        numbers = asked.index.reshape(-1)
        chosen = ((numbers >= 0) & (numbers < self.layer.count)).nonzero().squeeze(1)
        slot = chosen[torch.argsort(numbers[chosen], stable=True)]
        token = slot // slots
        counts = torch.bincount(numbers[chosen], minlength=self.layer.count).tolist()
        rows, weights = hidden[token], asked.weights.reshape(-1, 1)[slot]

        trip = Round(self.members, self.layer.count, path=self.layer.path)
        trip.announce(counts, counts, hidden.dtype, hidden.device)
        thread = first_thread(hidden.device)
        packed = weights.dtype == rows.dtype
        if packed:
            rows = torch.cat([rows, weights], dim=1)
        arrived, thread = trip.there(rows, thread)
        if packed:
            # The module may well want to view its tokens in another shape.
            arrived, arrived_weights = arrived[:, :-1].contiguous(), arrived[:, -1:].contiguous()
        else:
            arrived_weights, thread = trip.there(weights, thread)
        answers = self._answers(asked, arrived, arrived_weights, trip)
        weight_bytes = 0 if packed else weights.element_size()
        self.history.append(trip.routed(rows=rows, answers=answers, weight_bytes=weight_bytes))
        home, thread = trip.back(answers, thread)

        total = home.new_zeros(hidden.shape[0], home.shape[1]).index_add(0, token, home)
        idle = trip.any_rows and not sum(trip.received) and torch.is_grad_enabled()
        # With all experts in one place their stack has a gradient as soon as one of them was asked.
        unasked = [param for param in self.module.parameters(recurse=False) if param.requires_grad] if idle else []
        return tied(thread, [total], unasked)[0]

    def _answers(self, asked: Asked, rows: torch.Tensor, weights: torch.Tensor, trip: Round) -> torch.Tensor:
        width, dtype = self.layer.result_width, rows.dtype
        if not rows.shape[0]:
            return rows.new_zeros(0, width)
        per_rank = torch.tensor(trip.arriving, device=rows.device).reshape(-1)
        local = torch.arange(trip.share, device=rows.device).repeat(self.members.size)
        index = torch.repeat_interleave(local, per_rank).unsqueeze(1).to(asked.index.dtype)
        with counting(self.module, self.layer.count_names, trip.share):
            answers = asked.call(self.whole_forward, hidden=rows, index=index, weights=weights)
        # Autocast may answer in another type, which only the ranks that were asked would know.
        return answers.to(dtype)


def _described(values: tuple[Any, ...]) -> str:
    words = [
        f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        if isinstance(value, torch.Tensor)
        else repr(value)
        for value in values
    ]
    return ", ".join(words) or "nothing"

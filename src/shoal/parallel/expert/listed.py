"""Listed experts over ranks: the code that calls them one by one stays as it is and runs twice.

In the first pass, a rehearsal, each expert only notes its tokens and answers zeros; then all tokens travel at once to
the ranks of their experts, are computed there, and the answers travel back; in the second pass each call gets its
answer. Gradients for the tokens go back through the first pass, all others through the second. Both draw the same
random numbers. An owner of several lists (of which later ones may depend on earlier ones) has a pass more for each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from shoal.comm.mesh import Members
from shoal.layout.experts.find import ExpertError, ExpertLayer
from shoal.layout.experts.listed import alike, only_tensor, replaced
from shoal.layout.experts.rehearsal import random_state, rehearsing, set_random_state
from shoal.layout.routed import Routed
from shoal.parallel.expert.exchange import Round, first_thread, tied
from shoal.parallel.recompute import recomputing


class Elsewhere(nn.Module):
    """In the place of an expert that another rank holds. It has no parameters and is never to be asked directly."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ExpertError(
            f"{self.path} is on another rank and was called from outside the module that routes to it; experts under "
            "ep can be called by that module only"
        )


@dataclass
class Asked:
    """The calls of one list in one pass, in the order in which they came."""

    experts: list[int] = field(default_factory=list)
    tokens: list[torch.Tensor] = field(default_factory=list)


class _ExpertPlaceholder(nn.Module):
    """Takes an expert's calls while its owner runs."""

    def __init__(self, experts: ListedExperts, place: int) -> None:
        super().__init__()
        # Past Module's own bookkeeping: the experts are no child of their placeholder.
        object.__setattr__(self, "experts", experts)
        self.place = place

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.experts.called(self.place, args, kwargs)


class ListedExperts:
    """One list of experts of which this rank holds a share."""

    def __init__(self, model: nn.Module, layer: ExpertLayer, members: Members, history: deque[Routed]) -> None:
        self.layer = layer
        self.members = members
        self.history = history
        self.container = model.get_submodule(layer.path)
        self.share = layer.count // members.size
        start = members.index * self.share
        self.mine: list[nn.Module] = []
        for place, key in enumerate(layer.members):
            expert = self.container._modules[key]
            assert expert is not None
            if start <= place < start + self.share:
                self.mine.append(expert)
            else:
                self.container._modules[key] = Elsewhere(f"{layer.path}.{key}" if layer.path else key)
        self.placeholders = {key: _ExpertPlaceholder(self, place) for place, key in enumerate(layer.members)}
        self.asked = Asked()
        self.answers: list[torch.Tensor] | None = None
        self.is_proven = False

    def begin_pass(self) -> None:
        self.asked = Asked()

    def called(self, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """What an expert answers in the present pass."""
        tokens = only_tensor(args, kwargs)
        if tokens is None or tokens.shape[-1] != self.layer.width:
            raise ExpertError(
                f"{self.layer.path}.{self.layer.members[place]}: an expert under ep is called with one tensor "
                f"of tokens [..., {self.layer.width}] and nothing else; leave out other arguments, or leave out ep"
            )
        number = len(self.asked.experts)
        self.asked.experts.append(place)
        self.asked.tokens.append(tokens)
        if self.answers is None:
            return self._empty_answer(tokens)
        noted = self.noted
        if number >= len(noted.experts) or noted.experts[number] != place or noted.tokens[number].shape != tokens.shape:
            raise self._unlike()
        if not self.is_proven and not alike(tokens.detach(), noted.tokens[number].detach()):
            raise self._unlike()
        # A copy: the owner may well scale it in place, and another pass may ask again.
        return self.answers[number].clone()

    def _unlike(self) -> ExpertError:
        return ExpertError(
            f"{self.layer.owner or 'the model'}: its second run asks the experts of {self.layer.path} something else "
            "than the first: what one expert is asked must not depend on what others answer, nor on anything that "
            "changes between two runs"
        )

    def _empty_answer(self, tokens: torch.Tensor) -> torch.Tensor:
        dtype = tokens.dtype
        if not self.layer.keeps_dtype or torch.is_autocast_enabled(tokens.device.type):
            with torch.no_grad():
                dtype = self.mine[0](tokens.new_zeros(1, self.layer.width)).dtype
        return tokens.new_zeros(*tokens.shape[:-1], self.layer.result_width, dtype=dtype)

    def exchange(self, thread: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Has all that was noted computed; the next pass gives it out. Returns the thread that went through."""
        noted = self.noted = self.asked
        width, types = self.layer.width, {tokens.dtype for tokens in noted.tokens}
        if len(types) > 1:
            names = sorted(map(str, types))
            raise ExpertError(f"{self.layer.path}: called with tokens of several types: {', '.join(names)}")
        by_expert = sorted(range(len(noted.experts)), key=noted.experts.__getitem__)
        rows_of = [0] * self.layer.count
        calls_of = [0] * self.layer.count
        for expert, tokens in zip(noted.experts, noted.tokens, strict=True):
            rows_of[expert] += tokens.numel() // width
            calls_of[expert] += 1
        trip = Round(self.members, self.layer.count, path=self.layer.path)
        trip.announce(rows_of, calls_of, types.pop() if types else None, device)
        flat = [noted.tokens[number].reshape(-1, width) for number in by_expert]
        rows = torch.cat(flat) if flat else torch.zeros(0, width, dtype=trip.dtype, device=device)
        arrived, thread = trip.there(rows, thread)
        answers = self._computed(arrived, trip)
        self.history.append(trip.routed(rows=rows, answers=answers))
        home, thread = trip.back(answers, thread)
        given: dict[int, torch.Tensor] = {}
        for number, part in zip(by_expert, home.split([len(part) for part in flat]) if flat else (), strict=True):
            given[number] = part.reshape(*noted.tokens[number].shape[:-1], self.layer.result_width)
        self.answers = [given[number] for number in range(len(noted.experts))]
        return thread

    def _computed(self, arrived: torch.Tensor, trip: Round) -> torch.Tensor:
        """This rank's experts on the rows of all ranks, each expert once; one that no rank calls is left alone."""
        ranks, share = self.members.size, self.share
        pieces = arrived.split([rows for line in trip.arriving for rows in line])
        answers: list[torch.Tensor] = [arrived.new_zeros(0, self.layer.result_width)] * (ranks * share)
        for place, expert in enumerate(self.mine):
            if trip.called[place]:
                answer = expert(torch.cat([pieces[rank * share + place] for rank in range(ranks)]))
                split = answer.split([trip.arriving[rank][place] for rank in range(ranks)])
                for rank, part in enumerate(split):
                    answers[rank * share + place] = part
        types = {part.dtype for place, part in enumerate(answers) if trip.called[place % share]}
        dtype = types.pop() if types else self._empty_answer(arrived[:0]).dtype
        return torch.cat([part.to(dtype) for part in answers])


class ListedForward:
    """The forward of a module that calls listed experts: one rehearsal for each list, and the run that counts."""

    def __init__(self, module: nn.Module, lists: list[ListedExperts]) -> None:
        self.module = module
        self.lists = lists
        self.plain_forward = module.forward
        self.before_runs: list[Callable[[], None]] = []
        """Called where a run begins, a repetition inside backward too: it passes by the hooks of a block."""
        module.forward = self.__call__  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for begin in self.before_runs:
            begin()
        device = _device(args, kwargs, self.module)
        start = experts_random = random_state(device)
        thread = first_thread(device)
        real = [module for each in self.lists for module in each.container._modules.values() if module is not None]
        try:
            for number, experts in enumerate(self.lists):
                set_random_state(start, device)
                with rehearsing(self.module, but=real):
                    # The owner may change what it is given in place, which must happen once, in the run that counts.
                    copies = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (args, kwargs))
                    self._pass(*copies)
                if number == 0:
                    # Experts that draw random numbers go on where the owner's first list of draws ends, so that
                    # neither repeats the other's.
                    experts_random = random_state(device)
                set_random_state(experts_random, device)
                thread = experts.exchange(thread, device)
                experts_random = random_state(device)
            set_random_state(start, device)
            # A repetition inside backward is not the run that counts either.
            with rehearsing(self.module, but=real) if recomputing() else nullcontext():
                output = self._pass(args, kwargs)
            for experts in self.lists:
                if len(experts.asked.experts) != len(experts.noted.experts):
                    raise experts._unlike()
                experts.is_proven = True
            set_random_state(experts_random, device)
            return self._tied(thread, output)
        finally:
            for experts in self.lists:
                experts.answers, experts.noted = None, Asked()
                experts.begin_pass()

    def _pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with ExitStack() as stack:
            for experts in self.lists:
                experts.begin_pass()
                stack.enter_context(replaced(experts.container, experts.placeholders))
            return self.plain_forward(*args, **kwargs)

    def _tied(self, thread: torch.Tensor, output: Any) -> Any:
        """The output, with the exchanges behind all of it that carries a gradient."""
        if not torch.is_grad_enabled():
            return output
        leaves, shape = tree_flatten(output)
        floats = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        carrying = [n for n in floats if leaves[n].requires_grad] or floats[:1]
        if not carrying:
            raise ExpertError(
                f"{self.lists[0].layer.owner or 'the model'}: it calls experts and returns {type(output).__name__}, in "
                "which no tensor is found; return a tensor, or tensors in a tuple, list or dict"
            )
        for n, leaf in zip(carrying, tied(thread, [leaves[n] for n in carrying]), strict=True):
            leaves[n] = leaf
        return tree_unflatten(leaves, shape)


def _device(args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module) -> torch.device:
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    return given[0].device if given else next((p.device for p in module.parameters()), torch.device("cpu"))

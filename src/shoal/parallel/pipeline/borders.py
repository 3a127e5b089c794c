"""The messages of a pipeline: activations to the stage behind a border, gradients back to the one before it.

Sends do not wait; what they carry is kept until it has arrived. The shapes that cross a border are sent once, before
the first tensor of such a shape. A border is named by the stage behind it.

Nothing depends on tags alone: NCCL ignores them, matches the messages of two ranks in the order of their calls, and
carries one after the other. So receives are posted in the order in which the other rank sends, whatever the order in
which this one needs them, and on accelerators each kind of message has a group of its own for each direction (a lane):
there a send never waits for a receive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Members
from shoal.parallel.pipeline.arrival import Arrival, Branched

PLAIN = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.uint8,
)
"""What every backend carries; all others travel as bytes."""
DTYPES = (
    *PLAIN,
    torch.complex64,
    torch.complex128,
    torch.complex32,
    torch.int16,
    torch.int8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
MOST_DIMS = 8
MOST_TENSORS = 128
KINDS = ("specs", "forward", "backward", "numbers")


@dataclass(frozen=True)
class Spec:
    """A tensor that crosses a border."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    learns: bool
    """Whether a gradient comes back for it."""

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


Message = tuple[str, int, int]
"""(kind, border, micro-batch)"""
Way = tuple[str, int]
"""(kind, place of the rank that sends)"""
Lane = tuple[bool, bool]
"""(with the forward pass or against it, from a lower to a higher rank or back)"""
WITH_FORWARD = ("specs", "forward")


def lanes(ranks: Sequence[int]) -> list[Lane]:
    """The lanes that a pipeline needs whose stages are on these ranks, the same list on every rank."""
    steps = [after > before for before, after in pairwise(ranks) if before != after]
    return sorted({(True, up) for up in steps} | {(False, not up) for up in steps}, reverse=True)


class Borders:
    """What this rank sends and receives at the borders of its stages."""

    def __init__(
        self,
        members: Members,
        rank_of: Callable[[int], int],
        *,
        num_stages: int,
        tags: int,
        device: torch.device,
        another: Callable[[], Members] | None = None,
    ) -> None:
        """`rank_of`: the place along `members` of a stage. `tags`: messages of this number of consecutive micro-batches
        have different tags. `another` makes one more group of the same members, where messages need lanes; all ranks
        then make the same ones."""
        self.members, self.num_stages, self.tags, self.device = members, num_stages, tags, device
        self._ranks = [members.ranks[rank_of(stage)] for stage in range(num_stages)]
        self._me = members.ranks[members.index]
        self._lanes: dict[Lane, Any] = {}
        if another is not None:
            first, *others = lanes(self._ranks)
            self._lanes = {first: members.group, **{lane: another().group for lane in others}}
        self.specs: dict[tuple[int, Any, bool], list[Spec]] = {}
        """(Border, shapes of the micro-batch, whether it learns) -> what crosses it."""
        self.crossed: dict[int, list[list[Spec]]] = {}
        """What crossed each border of this rank's stages since `forget`, micro-batch by micro-batch."""
        self._sends: dict[Message, list[tuple[Any, torch.Tensor]]] = {}
        self._expected: dict[Message, list[tuple[Any, torch.Tensor]]] = {}
        self._local: dict[tuple[str, int, int], Any] = {}
        self._due: dict[Way, deque[Message]] = {}
        """What is still to be received in this step, in the order in which each rank sends it."""
        self._key: Callable[[int], Any] = lambda micro: None

    def begin(self, due: Mapping[Way, Sequence[Message]], key: Callable[[int], Any]) -> None:
        """Before a step: what each rank sends to this one, in its order. `key(m)` as in `send`."""
        self._due = {way: deque(messages) for way, messages in due.items()}
        self._key = key

    def forget(self) -> None:
        """Before a step: counts crossings anew."""
        self.crossed = {}

    def crossings(self, stages: Sequence[int], *, before: bool) -> dict[int, list[list[tuple[int, bool]]]]:
        """For each stage what crossed the border before (or behind) it, where another rank is there: for each
        micro-batch, the bytes of each tensor and whether a gradient comes back."""
        found = {}
        for stage in stages:
            border, other = (stage, stage - 1) if before else (stage + 1, stage + 1)
            if 0 <= other < self.num_stages and self._ranks[other] != self._ranks[stage]:
                micros = self.crossed.get(border, ())
                found[stage] = [[(spec.bytes, spec.learns) for spec in specs] for specs in micros]
        return found

    def send(self, stage: int, micro: int, key: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Activations to the stage behind. `key` distinguishes micro-batches of different shapes."""
        border = stage + 1
        learning = torch.is_grad_enabled()
        specs = [Spec(tuple(t.shape), t.dtype, learning and t.requires_grad) for t in tensors]
        to = self._ranks[border]
        self.crossed.setdefault(border, []).append(specs)
        if to == self._me:
            self._local["forward", border, micro] = [
                Arrival(t.detach(), learns=spec.learns) for t, spec in zip(tensors, specs, strict=True)
            ]
            return
        known = (border, key, learning)
        if known not in self.specs:
            self.specs[known] = specs
            with BOOK.during("shapes"):
                self._post("specs", border, micro, [_written(specs).to(self.device)], to)
        elif self.specs[known] != specs:
            raise Branched(
                f"a micro-batch crosses to stage {border} as {_as_text(specs)}, but one of the same input shapes "
                f"crossed as {_as_text(self.specs[known])}: the model branches on its data, or its shapes depend on "
                "values, which a pipeline cannot carry; put the branch inside one block, or leave pp out"
            )
        self._post("forward", border, micro, [t.detach() for t in tensors], to)

    def receive(self, stage: int, micro: int, key: Any) -> list[Arrival]:
        """What the stage before has sent."""
        if stage == 0:
            return []
        source = self._ranks[stage - 1]
        if source == self._me:
            return list(self._local.pop(("forward", stage, micro)))
        for number, at in self._ahead_of(("forward", stage, micro)):
            self._learn(number, at, self._key(at), source)
            self.expect(("forward", number, at), self._key(at))
        specs = self._learn(stage, micro, key, source)
        self.crossed.setdefault(stage, []).append(specs)
        tensors = self._fetch("forward", stage, micro, self._room(specs), source)
        return [Arrival(tensor, learns=spec.learns) for tensor, spec in zip(tensors, specs, strict=True)]

    def _learn(self, border: int, micro: int, key: Any, source: int) -> list[Spec]:
        """What crosses a border; the first time it is received."""
        known = (border, key, torch.is_grad_enabled())
        if known not in self.specs:
            header = torch.zeros(_HEADER, dtype=torch.int64, device=self.device)
            with BOOK.during("shapes"):
                self._fetch("specs", border, micro, [header], source)
            self.specs[known] = _read(header)
        return self.specs[known]

    def send_gradients(self, stage: int, micro: int, gradients: Sequence[torch.Tensor]) -> None:
        """Gradients to the stage before."""
        self._send_back("backward", stage, micro, gradients)

    def receive_gradients(self, stage: int, micro: int, key: Any) -> list[torch.Tensor]:
        """What the stage behind has sent back."""
        border = stage + 1
        if self._ranks[border] == self._me:
            return list(self._local.pop(("backward", border, micro)))
        posted = self.expect(("backward", border, micro), key)
        assert posted, "what was sent forward is known, and a gradient comes back for nothing else"
        learning = [spec for spec in self.specs[border, key, True] if spec.learns]
        return self._receive_back("backward", border, micro, self._room(learning))

    def send_numbers(self, stage: int, micro: int, numbers: torch.Tensor) -> None:
        """A few numbers about a micro-batch to the stage before."""
        self._send_back("numbers", stage, micro, [numbers])

    def receive_numbers(self, stage: int, micro: int, how_many: int) -> torch.Tensor:
        """The numbers that the stage behind has sent."""
        room = torch.zeros(how_many, dtype=torch.float64, device=self.device)
        return self._receive_back("numbers", stage + 1, micro, [room])[0]

    def wait_for_sends(self, up_to: int | None = None) -> None:
        """Sees out what was sent of the micro-batches up to one of them; of all, if none is named."""
        self.release([message for message in self._sends if up_to is None or message[2] <= up_to])

    def release(self, messages: Iterable[Message]) -> None:
        """Lets go of what was sent; whoever knows that it was received loses no time here."""
        for message in messages:
            for work, _ in self._sends.pop(message, ()):
                if work is not None:
                    work.wait()

    def expect(self, message: Message, key: Any) -> bool:
        """Posts the receive of a message before it is needed, so that it travels meanwhile, and before it of all that
        the same rank sends earlier. False if a shape is not known yet: then no later one may be posted either."""
        kind, border, _ = message
        if self._ranks[border - 1 if kind == "forward" else border] == self._me or message in self._expected:
            return True
        for number, micro in self._ahead_of(message):
            if not self._post_receive((kind, number, micro), self._key(micro)):
                return False
        return self._post_receive(message, key)

    def _ahead_of(self, message: Message) -> Iterator[tuple[int, int]]:
        """(border, micro-batch) of what the sender of a message sends before it and is not received yet."""
        kind, border, _ = message
        due = self._due.get((kind, self._ranks[border - 1 if kind == "forward" else border]))
        if due is not None and message in due:
            while due[0] != message:
                _, number, micro = due[0]
                yield number, micro

    def _post_receive(self, message: Message, key: Any) -> bool:
        kind, border, micro = message
        source = self._ranks[border - 1 if kind == "forward" else border]
        specs = self.specs.get((border, key, True))
        if specs is None:
            return False
        room = self._room([spec for spec in specs if kind == "forward" or spec.learns])
        with BOOK.during(kind):
            self._expected[message] = [
                (dist.irecv(_plain(t), src=source, group=self._lane(kind, source, self._me), tag=tag), t)
                for t, tag in zip(room, self._tags(kind, border, micro), strict=False)
            ]
        self._received(message, source)
        return True

    def _received(self, message: Message, source: int) -> None:
        """A receive was posted: the next of what the same rank sends may be."""
        due = self._due.get((message[0], source))
        if due and due[0] == message:
            due.popleft()

    def _send_back(self, kind: str, border: int, micro: int, tensors: Sequence[torch.Tensor]) -> None:
        to = self._ranks[border - 1]
        if to == self._me:
            self._local[kind, border, micro] = list(tensors)
        else:
            self._post(kind, border, micro, tensors, to)

    def _receive_back(self, kind: str, border: int, micro: int, room: list[torch.Tensor]) -> list[torch.Tensor]:
        source = self._ranks[border]
        if source == self._me:
            return list(self._local.pop((kind, border, micro)))
        with BOOK.during("backward"):
            return self._fetch(kind, border, micro, room, source)

    def _room(self, specs: Sequence[Spec]) -> list[torch.Tensor]:
        return [torch.empty(spec.shape, dtype=spec.dtype, device=self.device) for spec in specs]

    def _tags(self, kind: str, border: int, micro: int) -> Iterator[int]:
        """Of the tensors of a message."""
        place = (KINDS.index(kind) * self.num_stages + border) * self.tags + micro % self.tags
        return count(place * MOST_TENSORS)

    def _lane(self, kind: str, source: int, to: int) -> Any:
        """The group that carries such a message."""
        return self._lanes[kind in WITH_FORWARD, to > source] if self._lanes else self.members.group

    def _post(self, kind: str, border: int, micro: int, tensors: Sequence[torch.Tensor], to: int) -> None:
        sent = self._sends.setdefault((kind, border, micro), [])
        group = self._lane(kind, self._me, to)
        for tensor, tag in zip(tensors, self._tags(kind, border, micro), strict=False):
            dense = tensor.contiguous().resolve_conj().resolve_neg()
            sent.append((dist.isend(_plain(dense), dst=to, group=group, tag=tag), dense))

    def _fetch(self, kind: str, border: int, micro: int, room: list[torch.Tensor], source: int) -> list[torch.Tensor]:
        expected = self._expected.pop((kind, border, micro), None)
        if expected is not None:
            for work, _ in expected:
                work.wait()
            return [tensor for _, tensor in expected]
        group = self._lane(kind, source, self._me)
        for tensor, tag in zip(room, self._tags(kind, border, micro), strict=False):
            dist.recv(_plain(tensor), src=source, group=group, tag=tag)
        self._received((kind, border, micro), source)
        return room


class CannotCross(ValueError):
    """What crosses a stage boundary is more than a message holds."""


_HEADER = 1 + MOST_TENSORS * (3 + MOST_DIMS)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a type that every backend carries."""
    if tensor.dtype in PLAIN:
        return tensor
    flat = tensor.detach().reshape(-1)
    return (torch.view_as_real(flat) if flat.is_complex() else flat).view(torch.uint8)


def _written(specs: Sequence[Spec]) -> torch.Tensor:
    """Specs as numbers, in a message of fixed size."""
    for spec in specs:
        if len(specs) > MOST_TENSORS or len(spec.shape) > MOST_DIMS or spec.dtype not in DTYPES:
            raise CannotCross(
                f"{len(specs)} tensors cross a stage boundary, one of them of {len(spec.shape)} dimensions and type "
                f"{spec.dtype}; a pipeline carries {MOST_TENSORS} tensors of {MOST_DIMS} dimensions, not quantised; "
                "cut elsewhere with LayoutHints(stages=...), or use fewer stages"
            )
    numbers = [len(specs)]
    for spec in specs:
        numbers += [DTYPES.index(spec.dtype), int(spec.learns), len(spec.shape), *spec.shape]
        numbers += [0] * (MOST_DIMS - len(spec.shape))
    return torch.tensor(numbers + [0] * (_HEADER - len(numbers)), dtype=torch.int64)


def _read(header: torch.Tensor) -> list[Spec]:
    num_tensors, *numbers = header.tolist()
    width = 3 + MOST_DIMS
    rows = [numbers[n * width : (n + 1) * width] for n in range(num_tensors)]
    return [Spec(tuple(row[3 : 3 + row[2]]), DTYPES[row[0]], bool(row[1])) for row in rows]


def _as_text(specs: Sequence[Spec]) -> str:
    each = [f"{list(s.shape)} {'with' if s.learns else 'without'} a gradient" for s in specs]
    return ", ".join(each) or "no tensor"

"""What compressing gradients costs on this machine: the methods of `technique/compress`, timed as training uses them.

A bucket's worth of tensors is reduced side by side, on one thread, with errors kept from turn to turn. What another
rank would send is answered here: its payload is taken to be this rank's own, so nothing waits and nothing but computing
is timed. Ranks that measure at the same time (`together`) share the memory's bandwidth as they do in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from shoal.calibration.machine import lower_quartile
from shoal.comm.compress.exchange import AllToAll, Ask, Gather, ReceiveFrom, SendTo, run
from shoal.comm.compress.given import Draw, Over, State
from shoal.comm.compress.method import Method
from shoal.strategy.terms.compress import CompressTerm, compressors

TERMS = tuple(term for method in compressors() for term in method.measured())
"""All but those whose payload and time the data decide."""
ELEMENTS = (1 << 14, 1 << 16, 1 << 18, 1 << 20)
"""Of a tensor: from small matrices to large ones."""
BUCKET_ELEMENTS = 1 << 21
"""Of all tensors that are reduced side by side: a bucket of 8 MB."""
ROUNDS = 5
RANKS, MANY_RANKS = 2, 8
LATE_STEP = 10**6
"""Far from the start, where DGC sends as little as it ever does."""


def measure_codecs(
    *,
    elements: Sequence[int] = ELEMENTS,
    terms: Sequence[CompressTerm] = TERMS,
    ranks: int = RANKS,
    rounds: int = ROUNDS,
    together: Callable[[], Any] = lambda: None,
) -> dict[str, tuple[float, float]]:
    """For each compression, by its text: seconds a tensor, and seconds an element of it.

    They cover what a rank of `ranks` computes for a gradient: errors added and kept, encoding, decoding and summing the
    payloads of all ranks. `together` is called before each turn; a barrier lets ranks measure at the same time.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        benches = {term: [_Bench(Method(term), size, ranks) for size in elements] for term in terms}
        seconds: dict[tuple[CompressTerm, int], list[float]] = {}
        for turn in range(rounds + 1):
            for term, of_sizes in benches.items():
                for bench in of_sizes:
                    together()
                    took_s = bench.turn(LATE_STEP + turn)
                    if turn:  # The first one has no errors to add yet, and touches its memory for the first time.
                        seconds.setdefault((term, bench.elements), []).append(took_s)
    finally:
        torch.set_num_threads(threads)
    found = {}
    for term, of_sizes in benches.items():
        times = [lower_quartile(seconds[term, bench.elements]) for bench in of_sizes]
        counts = [len(bench.gradients) for bench in of_sizes]
        found[str(term)] = _line(elements, counts, times)
    return found


def measure_passes(
    *, terms: Sequence[CompressTerm] = TERMS, rounds: int = ROUNDS, together: Callable[[], Any] = lambda: None
) -> dict[str, tuple[float, float]]:
    """For each compression: passes over the gradient that a rank's own part takes, and those for the payload of each
    rank. A pass reads or writes every element once, in 32 bits, as fast as this machine copies.
    """
    sizes = ELEMENTS[-2:]
    few, many = (
        measure_codecs(elements=sizes, terms=terms, ranks=ranks, rounds=rounds, together=together)
        for ranks in (RANKS, MANY_RANKS)
    )
    element_s = 4 / stream_bytes_per_s(together=together)
    found = {}
    for name, (_, few_s) in few.items():
        each = max(0.0, (many[name][1] - few_s) / (MANY_RANKS - RANKS)) / element_s
        found[name] = (max(0.0, few_s / element_s - RANKS * each), each)
    return found


def stream_bytes_per_s(*, rounds: int = 3 * ROUNDS, together: Callable[[], Any] = lambda: None) -> float:
    """What one thread reads and writes in a second where it copies: the measure that passes are counted in."""
    source, into = torch.ones(4 * BUCKET_ELEMENTS), torch.ones(4 * BUCKET_ELEMENTS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = []
        for _ in range(rounds):
            together()
            start_s = time.perf_counter()
            into.copy_(source)
            seconds.append(time.perf_counter() - start_s)
    finally:
        torch.set_num_threads(threads)
    return 2 * source.nbytes / lower_quartile(seconds)


class _Bench:
    """Square matrices of one size, as many as a bucket holds, and the errors kept of them."""

    def __init__(self, method: Method, elements: int, ranks: int) -> None:
        rows = 1 << (elements.bit_length() // 2)
        if elements % rows:
            raise ValueError(f"tensors of {elements} elements were asked for; expected a power of two")
        self.method, self.elements = method, elements
        count = max(1, BUCKET_ELEMENTS // elements)
        generator = torch.Generator().manual_seed(elements)
        self.gradients = list(torch.randn(count, rows, elements // rows, generator=generator))
        self.states: list[State] = [{} for _ in self.gradients]
        # A placeholder for the group: nothing is sent by it, since answers are made here.
        self.over = Over(group=object() if ranks > 1 else None, size=ranks, rank=0)  # type: ignore[arg-type]

    def turn(self, step: int) -> float:
        """Seconds of one reduction of all tensors."""
        start_s = time.perf_counter()
        reductions = [
            self.method.reduction(gradient.div(3.0), state, self.over, Draw(0, step, str(number), 0))
            for number, (gradient, state) in enumerate(zip(self.gradients, self.states, strict=True))
        ]
        for gradient, total in zip(self.gradients, run(reductions, self.over, _answers), strict=True):
            # Training writes the sum where the gradient was. Here the gradient is to be the same in every turn.
            total.mul_(3.0)
            torch.empty_like(gradient).copy_(total)
        return time.perf_counter() - start_s


def _answers(asks: Sequence[Ask], over: Over) -> list[Any]:
    """What the others would answer if their payloads were the same as this rank's."""
    if not asks:
        return []
    match asks[0]:
        case AllToAll():
            rows = torch.cat([ask.rows for ask in asks if isinstance(ask, AllToAll)], dim=1)
            return list(rows.split([ask.rows.size(1) for ask in asks if isinstance(ask, AllToAll)], dim=1))
        case SendTo():
            return [None] * len(asks)
    others = [ask for ask in asks if not isinstance(ask, AllToAll)]
    payloads = [ask.like if isinstance(ask, ReceiveFrom) else ask.payload for ask in others]
    joined = torch.cat([payload.reshape(-1) for payload in payloads])
    parts = joined.split([payload.numel() for payload in payloads])
    return [[part] * over.size for part in parts] if isinstance(asks[0], Gather) else list(parts)


def _line(elements: Sequence[int], counts: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Seconds a tensor and seconds an element, neither below 0, that come nearest to the times, relative to them."""
    rows = np.array([[count, count * size] for size, count in zip(elements, counts, strict=True)], dtype=float)
    return nearest_pair(rows, np.asarray(seconds))


def nearest_pair(rows: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Two factors of the columns, neither below 0, with which these come nearest to the times, relative to them."""
    rows = rows / seconds[:, None]
    ones = np.ones(len(seconds))
    scale = np.linalg.norm(rows, axis=0)
    first, second = np.linalg.lstsq(rows / scale, ones, rcond=None)[0] / scale
    if first < 0 or second < 0:
        # The best on the border: all by one of the columns.
        alone = [float(rows[:, which] @ ones / (rows[:, which] @ rows[:, which])) for which in range(2)]
        off = [float(np.sum((rows[:, which] * alone[which] - 1) ** 2)) for which in range(2)]
        return (alone[0], 0.0) if off[0] < off[1] else (0.0, alone[1])
    return float(first), float(second)

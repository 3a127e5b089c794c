"""Compressed pushes: a server reads what a worker encoded, in messages of a size known to both; nothing is lost."""

from __future__ import annotations

import pytest
import torch

from comm.compressors import FEEDBACK, LOSSY
from shoal.comm.compress.compressor import Compressor
from shoal.estimate.server_calls import PushedPart
from shoal.estimate.traffic import PredictedSlot
from shoal.parallel.flat import Slot
from shoal.parallel.server.codec import PartOfBucket, PushCodec
from shoal.strategy.terms.compress import CompressTerm

SHAPES = [(7,), (40, 50), (3, 3), (33, 65)]
PUSHED = [term for term in LOSSY if term.pushed_bytes(1 << 20, 4) is not None and not term.collective_only]
RANGE = (5, 3000)
"""A shard may begin and end inside of a parameter."""


def slots() -> list[Slot]:
    found, start = [], 0
    for number, shape in enumerate(SHAPES):
        found.append(Slot(str(number), torch.empty(shape), torch.Size(shape), start, 0))  # type: ignore[arg-type]
        start += -(-torch.Size(shape).numel() // 16) * 16
    return found


def codec(term: CompressTerm, dtype: torch.dtype) -> PushCodec:
    assert isinstance(term, Compressor)
    part = PartOfBucket(slots(), dtype, *RANGE, worker=1, workers=2, writes_errors=True)
    return PushCodec([part], term, seed=3, clip=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("term", PUSHED, ids=str)
def test_a_server_reads_what_a_worker_sent_and_the_rest_is_kept(term: CompressTerm, dtype: torch.dtype) -> None:
    worker, server = codec(term, dtype), codec(term, dtype)
    predicted = PushedPart(0, *RANGE, dtype.itemsize, [PredictedSlot(s.name, tuple(s.shape), s.start) for s in slots()])
    generator = torch.Generator().manual_seed(0)
    padding = torch.ones(RANGE[1] - RANGE[0], dtype=torch.bool)
    for slot in slots():
        padding[max(0, slot.start - RANGE[0]) : max(0, min(slot.stop, RANGE[1]) - RANGE[0])] = False
    before: dict[str, torch.Tensor] = {}
    for step in range(4):
        gradient = torch.randn(RANGE[1] - RANGE[0], generator=generator, dtype=torch.float64).to(dtype)
        gradient[padding] = 0
        message = worker.encode(0, gradient, 2.0, frozenset(), worker=1, step=step)
        assert len(message) == server.size(0, step) == predicted.pushed_bytes(term, step)
        assert len(message) < gradient.nbytes
        sent = server.decode(0, message, worker=1, step=step)
        assert sent.dtype == dtype
        if term in FEEDBACK and type(term).__name__ != "dgc":
            assert isinstance(term, Compressor)
            total = gradient.double() / 2
            for each in worker.fragments[id(worker.parts[0])]:
                mine = each.within(total, RANGE[0])
                kept = each.state["residual"].double()
                given = mine + term.memory() * before.get(each.key, torch.zeros(1)).double()
                close = 1e-2 if dtype == torch.bfloat16 else 1e-5
                torch.testing.assert_close(each.within(sent, RANGE[0]).double() + kept, given, rtol=close, atol=close)
                before[each.key] = kept.clone()


def test_what_has_no_gradient_or_is_not_finite_leaves_no_trace() -> None:
    term = next(term for term in PUSHED if type(term).__name__ == "topk")
    worker, server = codec(term, torch.float32), codec(term, torch.float32)
    gradient = torch.randn(RANGE[1] - RANGE[0], generator=torch.Generator().manual_seed(1))
    worker.encode(0, gradient, 1.0, frozenset(), worker=1, step=0)
    kept = {each.key: each.state["residual"].clone() for each in worker.fragments[id(worker.parts[0])]}
    message = worker.encode(0, torch.zeros_like(gradient), 1.0, frozenset(["0", "1", "2", "3"]), worker=1, step=1)
    assert not server.decode(0, message, worker=1, step=1).any()
    message = worker.encode(0, torch.full_like(gradient, torch.inf), 1.0, frozenset(), worker=1, step=2)
    assert not server.decode(0, message, worker=1, step=2).isfinite().all()
    for each in worker.fragments[id(worker.parts[0])]:
        assert torch.equal(each.state["residual"], kept[each.key])

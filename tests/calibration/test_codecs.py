"""Codecs timed: the very methods run, with as many payloads as there are ranks."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.calibration import codecs
from shoal.comm.compress.method import Method
from shoal.strategy.terms.compress import int8, powersgd, topk

VIEWS = {
    "view",
    "_unsafe_view",
    "slice",
    "split",
    "split_with_sizes",
    "unbind",
    "t",
    "expand",
    "detach",
    "alias",
    "select",
    "unsqueeze",
    "transpose",
    "empty",
    "empty_like",
    "new_empty",
}


MULTIPLY_ADDS = 5
"""That a core makes in the time in which it reads one element: large products are computing, not reading."""


class Touched(TorchDispatchMode):
    """Bytes that kernels read and write, and what products compute in the same unit."""

    nbytes = 0

    def __torch_dispatch__(self, kernel, types, args=(), kwargs=None):
        result = kernel(*args, **(kwargs or {}))
        if kernel.__name__.partition(".")[0] not in VIEWS:
            tensors = [each for each in tree_leaves((args, kwargs or {}, result)) if isinstance(each, torch.Tensor)]
            self.nbytes += sum(each.numel() * each.element_size() for each in tensors)
            if kernel.__name__.startswith("mm."):
                self.nbytes += args[0].numel() * args[1].shape[1] * args[0].element_size() // MULTIPLY_ADDS
        return result


def passes_counted(term, *, ranks: int) -> float:
    bench = codecs._Bench(Method(term), 1 << 18, ranks)
    bench.turn(codecs.LATE_STEP)
    with Touched() as touched:
        bench.turn(codecs.LATE_STEP + 1)
    return touched.nbytes / 4 / codecs.BUCKET_ELEMENTS


@pytest.mark.parametrize("term", codecs.TERMS, ids=str)
def test_measured_passes_are_those_that_kernels_make(term) -> None:
    own, each = term.passes
    assert 0.5 < passes_counted(term, ranks=2) / (own + 2 * each) < 1.25


def test_every_payload_that_is_gathered_is_decoded() -> None:
    two, four = (passes_counted(int8(), ranks=ranks) for ranks in (2, 4))
    assert four - two > 8
    assert passes_counted(powersgd(4), ranks=4) == passes_counted(powersgd(4), ranks=2)


def test_the_sum_is_that_of_all_ranks_and_what_is_not_sent_is_kept() -> None:
    bench = codecs._Bench(Method(topk(0.01)), 1 << 14, 2)
    gradient, state = bench.gradients[0], bench.states[0]
    draw = codecs.Draw(0, codecs.LATE_STEP, "0", 0)
    total = codecs.run([bench.method.reduction(gradient, state, bench.over, draw)], bench.over, codecs._answers)[0]
    torch.testing.assert_close(total / 2 + state["residual"].view_as(total), gradient)


def test_times_are_of_every_term_and_the_thread_count_comes_back() -> None:
    before = torch.get_num_threads()
    turns = []
    found = codecs.measure_codecs(
        elements=(1 << 14, 1 << 16), terms=(int8(), topk(0.01)), rounds=1, together=lambda: turns.append(1)
    )
    assert set(found) == {"int8()", "topk(0.01)"}
    assert all(tensor_s >= 0 and element_s >= 0 and tensor_s + element_s > 0 for tensor_s, element_s in found.values())
    assert len(turns) == 2 * 2 * 2
    assert torch.get_num_threads() == before


def test_a_line_is_found_from_exact_times_and_is_never_negative() -> None:
    sizes, counts = (100, 1000, 10000), (100, 10, 1)
    exact = [count * (2e-5 + 3e-9 * size) for size, count in zip(sizes, counts, strict=True)]
    assert codecs._line(sizes, counts, exact) == pytest.approx((2e-5, 3e-9))
    rising = [1e-9 * count * size**1.2 for size, count in zip(sizes, counts, strict=True)]
    assert min(codecs._line(sizes, counts, rising)) >= 0


def test_a_size_that_makes_no_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="power of two"):
        codecs.measure_codecs(elements=(1001,), terms=(int8(),), rounds=1)

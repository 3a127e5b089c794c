"""A model that runs in one process and fails when a strategy changes how it runs: a sentence instead of a traceback.

Where an axis cuts it, the model's own code asks for something that the cut has changed: a mask built from `x.shape[1]`
outside of the module that attends, a reshape by a number in an attribute. Where blocks are computed again, it writes
into what a block is given. The error is the model's; what to do about it is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shoal.launch.rank import describe
from shoal.parallel.pipeline.placeholder import WRITTEN
from shoal.proof.gate import LayoutWrong
from shoal.strategy import Strategy, recompute


@contextmanager
def naming_what_cut_it(strategy: Strategy) -> Iterator[None]:
    """Around steps of a model that trains serially."""
    axes = strategy.cutting_axes
    try:
        yield
    except Exception as error:
        ours = type(error).__module__.partition(".")[0] == "shoal"
        again = strategy.term(recompute) is not None
        if WRITTEN in str(error) and any(level.zero == 3 for level in strategy.dp_levels):
            raise LayoutWrong(
                f"{strategy}: the model writes into parameters outside of the forward of the block that they belong "
                "to, where zero=3 has not gathered them; write inside, or train with zero=2"
            ) from error
        if not (axes or again) or ours or describe(error)["network"]:
            raise
        first = (str(error).strip().splitlines() or [""])[0]
        fails = f"the model runs in one process but fails under {strategy}: {type(error).__name__}: {first}; "
        cut = (
            f"its code expects what {' and '.join(axes)} cut{'s' if len(axes) == 1 else ''}. Leave "
            f"{' or '.join(axes)} out, or let the module that uses a size or a mask build it itself"
        )
        twice = (
            "its blocks may not give the same when they are computed again in backward, as where they write into what "
            "they are given (x.add_, x += ...). Leave recompute out, or let blocks make new tensors"
        )
        raise LayoutWrong(fails + (f"{cut}. Or {twice}" if axes and again else cut if axes else twice)) from error

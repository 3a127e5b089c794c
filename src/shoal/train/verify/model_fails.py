"""A model that runs in one process and fails when an axis cuts it: a sentence instead of a traceback.

The model's own code then asks for something that the cut has changed: a mask built from `x.shape[1]` outside of the
module that attends, a reshape by a number in an attribute. The error is the model's; what to do about it is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shoal.train.gate import LayoutWrong
from shoal.train.launch.rank import describe


@contextmanager
def naming_what_cut_it(strategy: object, axes: Sequence[str]) -> Iterator[None]:
    """Around steps of a model that trains serially; `axes` are those that cut it."""
    try:
        yield
    except Exception as error:
        ours = type(error).__module__.partition(".")[0] == "shoal"
        if not axes or ours or describe(error)["network"]:
            raise
        first = (str(error).strip().splitlines() or [""])[0]
        raise LayoutWrong(
            f"the model runs in one process but fails under {strategy}: {type(error).__name__}: {first}; its code "
            f"expects what {' and '.join(axes)} cut{'s' if len(axes) == 1 else ''}. Leave {' or '.join(axes)} out, or "
            "let the module that uses a size or a mask build it itself"
        ) from error

"""Whether a traced model may hold experts. Finding experts needs a run on real samples, which is slow for a large
model. If every list of identical modules is a chain, and no module is called with tokens, choices and weights, the
trace alone shows that there are none.
"""

from __future__ import annotations

from itertools import pairwise

from shoal.layout.experts.listed import like_members
from shoal.layout.experts.stacked import stacked_count
from shoal.layout.recorded import Trace


def may_hold_experts(trace: Trace) -> bool:
    """False only if it is certain that there are none; always True for a model that could not be traced on fakes."""
    if not trace.fake:
        return True
    for path, module in trace.model.named_modules():
        members = [f"{path}.{key}" if path else key for key in like_members(module)]
        if members and not _is_chain(trace, members):
            return True
        # A stack is called with three tensors: tokens, the indices of their experts, and weights.
        if stacked_count(module) and any(_num_tensors(call.arguments) >= 3 for call in trace.calls_of(path)):
            return True
    return False


def _is_chain(trace: Trace, members: list[str]) -> bool:
    """Whether each member is called once, on the output of the one before it."""
    calls = [trace.calls_of(member) for member in members]
    if any(len(each) != 1 for each in calls):
        return False
    results = [{value for value in each[0].results if value is not None} for each in calls]
    arguments = [{value for value in each[0].arguments if value is not None} for each in calls]
    return all(given & wanted for given, (_, wanted) in zip(results, pairwise(arguments), strict=False))


def _num_tensors(arguments: list[int | None]) -> int:
    return sum(value is not None for value in arguments)

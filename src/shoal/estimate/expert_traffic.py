"""What expert parallelism sends, in closed form, from how many rows a step routed where.

For n ranks, r rows of a bytes that a rank routes to experts of others, and s rows of others that it computes, with
answers of b bytes:

    forward    all-to-all of counts    8 (2E/n + 2) bytes to each other rank
               all-to-all of rows      r a      (and r w where weights of w bytes are sent separately from their rows)
               all-to-all of answers   s b
    backward   all-to-all              r b      gradients of answers, to where they were computed
               all-to-all              s a      gradients of rows, to where they came from (and s w)
    a recomputed forward sends forward's three again, in backward

Routing depends on the data, so r and s are those of the step: a running layer remembers them (`take_routed` in
parallel/expert/shard_experts.py). `even_routing` gives them for evenly spread tokens, which is what planning assumes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shoal.comm.wire import even_payload
from shoal.estimate.traffic import Call
from shoal.layout.routed import Routed

COUNT_BYTES = 8


def expert_traffic(runs: Iterable[Routed]) -> Iterator[Call]:
    """The collectives of these runs, as (axis, phase, kind, payload bytes, ranks)."""
    for run in runs:
        ranks = len(run.sent_rows)
        sent = sum(run.sent_rows) - run.sent_rows[run.index]
        received = sum(run.received_rows) - run.received_rows[run.index]
        separate = [run.weight_bytes] if run.weight_bytes else []
        forward = [sent * run.row_bytes, *(sent * each for each in separate), received * run.answer_bytes]
        backward = [sent * run.answer_bytes, *(received * each for each in separate), received * run.row_bytes]
        yield run.axis, run.phase, "all_to_all", run.counts_bytes, ranks
        for phase, sizes in ((run.phase, forward), ("backward", backward if run.trained else [])):
            for size in sizes:
                yield run.axis, phase, "all_to_all", even_payload(bytes_to_others=size, ranks=ranks), ranks


def even_routing(
    *,
    ranks: int,
    experts: int,
    tokens: int,
    slots: int,
    width: int,
    itemsize: int,
    axis: str = "ep",
    form: str = "stacked",
    recomputed: bool = False,
) -> list[Routed]:
    """One trained run of a layer whose `tokens` on each rank choose `slots` experts each, all experts alike."""
    rows = tokens * slots
    sizes = tuple(rows // ranks + (1 if rank < rows % ranks else 0) for rank in range(ranks))
    row_bytes = (width + (form == "stacked")) * itemsize
    share = {
        "axis": axis,
        "index": 0,
        "counts_bytes": ranks * (2 * experts // ranks + 2) * COUNT_BYTES,
        "sent_rows": sizes,
        "received_rows": (sizes[0],) * ranks,
        "row_bytes": row_bytes,
        "weight_bytes": 0,
        "answer_bytes": width * itemsize,
    }
    runs = [Routed(phase="forward", trained=True, **share)]  # type: ignore[arg-type]
    return [*runs, Routed(phase="backward", trained=False, **share)] if recomputed else runs  # type: ignore[arg-type]

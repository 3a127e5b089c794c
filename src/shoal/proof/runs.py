"""The two runs of a proof, each in processes of their own: the serial one, and the one under the strategy, which is
compared with it slice by slice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from safetensors.torch import save_file

from shoal.comm.json_exchange import exchange
from shoal.comm.ledger import BOOK
from shoal.job import Job
from shoal.launch.join import join, leave
from shoal.layout.held_outside import Outside
from shoal.parallel.pipeline.pipedream import micros_reported
from shoal.parallel.sync.averaged import Averaged
from shoal.parallel.sync.scheme import Kept, Scheme
from shoal.parallel.sync.simulated import NestedAverages
from shoal.parallel.sync.tickets import PHASE as TICKETS
from shoal.proof.compare import GradientSums, compare, follows, moves, real
from shoal.proof.conditions import Conditions, for_proof
from shoal.proof.islands import Islands
from shoal.proof.model_fails import naming_what_cut_it
from shoal.proof.options import ProofOptions
from shoal.proof.reference import Reference, train_serially
from shoal.proof.replay import replay
from shoal.proof.replay_rounds import replay_rounds
from shoal.proof.rounding import Disturbed
from shoal.proof.served import NOTHING, run_and_replay, run_racing
from shoal.proof.tolerance import GRADIENT
from shoal.runtime.compiled import running_eagerly
from shoal.runtime.servers import is_server, serve_here
from shoal.runtime.setup import Prepared, job_from, prepare
from shoal.strategy import Strategy, parse, pp
from shoal.strategy.islands import is_loose
from shoal.strategy.seats import seats_of
from shoal.strategy.terms.sync import hogwild


@running_eagerly()
def run_serially(options: ProofOptions, logs: list[list[Any]] | None = None) -> dict[str, Any]:
    """The serial run, left behind as a file of tensors, and how far it moves under another order of sums. `logs`: of
    islands whose exchanges are ordered by timing."""
    job, conditions = for_proof(job_from(options)), Conditions()
    strategy, steps = parse(options.strategy), options.num_steps
    micro, unflushed = options.micro_batches, unflushed_ranks(strategy)
    updates = [micros_reported(ranks=unflushed, micro=micro, steps=n) for n in range(steps + 1)] if unflushed else None

    outside = Outside(job)

    def run(disturbed: Disturbed | None = None) -> Reference:
        with outside.kept():
            return train_serially(
                job,
                steps=steps,
                micro_batches=micro,
                parts=options.parts,
                updates=updates,
                dtype=torch.float64 if options.exact else None,
                conditions=conditions,
                disturbed=disturbed,
                islands=islands_of(strategy, logs),
            )

    reference = run()
    widened = dict(conditions.modules)
    more: dict[str, torch.Tensor] = {}
    replicated = _replicated(reference)
    elements = dict.fromkeys(("parameter", GRADIENT), sum(value.numel() for value in reference.parameters.values()))
    for state in reference.state.values():
        for key, value in state.items():
            elements[key] = elements.get(key, 0) + value.numel()
    conditioning: dict[str, float] = {}
    for seed in range(options.disturbances):
        other = run(Disturbed(seed + 1, reverse=options.reverse))
        for kind, moved in moves(reference, other):
            conditioning[kind] = max(conditioning.get(kind, 0.0), moved)
        for key, drift in follows(reference, other).items():
            more[f"follows:{key}"] = torch.maximum(more.get(f"follows:{key}", drift), drift)
    left_behind(reference, options.reference, more)
    if seats_of(strategy) is not None:
        del elements[GRADIENT]  # Gradients are averaged on the servers; the optimiser's state shows them.
    described = _described(micro, options.parts, exact=options.exact, islands=islands_of(strategy, logs))
    return {
        "losses": reference.losses,
        "described": described,
        "widened": widened,
        "elements": elements,
        "conditioning": conditioning,
        "replicated": {f"{kind}:{name}": v.numel() for (kind, name), v in replicated.items() if v.numel()},
    }


def _replicated(reference: Reference) -> dict[tuple[str, str], torch.Tensor]:
    found = {("buffer", name): value for name, value in reference.buffers.items()}
    return found | {("frozen", name): value for name, value in reference.frozen.items()}


def left_behind(reference: Reference, path: str, more: Mapping[str, torch.Tensor] | None = None) -> None:
    """Writes the tensors that ranks compare with."""
    tensors = {f"parameter:{name}": value for name, value in reference.parameters.items()}
    tensors |= {f"rounding:{name}": mask for name, mask in reference.rounding.items()}
    tensors |= {f"gradient:{name}": value for name, value in reference.gradients.items()}
    tensors |= {f"{kind}:{name}": value for (kind, name), value in _replicated(reference).items()} | dict(more or {})
    for name, state in reference.state.items():
        tensors |= {f"{key}:{name}": value for key, value in state.items()}
    save_file({key: real(value).contiguous().clone() for key, value in tensors.items()}, path)


@running_eagerly()
def run_in_parallel(options: ProofOptions) -> dict[str, Any]:
    """On every rank: the run under the strategy, compared with the serial one."""
    me = join()
    job, strategy = for_proof(job_from(options)), parse(options.strategy)
    report: dict[str, Any] = {"rank": me.rank, "float32_drift": None}
    steps = options.num_steps
    if is_server(strategy, me.rank) or (seats_of(strategy) is not None and is_loose(strategy.terms[0])):
        report |= _under_servers(options, job, strategy, me)
        leave()
        return report
    if any(isinstance(level.sync, hogwild) and level.n > 1 for level in strategy.dp_levels):
        report |= run_racing(options, job, strategy, me)
        leave()
        return report
    if options.exact:
        ready = prepare(job, strategy, rank=me.rank, backend=me.backend, device=me.device, dtype=torch.float64)
        with Outside(job).kept():
            report |= train_steps(ready, steps, by_tickets=True)
        with ready.engine.consensus():
            if by_timing(strategy):
                report |= replayed(ready, options)
            report |= compare(ready, options.reference)
        ready.close()
    if options.exact and not by_timing(strategy):
        narrow = prepare(job, strategy, rank=me.rank, backend=me.backend, device=me.device)
        train_steps(narrow, steps)
        # What is rounding of a zero in float64 is rounding in float32 too, only larger.
        with narrow.engine.consensus():
            rows = compare(narrow, options.reference, zero_gradient=math.inf)["worst"]
        report["float32_drift"] = max((row[0] for row in rows), default=0.0)
        narrow.close()
    if not options.exact:
        ready = prepare(job, strategy, rank=me.rank, backend=me.backend, device=me.device)
        report |= train_steps(ready, steps) | {"worst": [], "zero_gradient": [], "declared": {}}
    leave()
    return report


def _under_servers(options: ProofOptions, job: Job, strategy: Strategy, me: Any) -> dict[str, Any]:
    """On a rank that only serves, and where servers let replicas run at their own speed."""
    loose = is_loose(strategy.terms[0])
    if not is_server(strategy, me.rank):
        return run_and_replay(options, job, strategy, me)
    for dtype in (torch.float64, None) if options.exact and not loose else (torch.float64,):
        serve_here(job, strategy, rank=me.rank, backend=me.backend, dtype=dtype)
    return NOTHING


def _turns(ready: Prepared, steps: int, *, by_tickets: bool) -> Iterator[tuple[int, int]]:
    """The steps that this rank makes, from 0, and their sample counters."""
    runner, tickets = ready.runner, ready.engine.outer.tickets if ready.engine.outer is not None else None
    starts = [0]
    while len(starts) <= steps:
        starts.append(runner.order.next(starts[-1]))
    if tickets is None or not by_tickets:
        yield from enumerate(starts[:-1])
        return
    tickets.begin(0)
    tickets.ask(steps)
    while not tickets.paused:
        runner.share = tickets.share
        yield tickets.step, starts[tickets.step]


def train_steps(ready: Prepared, steps: int, *, by_tickets: bool = False) -> dict[str, Any]:
    """The steps' losses, and how the ledger of each full step after the first differs from its prediction.
    `by_tickets`: islands that may run at their own speed do so."""
    losses, unlike, conditions = [], [], Conditions()
    steady = ready.executor.first_steady_step
    # How often an optimiser with a closure computes the loss depends on the numbers.
    predictable = not ready.engine.optimizer.needs_closure
    ready.watched = GradientSums(ready.engine)
    outer = ready.engine.outer
    for each in () if outer is None else (outer.pairs, outer.tickets):
        if each is not None:
            each.log = []
    for step, counter in _turns(ready, steps, by_tickets=by_tickets):
        BOOK.take()
        with conditions(), naming_what_cut_it(ready.strategy):
            losses.append(ready.runner.step(step, counter).loss)
        # Messages about shapes that a pipeline has not seen before are no part of a step, tickets come by timing.
        counted = BOOK.take().without("shapes", TICKETS)
        # The first step also settles which ranks have gradients at all; every other one must be as predicted, once a
        # pipeline without flush is full.
        if predictable and (len(losses) > steady or steps == 1):
            unlike += ready.differences(counted)
    ready.watched.stop()
    return {
        "losses": losses,
        "ledger_differences": sorted(set(unlike)),
        "ledger_compared": predictable,
        "predicted": ready.predicted.to_json(),
    }


def by_timing(strategy: Strategy) -> bool:
    """Whether timing decides the order in which islands exchange: such a run is proven by replaying its log."""
    return any(isinstance(level.sync, Scheme) and level.sync.by_tickets for level in strategy.dp_levels)


def replayed(ready: Prepared, options: ProofOptions) -> dict[str, Any]:
    """After a run of such islands, in their consensus: the first rank replays the logs of all, and leaves the result
    behind as the serial run. All ranks call it alike."""
    outer = ready.engine.outer
    assert outer is not None
    assert outer.tickets is not None
    log = outer.tickets.log if outer.pairs is None else outer.pairs.log
    office = outer.tickets.office
    merges = [] if office is None or office.merging is None else office.merging.log
    rows = exchange({"log": log, "merges": merges})
    logs = [row["log"] for row in rows] + ([rows[0]["merges"]] if outer.pairs is None else [])
    serial = run_serially(options, logs) if outer.islands.index == 0 else None
    exchange({})  # The file is there.
    BOOK.take()
    return {} if serial is None else {"serial": serial}


def islands_of(strategy: Strategy, logs: list[list[Any]] | None = None) -> Islands | None:
    level = next((level for level in strategy.dp_levels if isinstance(level.sync, Scheme)), None)
    if level is None:
        return None
    scheme = level.sync
    assert isinstance(scheme, Scheme)
    loose = [other for other in strategy.dp_levels if isinstance(other.sync, Scheme)]
    if len(loose) > 1:
        inner = loose[1].sync
        assert isinstance(scheme, Averaged)
        assert isinstance(inner, Averaged)
        nested = NestedAverages(scheme, inner, loose[1].n)
        return Islands(
            num=level.n * loose[1].n,
            every=scheme.period,
            replicas=strategy.replicas,
            micro_batches=strategy.micro_batches,
            begin=nested.begin,
            exchange=scheme.simulate,
            at=nested.simulate,
        )
    return Islands(
        num=level.n,
        every=scheme.period,
        replicas=strategy.replicas,
        micro_batches=strategy.micro_batches,
        begin=partial(Kept, scheme),
        exchange=scheme.simulate,
        agreed=None if scheme.equal else scheme.simulate_agreed,
        at=scheme.simulate_step,
        start=getattr(getattr(scheme, "plan", None), "start", 0),
        logs=logs,
        replay=partial(replay_rounds, scheme)
        if isinstance(scheme, Averaged)
        else partial(replay, pair=scheme.simulate_pair),
    )


def unflushed_ranks(strategy: Strategy) -> int:
    """How many ranks its pipeline has, if that is one without flush; else 0."""
    pipeline = strategy.term(pp)
    return pipeline.n if pipeline is not None and pipeline.schedule == "pipedream" else 0


def _described(micro_batches: int, parts: int, *, exact: bool, islands: Islands | None = None) -> str:
    pieces = micro_batches * parts
    how = "each global batch at once" if pieces == 1 else f"per micro-batch: the same {pieces} parts of each batch"
    if islands is not None:
        ordered = f"simulated one after the other, exchanging every {islands.every} steps"
        if islands.logs is not None:
            ordered = "their updates and exchanges replayed in the order of their own logs"
        how = f"{islands.num} islands, {ordered}; {how}".replace("each global batch", "an island's part of a batch")
    return f"one process, plain PyTorch, {'float64' if exact else 'float32'}, {how}"

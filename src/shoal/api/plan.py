"""`shoal.plan`: which strategy to train a model by on a cluster.

A preset shape is planned without torch. A job is looked into first, and needs it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.api.call import checked_keywords, job_of
from shoal.api.plan_servers import is_waitless, served_rows, served_words
from shoal.cluster import Cluster, cluster, read_cluster
from shoal.cluster.presets import THIS
from shoal.common.hindrance import BadHindrance
from shoal.common.printed import PrintedTable
from shoal.job import names
from shoal.planning.counterfactual import changes, what_would_fit
from shoal.planning.quantities import seconds
from shoal.planning.rank import Plan, cheapest, make_plan, question_for
from shoal.planning.report import NothingFits, plan_report
from shoal.shapes.presets import preset
from shoal.shapes.shape import Transformer
from shoal.strategy import Strategy, parse

if TYPE_CHECKING:
    from shoal.job import Job
    from shoal.strategy import ModelFacts, SyncTerm

MOST_TRIED = 1000
"""Plans, best first, among which one that the engine can run is looked for."""
PlanOfCluster = Plan


class CannotPlan(ValueError):
    """Options that do not go together, or a model that cannot be planned for."""


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanReport(PrintedTable):
    """Legal strategies, best first."""

    title: str
    plans: list[dict[str, Any]]
    """The best ones: strategy, step_s, memory_bytes, and more."""
    global_batch: int
    report: dict[str, Any]
    """All that the verb prints with `--json`."""
    here: bool
    """Whether it is for a job on this machine, by what `shoal calibrate` measured."""
    best_to_run: Strategy | None = None
    """The best strategy that `shoal.train` can run; None if there is none among the best."""
    cannot_run: str | None = None
    """Why the first plan cannot be run."""
    plan: PlanOfCluster | None = field(default=None, compare=False)
    """Every estimate, for a cluster; `planning/page.py` draws it."""

    @property
    def best(self) -> Strategy:
        """The strategy ranked first."""
        return parse(self.plans[0]["strategy"])

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return self.report

    def to_html(self) -> str:
        """A page that works offline; for a plan of a cluster."""
        from shoal.planning.page import plan_page

        if self.plan is None:
            raise CannotPlan("a plan for this machine has no page; print it, or use to_json()")
        return plan_page(self.plan, self.report)

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        rows = [
            [
                str(number),
                seconds(row["step_s"]) if row.get("step_s") else "does not fit",
                f"{row['memory_bytes'] / 1e9:.3g} GB",
                row["strategy"],
            ]
            for number, row in enumerate(self.plans, start=1)
        ]
        return self.title, ["", "step", "memory", "strategy"], rows


def on_this_machine(what: str | Job, cluster: str) -> bool:
    """Whether it is a job for this machine, planned by what `shoal calibrate` measured."""
    return cluster == THIS and (not isinstance(what, str) or names_job(what))


@checked_keywords
def plan(
    what: str | Job,
    *,
    cluster: str = "this",
    devices: int | None = None,
    batch: str | int | None = None,
    by: str = "time",
    top: int = 10,
    sequence: int | None = None,
    precision: str | None = None,
    price: float | None = None,
    watts: float | None = None,
    kwh_price: float | None = None,
    pilot: str | None = None,
    profile: str | None = None,
    sync: str | None = None,
    link: str | None = None,
    optimizer: str = "adamw",
    size: str | None = None,
    straggler: Sequence[str] = (),
    to_run: bool = False,
) -> PlanReport:
    """Estimates every legal strategy of a model on a cluster, and ranks those that fit.

    Args:
        what: A preset shape such as `"gpt:175b"`, or a job: a Job, a file, a built-in name.
        cluster: A preset such as `"dgx-a100"`, a TOML file, or `"this"` machine.
        devices: Devices. None: all of them.
        batch: Global batch: sequences (1536) or tokens (`"4M-tokens"`). None: the job's, or by the noise scale.
        by: Rank by `"time"` (to target), `"step"` or `"cost"`.
        top: Plans in the report.
        sequence: Tokens in a sequence, instead of the shape's own.
        precision: `"bf16"`, `"fp16"` or `"fp32"`. None: what the device has.
        price: Price of one device for an hour.
        watts: Power of a device. None: its datasheet's.
        kwh_price: Price of a kilowatt-hour.
        pilot: CSV of pilot runs (batch,steps[,compress]) for the steps to target.
        profile: Framework profile: a name or a TOML file.
        sync: Also plan islands that exchange now and then: `"local(8)"`, or `"auto"`; or replicas that do not wait for
            each other: `"asp()"`, `"ssp(3)"`, `"diloco(32, quorum=3)"`.
        straggler: With the latter: slow ranks, `"random 10%: 5x"`.
        link: A job on this machine: what to do over this link to another host, `"50 Mb/s"`.
        optimizer: `"sgd"`, `"adamw"` or `"muon"`: what staleness and local steps cost it.
        size: Size of a built-in job.
        to_run: Whether the result is meant to be trained: a shape without data is refused.

    Returns:
        The plans, best first: `.best`, `.plans`, `.report`, `.to_html()`.

    Raises:
        CannotPlan: Options that do not go together.
        NothingFits: No strategy fits; the text says what would.

    Example:
        shoal.plan("gpt:1.3b", cluster="dgx-a100", devices=16).best
    """
    rules, waitless = _rules(sync), None
    here = on_this_machine(what, cluster)
    if rules and is_waitless(rules[0]) and not (here and rules[0].period is not None):
        [waitless], rules = rules, ()
    elif straggler:
        raise CannotPlan(
            f"--straggler {straggler[0]}: plans weigh stragglers for rules under which replicas do not "
            'wait; give --sync "asp()", "ssp(3)" or "diloco(32, quorum=3)", or ask shoal simulate'
        )
    batch = None if batch is None else str(batch)
    if here:
        unused = {
            "--sync": sync if waitless is not None else None,
            "--by": None if by in ("time", "step") else by,
            "--sequence": sequence,
            "--precision": precision,
            "--price": price,
            "--watts": watts,
            "--kwh-price": kwh_price,
            "--pilot": pilot,
            "--profile": profile,
        }
        for option, given in unused.items():
            if given is not None:
                raise CannotPlan(f"{option} {given}: a job on this machine is planned by step time alone; leave it out")
        return _here(
            what, devices=devices, batch=batch, top=top, size=size, rules=rules, optimizer=_known(optimizer), link=link
        )
    if link is not None:
        raise CannotPlan(f"--link {link}: it is for a job on this machine; a cluster's own file gives its links")
    shape, facts, job_batch = _model(what, size=size, run=to_run)
    if sequence is not None:
        if facts is not None:
            raise CannotPlan(f"--sequence {sequence}: {what} has sequences of {shape.sequence}; change the job instead")
        shape = shape.at(sequence=sequence)
    found = _plan(
        shape,
        the_cluster(cluster, devices=devices),
        batch=samples_of(batch, shape) or job_batch,
        by=by,
        precision=precision,
        price=price,
        watts=watts,
        kwh_price=kwh_price,
        pilot=pilot,
        facts=facts,
        profile=profile,
        rules=rules,
        optimizer=optimizer,
    )
    if found.best is None:
        raise NothingFits("\n".join(what_would_fit(found)))
    report = plan_report(found, top=top, changes=changes(found)) | {"servers": [], "served": []}
    if waitless is not None:
        try:
            served = served_rows(found, waitless, straggler=straggler)
        except BadHindrance as error:
            raise CannotPlan(str(error)) from None
        report |= {"served": served, "servers": served_words(served, straggler)}
    best, reason = _to_run(found) if to_run else (None, None)
    return PlanReport(
        title=report["title"],
        plans=report["plans"],
        global_batch=found.question.global_batch,
        report=report,
        here=False,
        best_to_run=best,
        cannot_run=reason,
        plan=found,
    )


def _here(what: str | Job, *, batch: str | None, size: str | None, **options: Any) -> PlanReport:
    from shoal.api.known import require_known
    from shoal.api.plan_here import report_here

    if batch is not None and not (batch.isdigit() and int(batch) > 0):
        raise CannotPlan(f"--batch {batch}: expected samples of this job, such as 24")
    if isinstance(what, str):
        require_known(what, size)
    report, ahead = report_here(what, batch=int(batch) if batch else None, size=size, **options)
    return PlanReport(
        title=report["title"],
        plans=report["plans"],
        global_batch=report["global_batch"],
        report=report,
        here=True,
        best_to_run=ahead[0] if ahead else None,
    )


def _to_run(found: Plan) -> tuple[Strategy | None, str | None]:
    """The best plan that the engine can run, and why the first cannot."""
    from shoal.parallel.runnable import cannot_run

    ahead = (found.strategy(int(row)) for row in found.ranked[:MOST_TRIED])
    return next((each for each in ahead if cannot_run(each) is None), None), cannot_run(
        found.strategy(int(found.ranked[0]))
    )


def _rules(sync: str | None) -> tuple[SyncTerm, ...]:
    """How islands are to stay together, if that was asked for: one rule, or the same with several periods."""
    if sync is None:
        return ()
    if sync == "auto":
        from shoal.api.plan_here import AUTO_PERIODS
        from shoal.strategy import diloco

        return tuple(diloco(h) for h in AUTO_PERIODS)
    from shoal.strategy import REGISTRY, StrategyError, parse
    from shoal.strategy.terms.term import technique_names

    try:
        [level] = parse(f"dp(2, sync={sync})").dp_levels
    except StrategyError as error:
        raise CannotPlan(f"--sync {sync}: {error}") from None
    if level.sync.period is None and not is_waitless(level.sync):
        known = ", ".join(REGISTRY[name].example() for name in technique_names("sync"))
        raise CannotPlan(
            f"--sync {sync}: plans know bsp(), which is always among them, islands and servers; try "
            f"auto, asp(), ssp(3), {known}"
        )
    return (level.sync,)


def _known(optimizer: str) -> str:
    from shoal.estimate.target import OPTIMIZERS

    if optimizer not in OPTIMIZERS:
        raise CannotPlan(f"--optimizer {optimizer}: expected one of {', '.join(OPTIMIZERS)}")
    return optimizer


def the_cluster(name: str, *, devices: int | None) -> Cluster:
    """A preset by name, or a file."""
    if name.endswith(".toml") or os.sep in name or Path(name).is_file():
        found = read_cluster(name)
        return found if devices is None else found.resized(devices)
    return cluster(name, devices=devices)


def samples_of(text: str | None, shape: Transformer) -> int | None:
    """`1536` sequences, or `4M` / `4e6 tokens` in tokens."""
    if text is None:
        return None
    words = text.strip().lower().replace(",", "").replace("_", "")
    number, tokens = words, False
    for ending in ("tokens", "token", "t"):
        if number.endswith(ending):
            number, tokens = number.removesuffix(ending).strip(), True
            break
    scale = {"k": 1e3, "m": 1e6}.get(number[-1:], 1.0)
    try:
        value = float(number.rstrip("km")) * scale
    except ValueError:
        raise CannotPlan(f"--batch {text}: expected sequences such as 1536, or tokens such as 4M-tokens") from None
    if tokens:
        value = round(value / shape.sequence)
    if not 1 <= value < 1e12 or value != int(value):
        raise CannotPlan(f"--batch {text}: expected at least one full sequence of {shape.sequence} tokens")
    return int(value)


def _model(what: str | Job, *, size: str | None, run: bool) -> tuple[Transformer, ModelFacts | None, int | None]:
    """(shape, facts of a job, its global batch)"""
    if isinstance(what, str) and not names_job(what):
        try:
            shape = preset(what)
        except ValueError as error:
            raise CannotPlan(f"{error}; or give a job: a Python file, language, image") from None
        if run:
            raise CannotPlan(f"--run trains a job, and {what!r} names a shape without data; give a job")
        return shape, None, None
    from shoal.api.known import require_known
    from shoal.layout.job_shape import shape_of

    if isinstance(what, str):
        require_known(what, size)
    job = job_of(what, size=size)
    shape, facts = shape_of(job)
    return shape, facts, int(job.global_batch)


def names_job(what: str) -> bool:
    """Whether a text is a file or the name of a built-in job rather than of a shape."""
    if names.is_file(what):
        return True
    try:
        names.parse_name(what)
    except ValueError:
        return what.partition(":")[0].strip().lower() in names.TASKS
    return True


def _plan(
    shape: Transformer,
    place: Cluster,
    *,
    batch: int | None,
    by: str,
    precision: str | None,
    price: float | None,
    watts: float | None,
    kwh_price: float | None,
    pilot: str | None,
    facts: ModelFacts | None,
    profile: str | None,
    rules: tuple[SyncTerm, ...],
    optimizer: str,
) -> Plan:
    from shoal.estimate.cost.profile_file import read_profile
    from shoal.estimate.target import default_target, read_pilot

    target = replace(default_target(shape), optimizer=_known(optimizer))
    if pilot is not None:
        target = read_pilot(pilot, start=target)
    if precision not in (None, "bf16", "fp16", "fp32"):
        raise CannotPlan(f"--precision {precision}: expected bf16, fp16 or fp32")
    for option, value in (("--price", price), ("--watts", watts), ("--kwh-price", kwh_price)):
        if value is not None and not 0 <= value < float("inf"):
            raise CannotPlan(f"{option} {value:g}: expected a finite number, at least 0")
    if kwh_price is not None and watts is None and place.device.watts is None:
        raise CannotPlan(f"--kwh-price {kwh_price:g}: device {place.device.name!r} states no watts; give --watts")
    more: dict[str, Any] = {"profile": read_profile(profile)} if profile is not None else {}
    question = question_for(
        shape,
        place,
        global_batch=batch,
        target=target,
        precision=precision,
        by=by,
        price_an_hour=price,
        watts=watts,
        price_a_kwh=kwh_price,
        facts=facts,
        sync=rules[0] if rules else None,
        periods=tuple(rule.period for rule in rules if rule.period is not None),
        **more,
    )
    return cheapest(question) if by == "cost" else make_plan(question)

"""`shoal plan`: which strategy to train a model by on a cluster. A table, JSON, or a page; `--run` trains by the best.

A preset shape is planned without torch. A job is looked into first, and needs it.
"""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.output import print_json, write_file
from shoal.cluster import Cluster, cluster, read_cluster
from shoal.cluster.presets import THIS
from shoal.job import names
from shoal.planning.counterfactual import changes, what_would_fit
from shoal.planning.quantities import amount, gigabytes
from shoal.planning.rank import Plan, cheapest, make_plan, question_for
from shoal.planning.report import NothingFits, plan_report
from shoal.shapes.presets import preset
from shoal.shapes.shape import Transformer

if TYPE_CHECKING:
    from shoal.strategy import ModelFacts, Strategy, SyncTerm


MOST_TRIED = 1000
"""Plans, best first, among which `--run` looks for one that the engine can run."""


class CannotPlan(ValueError):
    """Options that do not go together, or a model that cannot be planned for."""


def plan_command(
    what: str, *, cluster_name: str, devices: int | None, batch: str | None, by: str, top: int, as_json: bool,
    html_file: str | None, run: bool, sequence: int | None = None, precision: str | None = None,
    price: float | None = None, watts: float | None = None, kwh_price: float | None = None, pilot: str | None = None,
    size: str | None = None, profile: str | None = None, sync: str | None = None,
    optimizer: str = "adamw", link: str | None = None,
) -> int:  # fmt: skip
    """Plans, prints, and if asked trains."""
    rules = _rules(sync)
    if cluster_name == THIS and _names_job(what):
        unused = {
            "--by": None if by in ("time", "step") else by, "--html": html_file, "--sequence": sequence,
            "--precision": precision, "--price": price, "--watts": watts, "--kwh-price": kwh_price, "--pilot": pilot,
            "--profile": profile,
        }  # fmt: skip
        for option, given in unused.items():
            if given is not None:
                raise CannotPlan(f"{option} {given}: a job on this machine is planned by step time alone; leave it out")
        return _here(what, devices=devices, batch=batch, top=top, as_json=as_json, run=run, size=size,
                     rules=rules, optimizer=_known(optimizer), link=link)  # fmt: skip
    if link is not None:
        raise CannotPlan(f"--link {link}: it is for a job on this machine; a cluster's own file gives its links")
    shape, facts, job_batch = _model(what, size=size, run=run)
    if sequence is not None:
        if facts is not None:
            raise CannotPlan(f"--sequence {sequence}: {what} has sequences of {shape.sequence}; change the job instead")
        shape = shape.at(sequence=sequence)
    place = the_cluster(cluster_name, devices=devices)
    plan = _plan(
        shape, place, batch=samples_of(batch, shape) or job_batch, by=by, precision=precision, price=price, watts=watts,
        kwh_price=kwh_price, pilot=pilot, facts=facts, profile=profile, rules=rules, optimizer=optimizer,
    )  # fmt: skip
    if plan.best is None:
        raise NothingFits("\n".join(what_would_fit(plan)))
    report = plan_report(plan, top=top, changes=changes(plan))
    if html_file is not None:
        from shoal.planning.page import plan_page

        write_file(plan_page(plan, report), html_file, option="--html")
    if as_json and not run:
        print_json(report)
    elif not as_json:
        _print(report)
    if html_file is not None and not as_json:
        print(f"\nPage  written to {html_file}")
    return _train(what, plan, size=size, as_json=as_json) if run else 0


def _rules(sync: str | None) -> tuple[SyncTerm, ...]:
    """How islands are to stay together, if that was asked for: one rule, or the same with several periods."""
    if sync is None:
        return ()
    if sync == "auto":
        from shoal.cli.plan_here import AUTO_PERIODS
        from shoal.strategy import diloco

        return tuple(diloco(h) for h in AUTO_PERIODS)
    from shoal.strategy import REGISTRY, StrategyError, parse
    from shoal.strategy.terms.term import technique_names

    try:
        [level] = parse(f"dp(2, sync={sync})").dp_levels
    except StrategyError as error:
        raise CannotPlan(f"--sync {sync}: {error}") from None
    if level.sync.period is None:
        known = ", ".join(REGISTRY[name].example() for name in technique_names("sync"))
        raise CannotPlan(f"--sync {sync}: plans know bsp(), which is always among them, and islands; try auto, {known}")
    return (level.sync,)


def _known(optimizer: str) -> str:
    from shoal.estimate.target import OPTIMIZERS

    if optimizer not in OPTIMIZERS:
        raise CannotPlan(f"--optimizer {optimizer}: expected one of {', '.join(OPTIMIZERS)}")
    return optimizer


def _here(what: str, *, batch: str | None, size: str | None, **options: Any) -> int:
    from shoal.cli.plan_here import plan_here_command
    from shoal.cli.train import require_known

    if batch is not None and not (batch.isdigit() and int(batch) > 0):
        raise CannotPlan(f"--batch {batch}: expected samples of this job, such as 24")
    require_known(what, size)
    return plan_here_command(what, batch=int(batch) if batch else None, size=size, **options)


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


def _model(what: str, *, size: str | None, run: bool) -> tuple[Transformer, ModelFacts | None, int | None]:
    """(shape, facts of a job, its global batch)"""
    if not _names_job(what):
        try:
            shape = preset(what)
        except ValueError as error:
            raise CannotPlan(f"{error}; or give a job: a Python file, language, image") from None
        if run:
            raise CannotPlan(f"--run trains a job, and {what!r} names a shape without data; give a job")
        return shape, None, None
    from shoal.cli.train import require_known

    require_known(what, size)
    from shoal.job import load_job
    from shoal.layout.job_shape import shape_of

    job = load_job(what, size=size)
    shape, facts = shape_of(job)
    return shape, facts, int(job.global_batch)


def _names_job(what: str) -> bool:
    """Whether a text is a file or the name of a built-in job rather than of a shape."""
    if names.is_file(what):
        return True
    try:
        names.parse_name(what)
    except ValueError:
        return what.partition(":")[0].strip().lower() in names.TASKS
    return True


def _plan(
    shape: Transformer, place: Cluster, *, batch: int | None, by: str, precision: str | None, price: float | None,
    watts: float | None, kwh_price: float | None, pilot: str | None, facts: ModelFacts | None, profile: str | None,
    rules: tuple[SyncTerm, ...], optimizer: str,
) -> Plan:  # fmt: skip
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
        shape, place, global_batch=batch, target=target, precision=precision, by=by, price_an_hour=price, watts=watts,
        price_a_kwh=kwh_price, facts=facts, sync=rules[0] if rules else None,
        periods=tuple(rule.period for rule in rules if rule.period is not None), **more,
    )  # fmt: skip
    return cheapest(question) if by == "cost" else make_plan(question)


def _train(what: str, plan: Plan, *, size: str | None, as_json: bool) -> int:
    """By the best plan that the engine can run."""
    from shoal.parallel.runnable import cannot_run

    ahead = (plan.strategy(int(row)) for row in plan.ranked[:MOST_TRIED])
    strategy = next((each for each in ahead if cannot_run(each) is None), None)
    if strategy is None:
        raise CannotPlan(
            f"--run: {cannot_run(plan.strategy(int(plan.ranked[0])))}; none of the best plans can be trained"
        )
    return train_by(strategy, what, size=size, batch=plan.question.global_batch, as_json=as_json)


def train_by(strategy: Strategy, what: str, *, size: str | None, batch: int | None, as_json: bool) -> int:
    """The same call as `shoal train`."""
    from shoal.cli.train import train_command
    from shoal.training.options import TrainOptions

    gc.enable()
    if not as_json:
        print(f"\nTraining by {strategy}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if strategy.world > cores:
        print(f"{strategy.world} ranks share {cores} cores here: steps will take longer than planned", file=sys.stderr)
    options = TrainOptions(job=what, strategy=str(strategy), size=size, global_batch=batch)
    return train_command(options, as_json=as_json)


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(report["title"], style="bold"))
    for line in report["assumptions"]:
        console.print(Text(f"  {line}", style="dim"))
    for line in report["warnings"]:
        console.print(Text(f"Warning: {line}", style="yellow"))
    shown = (
        ("", report["plans"]),
        ("Best of each family", report["families"]),
        ("Pareto: time against memory", report["pareto"]),
    )
    for heading, rows in shown:
        console.print()
        if heading:
            console.print(Text(heading, style="bold"))
        for line, style in _lines(rows, errors=report["errors"], width=console.width):
            console.print(Text(line, style=style), soft_wrap=True)
    if report["link"]:
        console.print()
        console.print(Text("Which period and which compression for the link", style="bold"))
        for line in report["link"]:
            console.print(Text(f"  {line}"), soft_wrap=True)
    beyond = report["plans"][0]["unmeasured"]
    if beyond:
        console.print()
        console.print(Text(f"Warning: the best plan uses features with little validation data: {', '.join(beyond)}."))
    console.print()
    console.print(Text("What if", style="bold"))
    for change in report["changes"]:
        console.print(Text(f"  {change['what']}: {change['outcome']}"), soft_wrap=True)


def _lines(rows: list[dict[str, Any]], *, errors: dict[str, Any], width: int) -> list[tuple[str, str]]:
    """(line, style) of a table. Strategies stand in its last column, or under their figures if that is too wide."""
    money = any(row.get("cost_in") == "money" for row in rows)
    energy = any(row.get("energy") for row in rows)
    heads = ["", f"step ±{errors['step']:.0%}", "a device", "MFU", "to target", *(["cost"] if money else []),
             *(["energy"] if energy else []),
             f"memory ±{errors['memory']:.0%}", "of it"]  # fmt: skip
    cells = []
    for number, row in enumerate(rows, start=1):
        label = row.get("family") or str(number)
        if row["fits"]:
            priced = [*([amount(row)] if money else []), *([row["energy"]] if energy else [])]
            figures = [row["step"], row["speed"], row["mfu_text"], row["time"]]
            cells.append([label, *figures, *priced, row["memory"], row["why"]])
        else:
            blank = [""] * (len(heads) - 4)
            cells.append([label, "", *blank, row["memory"], f"misses by {gigabytes(-row['margin_bytes'])}"])
    wide = [max(len(line[place]) for line in [heads, *cells]) for place in range(len(heads))]

    def joined(line: list[str]) -> str:
        first = line[0].ljust(wide[0])
        return "  ".join([first, *(each.rjust(room) for each, room in zip(line[1:], wide[1:], strict=True))])

    one_line = all(len(joined(line)) + 2 + len(row["strategy"]) <= width for line, row in zip(cells, rows, strict=True))
    lines = [(joined(heads) + ("  strategy" if one_line else ""), "dim")]
    for line, row in zip(cells, rows, strict=True):
        style = "" if row["fits"] else "dim"
        if one_line:
            lines.append((f"{joined(line)}  {row['strategy']}", style))
        else:
            lines += [(joined(line), style), (f"    {row['strategy']}", style or "cyan")]
    return lines

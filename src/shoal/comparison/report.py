"""The report of a comparison: one HTML file that works offline, and the same figures as JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.common.pages import render
from shoal.comparison.beside import beside_lines
from shoal.comparison.protocol import WARMUP_STEPS
from shoal.training.record.run import plain

PAGE = Path(__file__).with_name("page")
COLUMNS = (
    "job",
    "name",
    "title",
    "ranks",
    "verdict",
    "contract",
    "time_to_target_s",
    "steps_to_target",
    "epochs_to_target",
    "final",
    "final_spread",
    "step_s",
    "step_spread_s",
    "epoch_s",
    "global_batch",
    "samples_per_s",
    "tokens_per_s",
    "speedup_own",
    "speedup_best",
    "efficiency",
    "scaling",
    "utilisation",
    "imbalance",
    "memory_bytes",
    "held_bytes",
    "sent_bytes",
    "sent_messages",
    "wire_s",
    "compression",
    "predicted_bytes",
    "predicted_step_s",
    "staleness_mean",
    "staleness_max",
    "divergence",
    "seeds",
)
FILES = ("report.html", "report.json", "report.csv", "report.md")


def write_report(results: Mapping[str, Any], folder: Path, *, commands: Sequence[str] = ()) -> Path:
    """Writes all forms into the folder; the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = (
        page(results, commands),
        json.dumps(plain(results), indent=1, allow_nan=False) + "\n",
        as_csv(results),
        as_markdown(results, commands),
    )
    for name, text in zip(FILES, texts, strict=True):
        (folder / name).write_text(text, encoding="utf-8")
    return folder / FILES[0]


def page(results: Mapping[str, Any], commands: Sequence[str] = ()) -> str:
    """The page."""
    jobs = [{**job, "rows": [_for_page(row) for row in job["rows"]]} for job in results["jobs"]]
    data = plain({"jobs": jobs, "warmup": WARMUP_STEPS, "weak": _question(results).get("per_rank", False)})
    return render(
        PAGE / "report.html.j2",
        data=data,
        script=PAGE / "report.js",
        title=title_of(results),
        subtitle=subtitle_of(results),
        protocol=protocol_words(results),
        environment=environment_rows(results),
        commands=list(commands),
    )


def _for_page(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without what only the files need."""
    left_out = ("folders", "link")
    kept = {name: value for name, value in row.items() if name not in left_out}
    if row.get("step_s"):
        kept["samples_per_step"] = row["samples_per_s"] * row["step_s"]
    return kept


def _question(results: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = results.get("question") or {}
    return found


def survey_lines(survey: Mapping[str, Any]) -> list[str]:
    """The findings of the survey, here and simulated."""
    places = [each["place"] for each in survey["places"]]
    return [
        f"### Beside the survey: {survey['task']}",
        "",
        f"| finding | published | {' | '.join(places)} |",
        "|---|---" + "|---" * len(places) + "|",
        *(f"| {row['what']} | {row['published']} | {' | '.join(row['found'])} |" for row in survey["findings"]),
        "",
    ]


def title_of(results: Mapping[str, Any]) -> str:
    names = " and ".join(job["name"] for job in results["jobs"])
    count = max((len({row["name"] for row in job["rows"]}) for job in results["jobs"]), default=0)
    return f"{count} ways to train {names}"


def subtitle_of(results: Mapping[str, Any]) -> str:
    asked = _question(results)
    runs = sum(row["seeds"] for job in results["jobs"] for row in job["rows"])
    ranks = sorted({row["ranks"] for job in results["jobs"] for row in job["rows"]})
    words = [f"{runs} runs", f"{', '.join(map(str, ranks))} ranks"]
    if asked:
        words += [f"{asked['seeds']} {'seed' if asked['seeds'] == 1 else 'seeds'}"]
    return " · ".join([*words, f"started {results['started']}", (results.get("machine") or {}).get("processor", "")])


def protocol_words(results: Mapping[str, Any]) -> list[str]:
    asked = _question(results)
    if not asked:
        return ["These runs were made one by one, not under one protocol: nothing checks that they trained the same."]
    batch = f"{asked['batch']} samples" if asked["batch"] else "the job's"
    lines = [
        f"The global batch ({batch}{' a rank' if asked['per_rank'] else ''}), the samples of every step, the initial "
        "weights, float32, the clipping, the schedule and the optimiser with its options are those of the job.",
        f"The first {WARMUP_STEPS} steps of a run are outside of the window in which speed is measured; on the axis of "
        "time they count as steady ones. Frameworks are built, and compile, before the clock starts.",
        "Contestants take turns: each trains once for a seed, and another begins with the next seed. Links are "
        "measured before every run. One thread a rank.",
        "Frameworks send over Gloo. Shoal sends over its own backend, which is part of it. Evaluation is not timed, "
        "and is made on a plain copy of the model.",
        "The guard compares samples, initial parameters, optimisers and their state, replicas at the end, the first "
        "losses and, by a one-sided t-test over seeds, the final loss with plain PyTorch in one process.",
        "Utilisation is the operations of the model, forward and backward, over what a large matrix product reaches on "
        "each rank; recomputation does not count.",
    ]
    if any(job.get("batch_norm") for job in results["jobs"]):
        lines.append(
            "Batch norm keeps the statistics of each replica for all contestants, since PyTorch has synchronous batch "
            "norm for accelerators only; the reference computes the replicas' shares one after the other."
        )
    return lines


def environment_rows(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = {**(results.get("machine") or {}), **(results.get("environment") or {})}
    return [(name, str(value)) for name, value in rows.items() if value not in (None, [], {}) and name != "links"]


def as_csv(results: Mapping[str, Any]) -> str:
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(COLUMNS)
    for job in results["jobs"]:
        for row in job["rows"]:
            writer.writerow([_cell({**row, "job": job["name"]}.get(name)) for name in COLUMNS])
    return out.getvalue()


def _cell(value: Any) -> Any:
    # A text that begins like a formula would be one in a spreadsheet.
    return f"'{value}" if isinstance(value, str) and value[:1] in "=+-@" else value


def as_markdown(results: Mapping[str, Any], commands: Sequence[str] = ()) -> str:
    lines = [f"# {title_of(results)}", "", subtitle_of(results), ""]
    for job in results["jobs"]:
        target = f", target {job['metric']} {job['target']:.4g}" if job["target"] is not None else ""
        lines += [
            f"## {job['name']}{target}",
            "",
            f"| contestant | ranks | to target | step | samples/s | memory a rank | {job['metric']} | verdict |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in job["rows"]:
            if row["step_s"] is None:
                lines.append(f"| `{row['name']}` | {row['ranks']} | | | | | | failed |")
                continue
            final = "" if row["final"] is None else f"{row['final']:.4g}"
            to_target = f"{row['time_to_target_s']:.3g} s" if row["time_to_target_s"] is not None else "not reached"
            lines.append(
                f"| `{row['name']}` | {row['ranks']} | {to_target} | {1000 * row['step_s']:.3g} ms ± "
                f"{1000 * row['step_spread_s']:.2g} | {row['samples_per_s']:.4g} | {row['memory_bytes'] / 1e6:.3g} MB "
                f"| {final} | {row['verdict']} |"
            )
        notes = [
            *(
                f"- `{row['name']}` x{row['ranks']}: {each['name']}: {each['text']}"
                for row in job["rows"]
                for each in row["findings"]
            ),
            *(f"- `{row['name']}` x{row['ranks']} failed: {each}" for row in job["rows"] for each in row["failed"]),
            *(f"- `{each['name']}` x{each['ranks']} did not run: {each['why']}" for each in job["absent"]),
        ]
        lines += ["", *notes, ""] if notes else [""]
        lines += beside_lines(job.get("beside") or [])
        if job.get("survey"):
            lines += survey_lines(job["survey"])
    lines += ["## What was the same for all", "", *(f"- {line}" for line in protocol_words(results)), ""]
    lines += ["## Environment", "", *(f"- {name}: {value}" for name, value in environment_rows(results)), ""]
    if commands:
        lines += ["## Reproduce", "", *(f"    {line}" for line in commands), ""]
    return "\n".join(lines)

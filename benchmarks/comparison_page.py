"""docs/comparison.md from the folder of a comparison: its figures, pictures of its report, its environment.

Every figure is the run's. Pictures are taken of the report's own plots by Debian's chromium (apt-get install chromium
chromium-driver); without it they are left out.

    make compare && python benchmarks/comparison_page.py runs/compare [--to docs/comparison.md]
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import shoal
from shoal.comparison.beside import beside_lines
from shoal.comparison.report import environment_rows, protocol_words, subtitle_of, survey_lines

PLOTS = {
    "deciding": "The validation metric against training time",
    "throughput": "Samples a second",
    "memory": "Peak memory of a rank",
    "split": "Where a step goes",
    "steps": "Step times",
    "survey": "Beside the survey",
}
WIDTH = 1100


def pictures(page: Path, jobs: int, folder: Path) -> dict[tuple[int, str], str]:
    """(job, plot) -> the name of its picture."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        print("no pictures: chromium and chromium-driver are not installed", file=sys.stderr)
        return {}
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    browser, found = webdriver.Chrome(options=options, service=Service(driver)), {}
    try:
        size = {"width": WIDTH, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(page.absolute().as_uri())
        browser.execute_script("document.documentElement.dataset.theme = 'light'")
        for number in range(jobs):
            if jobs > 1:
                browser.execute_script(f"document.querySelectorAll('#jobs button')[{number}].click()")
            for plot in PLOTS:
                elements = browser.find_elements("id", plot)
                if elements:
                    name = f"comparison-{number + 1}-{plot}.png"
                    elements[0].screenshot(str(folder / name))
                    found[number, plot] = name
    finally:
        browser.quit()
    return found


def page_of(results: dict[str, Any], drawn: dict[tuple[int, str], str], *, command: str, source: str) -> str:
    """The Markdown."""
    lines = [
        "# The comparison, measured",
        "",
        "Strategies of Shoal and other frameworks under one protocol ([compare.md](compare.md)).",
        "",
        f"{subtitle_of(results)}.",
        "",
        f"    {command}",
        "",
        f"Written by `python benchmarks/comparison_page.py {source}`; every figure is that run's.",
        "",
    ]
    for number, job in enumerate(results["jobs"]):
        lines += [f"## {job['name']}", ""]
        target = f"target {job['metric']} {job['target']:.4g}, " if job["target"] is not None else ""
        lines += [f"{target}{job['parameters']:,} parameters, global batch {job['batch']}, {job['steps']} steps.", ""]
        for plot, title in PLOTS.items():
            if (number, plot) in drawn:
                lines += [f"![{title}](pictures/{drawn[number, plot]})", ""]
        lines += table(job)
        lines += beside_lines(job.get("beside") or [])
        lines += survey_lines(job["survey"]) if job.get("survey") else []
        lines += notes(job)
    lines += ["## What was the same for all", "", *(f"- {line}" for line in protocol_words(results)), ""]
    lines += ["## Environment", "", *(f"- {name}: {value}" for name, value in environment_rows(results)), ""]
    return "\n".join(lines)


def table(job: dict[str, Any]) -> list[str]:
    lines = [
        "| contestant | ranks | to target | epochs to target | step | samples/s | of peak | peak memory | "
        f"{job['metric']} | verdict |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in job["rows"]:
        if row["step_s"] is None:
            lines.append(f"| `{row['name']}` | {row['ranks']} | | | | | | | | failed |")
            continue
        to_target = (
            "not reached"
            if row["time_to_target_s"] is None
            else (f"{spread(row['time_to_target_s'], row['time_spread_s'])} s")
        )
        epochs = "" if row["epochs_to_target"] is None else f"{row['epochs_to_target']:.2g}"
        final = "" if row["final"] is None else spread(row["final"], row["final_spread"], "{:.4g}")
        lines.append(
            f"| `{row['name']}` | {row['ranks']} | {to_target} | {epochs} | "
            f"{spread(1000 * row['step_s'], 1000 * row['step_spread_s'])} ms | "
            f"{row['samples_per_s']:.4g} | {row['utilisation']:.0%} | "
            f"{row['memory_bytes'] / 1e6:.3g} MB | {final} | {row['verdict']} |"
        )
    return [*lines, ""]


def spread(value: float, deviation: float, form: str = "{:.3g}") -> str:
    """With the standard deviation over seeds, where there are several."""
    return form.format(value) + (f" ± {deviation:.2g}" if deviation else "")


def notes(job: dict[str, Any]) -> list[str]:
    found = [
        *(
            f"- `{row['name']}` on {row['ranks']}: {each['name']}: {each['text']}"
            for row in job["rows"]
            for each in row["findings"]
            if each["kind"] != "departure"
        ),
        *(f"- `{row['name']}` on {row['ranks']} failed: {each}" for row in job["rows"] for each in row["failed"]),
        *(f"- `{each['name']}` on {each['ranks']} did not run: {each['why']}" for each in job["absent"]),
    ]
    return ["### Findings of the guard, and who did not run", "", *found, ""] if found else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="of a comparison")
    parser.add_argument("--to", default="docs/comparison.md")
    parser.add_argument("--command", default="make compare", help="that made it")
    asked = parser.parse_args()
    made, to = shoal.report(asked.folder), Path(asked.to)
    (to.parent / "pictures").mkdir(exist_ok=True)
    drawn = pictures(made.page, len(made.results["jobs"]), to.parent / "pictures")
    text = page_of(made.results, drawn, command=asked.command, source=f"runs/{Path(asked.folder).name}")
    to.write_text(text, encoding="utf-8")
    print(f"{to}: {len(drawn)} pictures")


if __name__ == "__main__":
    main()

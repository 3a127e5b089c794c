"""The report in a browser: every plot is drawn, nothing fails, tables sort and filter, nothing comes from outside."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from shoal.comparison.beside import beside
from shoal.comparison.report import as_csv, as_markdown, page, write_report
from shoal.comparison.survey import class_of, survey_of

PLOTS = ("deciding", "throughput", "memory", "split", "steps", "scaling", "bytes", "loss", "timeline", "survey")


def row(name: str, ranks: int, step_s: float, *, own: bool, verdict: str = "fair") -> dict[str, Any]:
    curve = [[step, step * step_s, 3.0 - step / 40] for step in (10, 20, 30, 40)]
    return {
        "name": name,
        "title": "Shoal" if own else "PyTorch DDP",
        "ranks": ranks,
        "own": own,
        "seeds": 2,
        "key": f"{name}@{ranks}",
        "failed": [],
        "same_as": None if own else "dp(2)",
        "contract": "exact",
        "step_s": step_s,
        "time_to_target_s": 30 * step_s,
        "step_spread_s": 0.001,
        "samples_per_s": 24 / step_s,
        "tokens_per_s": 768 / step_s,
        "quantiles_s": [step_s * f for f in (0.9, 0.95, 1, 1.1, 1.4)],
        "memory_bytes": 3e7 * ranks,
        "memory_spread_bytes": 1e6,
        "final": 2.0,
        "final_spread": 0.01,
        "steps_to_target": 30,
        "reached": 2,
        "sent_bytes": 171040 if own else None,
        "predicted_bytes": 171040 if own else None,
        "utilisation": 0.2,
        "split_s": {name: part * step_s for name, part in (("data", 0.1), ("forward", 0.6), ("communication", 0.3))},
        "curves": [curve, curve],
        "losses": [[[n + 1, 5 - n / 20] for n in range(40)]],
        "timeline_s": [step_s] * 40,
        "epoch_s": 40 * step_s,
        "held_bytes": 2e7,
        "held_back": "30% of the step is x" if own else None,
        "speedup_own": 1.5,
        "speedup_best": 1.4,
        "efficiency": 0.7,
        "verdict": verdict,
        "findings": [
            {"name": "samples", "kind": "breach", "text": "</script><script>document.title = 'broken'</script>"}
        ]
        if verdict == "unfair"
        else [],
    }


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    rows = [
        row("serial", 1, 0.02, own=True),
        row("dp(2)", 2, 0.011, own=True),
        row("torch-ddp", 2, 0.013, own=False),
        row("<b>unfair</b>", 2, 0.005, own=False, verdict="unfair"),
    ]
    job = {
        "job": "language:tiny",
        "name": "language:gpt:tiny",
        "parameters": 42000,
        "batch": 24,
        "metric": "loss",
        "higher": False,
        "target": 2.3,
        "rows": rows,
        "steps": 40,
        "peak_flops_per_s": 5e10,
        "absent": [{"name": "horovod", "ranks": 2, "why": "it does not build"}],
        "samples": 960,
        "beside": beside(rows),
        "survey": survey_of(rows, task="gpt2"),
    }
    return {"question": None, "environment": {"torch": "2.13"}, "machine": {}, "started": "today", "jobs": [job]}


def test_the_forms_agree_and_the_page_is_small_and_needs_nothing_else(results: dict[str, Any], tmp_path: Path) -> None:
    path = write_report(results, tmp_path, commands=["shoal compare language:tiny"])
    text = path.read_text()
    assert len(text) < 1_500_000
    assert "src=" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    saved = json.loads((tmp_path / "report.json").read_text())["jobs"][0]["rows"]
    rows = list(csv.DictReader(io.StringIO(as_csv(results))))
    assert [float(each["step_s"]) for each in rows] == [each["step_s"] for each in saved]
    assert "horovod" in as_markdown(results)


def test_markup_in_names_and_findings_stays_text(results: dict[str, Any]) -> None:
    text = page(results)
    assert "<b>unfair" not in text
    assert text.count("</script>") == 3


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_draws_every_plot_and_sorts_and_filters(
    browser: Any, results: dict[str, Any], tmp_path: Path, width: int
) -> None:
    path = write_report(results, tmp_path)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(path.as_uri())

    def js(code: str) -> Any:
        return browser.execute_script(f"return {code}")

    for plot in PLOTS:
        marks = f"document.querySelectorAll('#{plot} svg .mark').length"
        assert js(marks) >= (1 if plot == "scaling" else 2), plot
    assert js("document.documentElement.scrollWidth") <= width
    assert js("document.title") != "broken"

    names = "[...document.querySelectorAll('#table tbody tr')].map(row => row.dataset.key)"
    js("document.querySelector('[data-column=step_s]').click()")
    assert js(names) == ["<b>unfair</b>@2", "dp(2)@2", "torch-ddp@2", "serial@1"]
    js("document.querySelector('[data-column=step_s]').click()")
    assert js(names)[0] == "serial@1"
    browser.find_element("id", "filter").send_keys("torch-ddp")
    assert js(names) == ["torch-ddp@2"]

    lines = "document.querySelectorAll('#deciding svg path.mark').length"
    before = js(lines)
    js("document.querySelector('#deciding .legend button').click()")
    assert js(lines) == before - 2
    assert [each for each in browser.get_log("browser") if each["level"] == "SEVERE"] == []


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("dp(2)", "DDP"),
        ("dp(2, zero=3)", "ZeRO"),
        ("tp(2)", "intra-layer"),
        ("pp(2, '1f1b', micro=8)", "inter-layer"),
        ("serial", "serial"),
        ("accumulate(8) * recompute('full')", "inter-layer"),
        ("cp(2)", None),
    ],
)
def test_strategies_have_their_class_of_the_survey(text: str, kind: str | None) -> None:
    assert class_of(text) == kind


def test_a_pair_is_a_strategy_and_the_framework_that_does_the_same(results: dict[str, Any]) -> None:
    (pair,) = (each for each in results["jobs"][0]["beside"] if each["peer"] == "torch-ddp")
    assert (pair["name"], pair["speed"], pair["why"]) == ("dp(2)", pytest.approx(13 / 11), None)


def test_the_survey_stands_beside_its_machines(results: dict[str, Any]) -> None:
    found = results["jobs"][0]["survey"]
    assert [each["place"] for each in found["places"]] == ["this machine", "Lassen, simulated", "ThetaGPU, simulated"]
    assert found["places"][0]["curves"]["DDP"][0][1] == 1.0
    lassen = dict((point[0], point[1]) for point in found["places"][1]["curves"]["DDP"])
    assert lassen[64] < lassen[1] / 50


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_draws_a_plan(browser: Any, tmp_path: Path, width: int) -> None:
    import shoal

    found = shoal.plan("gpt:1.3b", cluster="dgx-a100", devices=8)
    path = tmp_path / "plan.html"
    path.write_text(found.to_html(), encoding="utf-8")
    assert path.stat().st_size < 1_500_000
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(path.as_uri())

    def js(code: str) -> Any:
        return browser.execute_script(f"return {code}")

    assert js("document.querySelectorAll('#card-scatter svg circle.mark').length") > 20
    assert js("document.querySelectorAll('#card-split svg rect.mark').length") > 5
    assert js("document.documentElement.scrollWidth") <= width
    steps = "[...document.querySelectorAll('#plans tbody tr')].map(row => row.dataset.key)"
    before = js(steps)
    assert before == [row["strategy"] for row in found.report["plans"]]
    js("document.querySelector('#plans [data-column=memory_bytes]').click()")
    assert js(steps) == [row["strategy"] for row in sorted(found.report["plans"], key=lambda row: row["memory_bytes"])]
    browser.find_element("id", "filter-plans").send_keys("no such strategy")
    assert js(steps) == []
    assert [each for each in browser.get_log("browser") if each["level"] == "SEVERE"] == []

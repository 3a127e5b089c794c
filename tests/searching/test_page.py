"""The page of a search in a browser: what it draws for each method, on wide and narrow screens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.searching.options import SearchOptions
from shoal.searching.report import page, write_page


def trial(number: int, value: float | None, **more: Any) -> dict[str, Any]:
    return {
        "number": number,
        "trial": number,
        "state": "failed" if value is None else "finished",
        "value": value,
        "params": {"lr": 10.0 ** -(number % 5), "kind": "<b>x</b>" if number % 2 else "y"},
        "reason": None,
        "job": f"mine.py:space?lr={number}",
        "step_s": 0.01 + number / 1000,
        "memory_bytes": 1e8,
        "seconds": 2.0,
        "predicted": None,
        "shares": None,
        "folder": f"trials/{number:04d}",
        "reported": {},
        "started": None,
        "ended": None,
        **more,
    }


def results(method: str, trials: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    options = SearchOptions(space="/home/me/mine.py:space", method=method, trials=6, steps=27, rounds=3, **more)
    best = min((row for row in trials if row["value"] is not None), key=lambda row: row["value"], default=None)
    front = [row for row in trials if row["predicted"]][:2]
    return {
        "options": options.to_json(),
        "trials": trials,
        "best": best,
        "front": front,
        "importances": {"lr": 0.8, "kind": 0.2} if best else {},
        "rejected": 3,
        "lost": 1,
    }


def found(method: str) -> dict[str, Any]:
    numbers = range(8)
    if method == "pbt":
        rows = [
            trial(n, 2.0 - n / 10, member=n % 6, round=n // 6, parent=None if n < 6 else n - 6, copied=n == 7)
            for n in numbers
        ]
        return results(method, rows)
    if method == "halving":
        return results(method, [trial(n, 1.0 + n, reported={"1": 3.0, "9": 2.0}) for n in numbers])
    if method == "darts":
        return results(method, [trial(n, 1.0 + n, shares={"layer": {"a": 0.7, "b": 0.3}}) for n in numbers])
    if method == "evolution":
        rows = [trial(n, 3.0 - n / 9, predicted={"step_s": 0.01 * (1 + n), "memory_bytes": 1e6 * n}) for n in numbers]
        return results(method, rows, cluster="this", memory_limit=8e6)
    return results(method, [trial(n, None if n == 3 else 10.0**n) for n in numbers])


SHOWN = {
    "tpe": ("history", "importances", "slice-lr", "slice-kind"),
    "pbt": ("history", "slice-lr"),
    "halving": ("history", "rungs"),
    "darts": ("history", "shares-layer"),
    "evolution": ("history", "front", "memory", "measured"),
}


def test_the_page_needs_nothing_else_and_shows_names_as_text(tmp_path: Path) -> None:
    text = write_page(found("tpe"), tmp_path).read_text()
    assert "src=" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "<b>x" not in text
    assert text.count("</script>") == 3
    assert "Search of mine.py" in text
    assert "shoal train &#34;mine.py:space?lr=" in text
    assert len(text) < 100_000


def test_a_search_without_a_finished_trial_has_a_page() -> None:
    assert "Search of mine.py" in page(results("tpe", [trial(0, None)]))


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("method", SHOWN)
def test_a_browser_draws_every_plot(browser: Any, tmp_path: Path, method: str, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(write_page(found(method), tmp_path).as_uri())

    def js(code: str) -> Any:
        return browser.execute_script(f"return {code}")

    for plot in SHOWN[method]:
        assert js(f"document.querySelectorAll('#{plot} svg .mark').length") >= 2, plot
    assert js("document.documentElement.scrollWidth") <= width
    rows = "[...document.querySelectorAll('#all tbody tr')].map(row => row.textContent)"
    assert len(js(rows)) == 8
    if method == "tpe":
        assert js("document.querySelector('.pick [aria-pressed=true]').textContent") == "log"
        first = js(rows)[0]
        js("document.querySelectorAll('#all th')[2].click()")
        assert js(rows)[0] != first
        browser.find_element("css selector", "#all input").send_keys("trial 3,")
        assert js(rows) == []
    assert [each for each in browser.get_log("browser") if each["level"] == "SEVERE"] == []

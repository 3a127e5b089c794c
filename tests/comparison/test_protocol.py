"""A comparison that is made in parts, and what the survey's preset asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.comparison import protocol, survey


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_after_its_minutes_a_comparison_begins_no_run_and_reports_those_it_has(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    found = shoal.compare(
        "language:tiny", contestants=["dp(2)"], seeds=1, steps=4, folder=tmp_path, minutes=0, progress=heard.append
    )
    assert found.rows == []
    assert found.page.exists()
    assert any("0 of 2 runs" in message.get("text", "") for message in heard)


def test_the_survey_has_all_its_classes_on_the_batch_of_a_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(protocol, "compare", lambda question, *_, **__: asked.append(question))
    monkeypatch.setattr("shoal.api.compare.results", lambda folder: {"jobs": [], "started": ""})
    monkeypatch.setattr("shoal.api.compare.write_report", lambda *_, **__: None)
    shoal.compare("language:tiny", preset="survey", folder=tmp_path)
    (question,) = asked
    assert question.per_rank
    assert question.ranks == (1, 2)
    kinds = {survey.class_of(name) for name in question.contestants}
    assert kinds >= set(survey.CLASSES)
    with pytest.raises(protocol.CannotCompare, match="expected survey"):
        shoal.compare("language:tiny", preset="surveys", folder=tmp_path)

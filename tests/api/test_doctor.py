"""`shoal doctor` reports the machine, hides secrets, and does not call healthy what fails."""

from __future__ import annotations

from pathlib import Path

import pytest

import shoal
from shoal.api import doctor as module

pytestmark = pytest.mark.processes

WRONG = """
import torch
from shoal.job import Job, TensorData

class Forgets(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("no kernel image for this device")

job = Job(name="wrong", model=lambda: torch.nn.Linear(4, 1), train=TensorData(x=torch.ones(8, 4)), global_batch=4,
          loss=lambda out, batch: (out.square().sum(), len(out)), steps=2,
          optimizer=lambda groups: Forgets(groups, lr=0.1))
"""


def test_a_diagnosis_has_the_facts_and_the_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    axes = (("wrong", 2, str(tmp_path / "wrong.py"), "dp(2)"), ("many", 999, "language:tiny", "dp(999)"))
    monkeypatch.setattr(module, "AXES", axes)
    monkeypatch.setenv("SHOAL_TOKEN_OF_MINE", "secret word")
    found = shoal.doctor(seconds=100)
    failed, many = found.tried
    assert failed.result == "FAILED"
    assert "no kernel image for this device" in failed.failure
    assert many.result == "not tried: needs 999 devices or cores"
    assert not found.healthy
    text = str(found)
    assert "no kernel image for this device" in text
    assert "secret word" not in text
    assert "SHOAL_TOKEN_OF_MINE" in text
    for section, name in (("machine", "python"), ("limits", "open files"), ("links", "backends")):
        assert found.sections[section][name] in text


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_every_axis_that_this_machine_allows_is_proven() -> None:
    found = shoal.doctor(seconds=450)
    assert found.healthy, str(found)
    passed = {each.axis for each in found.tried if each.result == "passed"}
    assert {"dp", "dp, ZeRO 3", "tp", "pp", "cp, ring", "ep", "islands"} <= passed
    assert all(each.difference is None or each.difference < 1e-10 for each in found.tried)

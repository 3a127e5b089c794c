"""What a verb does can be done in Python with the same words; wrong words are refused, results print."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal import dp, tp
from shoal.job.load import load_job
from shoal.runtime.options import WrongOption

ROOT = Path(__file__).parents[2]
VERBS = ("analyze", "calibrate", "doctor", "evaluate", "explain", "export", "plan", "simulate", "submit", "validate")


def command(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *words, "--json"], capture_output=True, text=True, check=True, timeout=100
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.mark.processes
def test_plan_gives_what_the_verb_prints() -> None:
    found = shoal.plan("gpt:1.3b", cluster="dgx-a100", devices=16, top=3)
    printed = command("plan", "gpt:1.3b", "--cluster", "dgx-a100", "--devices", "16", "--top", "3")
    assert plain(found.to_json()) == printed
    assert str(found.best) == printed["plans"][0]["strategy"]
    assert found.best.world == 16
    assert str(found.best) in repr(found)
    assert "<table>" in found._repr_html_()


@pytest.mark.processes
def test_simulate_takes_terms_and_a_job_object() -> None:
    found = shoal.simulate("gpt:1.3b", dp(2) * tp(8), cluster="dgx-a100", straggler=["rank 3: 2x"])
    printed = command(
        "simulate", "gpt:1.3b", "--strategy", "dp(2) * tp(8)", "--cluster", "dgx-a100", "--straggler", "rank 3: 2x"
    )
    assert plain(found.to_json()) == printed
    assert found.step_s[0] > 1.2 * found.undisturbed_s
    assert found.to_svg().startswith("<svg")
    own = shoal.simulate(load_job("language:tiny"), dp(2), cluster="dgx-a100")
    assert own.step_s[0] > 0


@pytest.mark.processes
def test_explain_and_analyze_take_objects_and_text() -> None:
    assert shoal.explain(dp(8, zero=1)).report == shoal.explain("dp(8, zero=1)").report
    assert plain(shoal.explain("dp(8, zero=1)").to_json()) == command("explain", "dp(8, zero=1)")
    job = load_job("language:tiny")
    of_job = shoal.explain(job, strategy=dp(3), ranks=2)
    assert of_job.is_job
    assert not of_job.report["strategy"]["legal"]
    assert "refused" in repr(of_job)
    assert shoal.analyze(job).report["totals"] == shoal.analyze("language:tiny").report["totals"]
    assert shoal.analyze("vgg16").parameters > 1.3e8


def test_a_strategy_is_drawn_and_its_pipeline_has_a_timeline() -> None:
    found = shoal.explain("pp(2, 'gpipe', micro=2)")
    assert found.to_svg().startswith("<svg")
    timeline = found.timeline()
    assert timeline.to_svg().startswith("<svg")
    # Two stages, two micro-batches: 3 forwards of one unit, then 3 backwards of two.
    assert timeline.to_json()["makespan"] == 9
    with pytest.raises(ValueError, match="has no pipeline"):
        shoal.explain("dp(2)").timeline()
    with pytest.raises(ValueError, match="is a job; a strategy is drawn"):
        shoal.explain("language:tiny").to_svg()


def test_the_taxonomy_has_each_family_and_refuses_others() -> None:
    whole = shoal.taxonomy()
    assert {each["name"] for each in whole.systems or ()} >= {"GPipe", "DiLoCo"}
    family = shoal.taxonomy("compress")
    assert family.systems is None
    assert {each["name"] for each in family.techniques} >= {"topk", "powersgd"}
    with pytest.raises(ValueError, match="expected one of"):
        shoal.taxonomy("compression")


def test_validate_refuses_a_file_without_rows(tmp_path: Path) -> None:
    file = tmp_path / "none.csv"
    file.write_text("id,model\n")
    with pytest.raises(ValueError, match="has no rows"):
        shoal.validate(file)


@pytest.mark.parametrize("verb", VERBS)
def test_a_wrong_keyword_is_refused_with_the_nearest(verb: str) -> None:
    function = getattr(shoal, verb)
    right = next(name for name in reversed(function.__wrapped__.__kwdefaults__))
    with pytest.raises(WrongOption, match=rf"shoal\.{verb}: no option '{right}x' \(did you mean '{right}'\?\)"):
        function(**{right + "x": 1})


def test_train_refuses_a_wrong_keyword_too() -> None:
    with pytest.raises(ValueError, match="did you mean 'steps'"):
        shoal.train("language:tiny", "dp(2)", stepz=3)


def test_every_public_name_is_typed_documented_and_on_the_page() -> None:
    page = (ROOT / "docs/api.md").read_text()
    for name in shoal.__all__:
        found = getattr(shoal, name)
        if name in shoal.REGISTRY or name in shoal.strategy.__all__:
            continue
        assert f"`shoal.{name}" in page, f"docs/api.md does not name shoal.{name}"
        assert found.__doc__, name
    for name in re.findall(r"`shoal\.(\w+)", page):
        assert hasattr(shoal, name), f"docs/api.md names shoal.{name}, which does not exist"
    for verb in VERBS:
        assert "Returns:" in getattr(shoal, verb).__doc__
    assert (Path(shoal.__file__).parent / "py.typed").exists()


@pytest.mark.processes
def test_a_run_is_logged_evaluated_and_exported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import torch

    with caplog.at_level(logging.DEBUG, logger="shoal"):
        job = load_job("language:tiny")
        run = shoal.train(job, dp(2), steps=2, folder=tmp_path / "run", gate=False, checkpoint_every=2)
    assert {record.name for record in caplog.records if record.message.startswith("step:")} == {"shoal"}
    found = shoal.evaluate(run)
    assert found.step == 2
    assert found.metrics == pytest.approx(shoal.evaluate(tmp_path / "run", job=job).metrics)
    written = shoal.export(run, to=str(tmp_path / "model.pt"))
    state = torch.load(written.path, weights_only=True)
    for name, value in run.model().state_dict().items():
        assert torch.equal(value, state[name])
    assert "load_state_dict" in repr(written)


def test_refusals_name_keywords_in_python(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^kwh_price=2: .*leave it out") as refused:
        shoal.plan("language:tiny", kwh_price=2)
    assert "--" not in str(refused.value)
    with pytest.raises(ValueError, match=r"^emulate='2x2' cannot be read"):
        shoal.train("language:tiny", "dp(2)", emulate="2x2", folder=tmp_path / "run")


def test_results_print_as_tables() -> None:
    found = shoal.load_run  # Printed by what is told, not by how it is stored.
    assert found.__doc__ is not None
    certificate = shoal.Certificate(
        job="mine",
        strategy="dp(2)",
        world=2,
        contract="exact",
        passed=True,
        max_rel_diff=2e-15,
        tolerance=1e-10,
        worst="w",
        ledger_matches=True,
        steps=3,
    )
    assert repr(certificate).startswith("PASSED: mine under dp(2) on 2 ranks\n")
    assert "<table>" in certificate._repr_html_()


def test_the_page_of_reference_is_what_signatures_and_docstrings_say() -> None:
    from shoal.api.reference import written

    page = (ROOT / "docs/api.md").read_text()
    assert written(page) == page, "run: python -m shoal.api.reference --write docs/api.md"


def test_every_argument_of_the_api_is_documented() -> None:
    import inspect

    terms = {*shoal.REGISTRY, *shoal.strategy.__all__}
    for name in sorted({*shoal.__all__} - terms):
        found = getattr(shoal, name)
        if not inspect.isfunction(found):
            continue
        text = found.__doc__ or ""
        for each in inspect.signature(found).parameters.values():
            if "Args:" in text and each.kind is not each.VAR_KEYWORD:
                assert f"{each.name}: " in text, f"shoal.{name} does not document {each.name}"


def test_no_package_of_shoal_hides_a_public_name() -> None:
    packages = {each.name for each in Path(shoal.__file__).parent.iterdir() if (each / "__init__.py").exists()}
    assert not packages & set(shoal.__all__)  # Importing it would put the package in the name's place.

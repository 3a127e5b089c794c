"""`shoal plan`: a table, JSON, a page; no torch for a shape; sentences for what cannot be planned."""

from __future__ import annotations

import gc
import json

import pytest

from cli.command import Place
from cli.conftest import Shoal

WITHOUT_TORCH = """
import sys
from shoal.cli.main import run
try:
    run()
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


def test_a_shape_is_planned_without_torch(place: Place) -> None:
    words = ("plan", "gpt:175b", "--cluster", "dgx-a100", "--devices", "1024")
    done = place.run("-c", WITHOUT_TORCH, *words)
    assert done.stderr.splitlines()[-1] == "False"
    assert done.returncode == 0
    assert "Best of each family" in done.stdout
    assert "twice the inter-node bandwidth" in done.stdout


def test_json_and_page_tell_the_same_plans(place: Place) -> None:
    words = ("plan", "gpt2:medium", "-c", "dgx-a100", "-n", "16", "--batch", "64", "--top", "4")
    done = place.shoal(*words, "--json", "--html", "plan.html")
    told = json.loads(done.stdout)
    assert len(told["plans"]) == 4
    assert told["global_batch"] == 64
    page = (place.folder / "plan.html").read_text(encoding="utf-8")
    for row in told["plans"]:
        assert json.dumps(row["strategy"])[1:-1].replace("'", "\\u0027") in page
    assert "user-select:all" in page
    assert "@media(max-width:760px)" in page
    for part in ("Time against memory", "The best of each family", "Where the step goes", "What if", "±10%"):
        assert part in page
    # The one address is the name of SVG's elements, which the page's script draws.
    page = page.replace("http://www.w3.org/2000/svg", "")
    for outside in ("http://", "https://", "src=", "@import"):
        assert outside not in page


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("gpt:175b", "-c", "dgx-a100", "-n", "8"), "misses by"),
        (("gpt:17b", "-c", "dgx-a100"), "did you mean 'gpt:175b'"),
        (("gpt:1.3b", "-c", "dgx-a10"), "did you mean"),
        (("gpt:1.3b", "-c", "impossible.toml"), "gb_per_s of level 1 is -3"),
        (("gpt:1.3b", "-c", "missing.toml"), "name a file"),
        (("gpt:1.3b", "-c", "dgx-a100", "-n", "12"), "do not fill"),
        (("gpt:1.3b", "-c", "dgx-a100", "-n", "8", "--batch", "many"), "expected sequences"),
        (("gpt:1.3b", "-c", "dgx-a100", "-n", "8", "--by", "luck"), "expected one of time, step, cost"),
        (("gpt:1.3b", "-c", "dgx-a100", "-n", "8", "--precision", "fp4"), "expected bf16"),
        (("gpt:1.3b", "-c", "dgx-a100", "-n", "8", "--sync", "hogwild()"), "try auto, asp(), ssp(3), bmuf(50)"),
        (("gpt:1.3b", "-c", "dgx-a100", "-n", "8", "--pilot", "nothing.csv"), "nothing.csv"),
        (("gpt:1.3b", "-c", "dgx-a100", "-n", "8", "--run"), "--run trains a job"),
        (("gpt:1.3b", "-c", "dgx-a100", "-n", "8", "--watts", "-3"), "--watts -3"),
        (("gpt:1.3b", "-c", "plain.toml", "--kwh-price", "0.2"), "give --watts"),
        (("gpt:1.3b", "-c", "dgx-a100", "-n", "8", "--html", "no/such/folder/x.html"), "--html"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_sentence(words: tuple[str, ...], expected: str, place: Place) -> None:
    bad = 'device = "A100 SXM4 80GB"\n[[level]]\nranks = 8\ngb_per_s = -3\n'
    (place.folder / "impossible.toml").write_text(bad, encoding="utf-8")
    plain = (
        "[device]\npeak_tflops = {bf16 = 100}\nmemory_gb = 80\nmemory_gb_s = 900\n[[level]]\nranks = 8\ngb_per_s = 9\n"
    )
    (place.folder / "plain.toml").write_text(plain, encoding="utf-8")
    done = place.shoal("plan", *words)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_local_steps_are_planned_and_simulated(place: Place) -> None:
    words = ("plan", "gpt2:medium", "-c", "dgx-a100", "-n", "16", "--batch", "64", "--sync", "local(8)", "--json")
    told = json.loads(place.shoal(*words).stdout)
    [family] = [row for row in told["families"] if row["family"] == "local steps"]
    assert "sync=local(8)" in family["strategy"]
    assert family["contract"] == "statistical"
    assert any("every doubling of the period" in line for line in told["assumptions"])
    assert told["link"][-1].startswith("So: ")
    ran = place.shoal(
        "simulate", "gpt2:medium", "-c", "dgx-a100", "--strategy", family["strategy"], "--batch", "64", "--json"
    )
    found = json.loads(ran.stdout)
    assert found["undisturbed_s"] == pytest.approx(family["step_s"], rel=1e-6)


def test_energy_and_its_price_stand_in_table_json_and_page(place: Place) -> None:
    words = ("plan", "gpt2:medium", "-c", "dgx-a100", "-n", "8", "--watts", "500", "--kwh-price", "0.3", "--top", "2")
    table = place.shoal(*words).stdout
    assert "energy" in table
    assert "500 W a device (--watts)" in table
    told = json.loads(place.shoal(*words, "--json", "--html", "plan.html").stdout)
    first = told["plans"][0]
    assert first["energy_kwh"] == pytest.approx(first["device_hours"] * 0.5)
    assert first["cost"] == pytest.approx(0.3 * first["energy_kwh"])
    assert first["cost_in"] == "money"
    assert first["energy"] in table
    assert first["energy"] in (place.folder / "plan.html").read_text(encoding="utf-8")


def test_pilot_runs_decide_the_steps_to_target(place: Place) -> None:
    """The example of docs/plan.md."""
    rows = "batch,steps,compress\n16,4100,\n32,2600,\n64,1850,\n32,2860,topk(0.01)\n"
    (place.folder / "runs.csv").write_text(rows, encoding="utf-8")
    words = ("plan", "gpt2:medium", "-c", "cloud-10gbe", "-n", "8", "--batch", "64", "--json")
    told = json.loads(place.shoal(*words, "--pilot", "runs.csv").stdout)
    dense = next(row for row in told["plans"] + told["families"] if "compress" not in row["strategy"])
    assert dense["steps_to_target"] == pytest.approx(1850, rel=0.02)
    assert any(line.startswith("samples: pilot: 3 runs of batches 16 to 64") for line in told["assumptions"])
    assert any("topk(0.01) 1.1" in line for line in told["assumptions"])


def test_a_narrow_terminal_shows_whole_figures_and_whole_strategies(place: Place) -> None:
    told = json.loads(place.shoal("plan", "gpt:13b", "-c", "dgx-a100", "-n", "32", "--json").stdout)
    program = "import os; os.environ['COLUMNS'] = '60'; from shoal.cli.main import run; run()"
    lines = place.run("-c", program, "plan", "gpt:13b", "-c", "dgx-a100", "-n", "32").stdout.splitlines()
    for row in told["plans"]:
        at = next(number for number, line in enumerate(lines) if line.strip() == row["strategy"])
        assert row["step"] in lines[at - 1]
        assert row["memory"] in lines[at - 1]


def test_a_cluster_file_is_planned_on(place: Place) -> None:
    levels = "".join(f"[[level]]\nranks = {ranks}\ngb_per_s = {rate}\n" for ranks, rate in ((4, 300), (2, 3)))
    file = f'name = "ours"\ndevice = "A100 SXM4 80GB"\n{levels}'
    (place.folder / "ours.toml").write_text(file, encoding="utf-8")
    done = place.shoal("plan", "gpt2:medium", "-c", "ours.toml", "--batch", "131072 tokens", "--json")
    told = json.loads(done.stdout)
    assert told["cluster"]["devices"] == 8
    assert told["global_batch"] == 128


def test_a_job_that_is_a_transformer_is_planned_and_one_that_is_none_is_refused(place: Place) -> None:
    done = place.shoal("plan", "language:tiny", "-c", "dgx-a100", "-n", "2", "--json")
    told = json.loads(done.stdout)
    assert any(row["family"] == "tp" for row in told["families"])
    refused = place.shoal("plan", "image:vgg:tiny", "-c", "dgx-a100", "-n", "2")
    assert refused.returncode == 2
    assert "cannot be estimated as a transformer" in refused.stderr


def test_run_trains_by_the_best_plan(place: Place) -> None:
    cpu = "[device]\npeak_tflops = {fp32 = 0.1}\nmemory_gb = 8\nmemory_gb_s = 10\n[[level]]\nranks = 2\ngb_per_s = 2\n"
    (place.folder / "two.toml").write_text(cpu, encoding="utf-8")
    job = "from shoal.job.tasks.language import language\njob = language('tiny', steps=4)\n"
    (place.folder / "short.py").write_text(job, encoding="utf-8")
    done = place.shoal("plan", "short.py", "-c", "two.toml", "--run", timeout_s=110)
    assert done.returncode == 0, done.stderr
    assert "Training by" in done.stdout
    assert len(list((place.folder / "runs").glob("*/run.json"))) == 1


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_run_keeps_the_batch_and_prints_one_object_and_may_share_cores(place: Place) -> None:
    cpu = "[device]\npeak_tflops = {fp32 = 0.1}\nmemory_gb = 8\nmemory_gb_s = 10\n[[level]]\nranks = 4\ngb_per_s = 2\n"
    (place.folder / "four.toml").write_text(cpu, encoding="utf-8")
    job = "from shoal.job.tasks.language import language\njob = language('tiny', steps=3)\n"
    (place.folder / "short.py").write_text(job, encoding="utf-8")
    program = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from shoal.cli.main import run; run()"
    )
    words = ("plan", "short.py", "-c", "four.toml", "--run", "--batch", "16", "--json")
    done = place.run("-c", program, *words, timeout_s=180)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["status"] == "finished"
    assert outcome["world"] == 4
    assert "4 ranks share 1 cores here" in done.stderr
    run = json.loads(next((place.folder / "runs").glob("*/run.json")).read_text(encoding="utf-8"))
    assert run["arguments"]["global_batch"] == 16


def test_a_plan_in_a_process_that_goes_on_leaves_its_garbage_collector_on(shoal: Shoal) -> None:
    assert shoal("plan", "gpt:1.3b", "-c", "dgx-a100", "-n", "8", "--json").status == 0
    assert gc.isenabled()

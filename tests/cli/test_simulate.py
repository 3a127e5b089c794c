"""`shoal simulate`: what it says, what it draws, and what it refuses."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from cli.command import Place

PIPELINE = 'pp(4, micro=8) * dp(2, zero=1) * tp(2) * amp("bf16")'


def test_it_plays_a_strategy_and_draws_it(place: Place) -> None:
    done = place.shoal(
        "simulate",
        "gpt:1.3b",
        "-s",
        PIPELINE,
        "-c",
        "dgx-a100",
        "--straggler",
        "rank 3: 2x",
        "--noise",
        "0.01",
        "--steps",
        "3",
        "--perfetto",
        "trace.json",
        "--svg",
        "timeline.svg",
        "--json",
    )
    told = json.loads(done.stdout)
    assert told["ranks"] == 16
    assert len(told["step_s"]) == 3
    assert min(told["step_s"]) > 1.2 * told["undisturbed_s"]
    assert told["undisturbed_s"] == pytest.approx(told["price_s"], rel=0.01)
    assert 0.9 < told["goodput"]["part"] < 1
    events = json.loads((place.folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    ElementTree.fromstring((place.folder / "timeline.svg").read_text(encoding="utf-8"))


def test_sixteen_thousand_ranks_answer_without_torch(place: Place) -> None:
    strategy = 'pp(64, micro=128) * dp(32, zero=1) * tp(8, sequence=True) * amp("bf16")'
    script = "import sys\nfrom shoal.cli.main import run\ntry:\n    run()\nfinally:\n    print('torch' in sys.modules)"
    done = place.run("-c", script, "simulate", "gpt:1t", "-s", strategy, "-c", "dgx-a100")
    assert "16,384 ranks" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("-s", "tp(3)"), "do not divide by 3"),
        (("-s", "spatial(2)"), "no image planes"),
        (("-s", "dp(2, compress=threshold(0.01))"), "there is no estimate"),
        (("-s", PIPELINE, "-n", "32"), "needs 16 ranks"),
        (("-s", PIPELINE, "--straggler", "rank 17: 2x"), "ranks 0 to 15"),
        (("-s", PIPELINE, "--straggler", "many"), "expected who and how much"),
        (("-s", PIPELINE, "--straggler", "all: 20 ms"), "give a factor"),
        (("-s", PIPELINE, "--link", "many"), "expected RANK:NUMBER"),
        (("-s", PIPELINE, "--link", "1:0"), "expected a part above 0"),
        (("-s", PIPELINE, "--mtbf-hours", "0"), "expected hours above 0"),
        (("-s", PIPELINE, "--svg", "no/such/folder.svg"), "--svg"),
    ],
)
def test_what_cannot_be_played_is_refused_in_a_sentence(words: tuple[str, ...], expected: str, place: Place) -> None:
    done = place.shoal("simulate", "gpt:1.3b", "-c", "dgx-a100", *words)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr

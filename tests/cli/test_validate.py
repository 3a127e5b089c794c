"""`shoal validate`: a table, JSON, predictions as a file; bad files in a sentence; no torch."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

from cli.command import Place
from cli.conftest import Shoal

MODEL = "layers,hidden,heads,seq,vocab"
HEADER = f"id,source,group,{MODEL},gpu,gpus,tp,dp,micro_batch,global_batch,step_s,memory_gib,status,assumed"
FILE = f"""{HEADER}
a,one,g,24,2048,16,1024,51200,A100 SXM4 80GB,8,1,8,4,64,1.0,20,ok,
b,one,g,24,2048,16,1024,51200,A100 SXM4 80GB,8,2,4,4,64,1.2,15,ok,
c,one,g,24,2048,16,1024,51200,abacus,8,4,2,4,64,1.9,12,ok,
"""


def written(folder: Path, text: str = FILE) -> str:
    path = folder / "rows.csv"
    path.write_text(text)
    return str(path)


def test_it_prints_a_table_and_names_rows_without_a_prediction(shoal: Shoal, tmp_path: Path) -> None:
    done = shoal("validate", written(tmp_path))
    assert done.status == 0
    assert "MAPE" in done.out
    assert "one" in done.out
    assert "1 of 3 rows cannot be predicted" in done.err
    assert "c: no device is called 'abacus'" in done.err


def test_json_has_scores_and_rows_without_a_prediction(shoal: Shoal, tmp_path: Path) -> None:
    told = json.loads(shoal("validate", written(tmp_path), "--json").out)
    assert told["scores"]["one"]["n"] == 2
    assert told["scores"]["one"]["coverage"] == 0.667
    assert [each["id"] for each in told["not_predicted"]] == ["c"]


def test_predictions_are_written_for_every_row(shoal: Shoal, tmp_path: Path) -> None:
    shoal("validate", written(tmp_path), "--predictions", "out.csv")
    with open(tmp_path / "out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == ["a", "b", "c"]
    assert float(rows[0]["step_s"]) > 0
    assert rows[0]["fits"] == "1"
    assert rows[2]["step_s"] == rows[2]["fits"] == ""


def test_bad_files_are_refused_in_a_sentence(shoal: Shoal, tmp_path: Path) -> None:
    assert "No such file" in shoal("validate", "none.csv").err
    for text, told in (("id,layers\na,3\n", "lacks the columns hidden"), (HEADER + "\n", "has no rows")):
        done = shoal("validate", written(tmp_path, text))
        assert done.status == 2
        assert told in done.err
        assert done.err.count("\n") == 1


def test_it_needs_no_torch(place: Place, tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['shoal', 'validate', sys.argv[1]]\nfrom shoal.cli.main import run\n"
        "try: run()\nfinally: print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, written(tmp_path)],
        env=place.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines()[-1] == "False", done.stderr

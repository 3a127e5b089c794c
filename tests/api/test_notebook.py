"""The notebook of the examples runs from its first cell to its last, with ranks that are forks of its kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


@pytest.mark.slow
@pytest.mark.processes
def test_the_notebook_verifies_plans_trains_and_predicts(tmp_path: Path) -> None:
    pytest.importorskip("nbconvert", reason="nbconvert is not installed: pip install 'shoal[notebooks]'")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install 'shoal[notebooks]'")
    words = ["--to", "notebook", "--execute", "--ExecutePreprocessor.timeout=100", "--output-dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "nbconvert", *words, "--output", "done", str(NOTEBOOK)],
        capture_output=True,
        text=True,
        timeout=115,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    cells = [cell for cell in json.loads((tmp_path / "done.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]
    printed = []
    for cell in cells:
        texts = [output.get("text", output.get("data", {}).get("text/plain", [])) for output in cell["outputs"]]
        printed.append("".join(line for text in texts for line in text))
    assert printed[1].startswith("PASSED: notebook under dp(2, zero=3) on 2 ranks")
    assert "validation accuracy" in printed[-1]

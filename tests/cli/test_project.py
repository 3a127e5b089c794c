"""The files by which others join the project hold what they name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "AGENTS.md", ".github/pull_request_template.md"]


@pytest.mark.parametrize("page", PAGES)
def test_links_paths_and_targets_of_the_projects_files_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", text):
        assert (ROOT / target).exists(), target
    for path in re.findall(r"`((?:src|tests|docs|benchmarks)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"make ([a-z-]+)[`\s]", text)) <= targets | {"lint"}


def test_workflows_and_forms_are_yaml_and_run_what_the_makefile_has() -> None:
    yaml = pytest.importorskip("yaml")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    workflow: Any = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 360, name
        for step in job["steps"]:
            for made in re.findall(r"make ([\w -]+)", step.get("run", "")):
                assert {word for word in made.split() if "=" not in word} <= targets | {"PYTHON"}, step
    for form in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        assert yaml.safe_load(form.read_text())
    for hook in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]:
        assert hook["entry"].startswith(".venv/bin/")


def test_the_site_names_pages_that_exist() -> None:
    listed = set(re.findall(r"- ([\w-]+\.md)", (ROOT / "mkdocs.yml").read_text()))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert listed - pages == {"changelog.md", "reference-of-functions.md"}  # Made by docs/site/hooks.py.


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    import subprocess
    import sys

    pytest.importorskip("mkdocstrings")
    words = ["-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    pages = "".join(path.read_text() for path in (tmp_path / "site").rglob("*.html"))
    assert "train_job" in pages
    assert not re.findall(r'src="https?://|<link[^>]*rel="stylesheet"[^>]*href="https?://', pages)

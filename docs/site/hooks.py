"""The site has what lies outside of docs too: the README as its first page, the changelog, examples, and the functions
of `import shoal` from their docstrings. Links are written for reading in the repository; here they are turned."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}
BEHIND = {
    "train": "shoal.training.local.train_job",
    "verify": "shoal.proof.certify.verify",
    "load_run": "shoal.training.record.run.read_run",
}
"""Functions that are wrapped where they are offered."""


def on_config(config: Any) -> Any:
    """Pages that mkdocs.yml does not name come last."""
    named = set(re.findall(r"[\w-]+\.md", str(config["nav"])))
    others = sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name not in named)
    if others:
        config["nav"].append({"More": others})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that lie elsewhere."""
    for page, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_from_root(text)))
    for example in sorted((ROOT / "examples").glob("*.py")):
        text = f"# {example.name}\n\n```python\n{example.read_text(encoding='utf-8')}```\n"
        files.append(File.generated(config, f"examples/{example.stem}.md", content=text))
    for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
        files.append(File.generated(config, f"examples/{notebook.stem}.md", content=_of_notebook(notebook)))
    files.append(File.generated(config, "reference-of-functions.md", content=_reference()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links to examples and to the README."""
    markdown = re.sub(r"\]\(\.\./examples/(\w+)\.(?:py|ipynb)\)", r"](examples/\1.md)", markdown)
    return re.sub(r"\]\(\.\./README\.md(#[\w-]+)?\)", r"](index.md\1)", markdown)


def _from_root(text: str) -> str:
    text = re.sub(r"\]\(docs/", "](", text)
    text = re.sub(r"\]\(examples/(\w+)\.(?:py|ipynb)\)", r"](examples/\1.md)", text)
    text = text.replace("](CONTRIBUTING.md)", "](contributing.md)").replace("](CHANGELOG.md)", "](changelog.md)")
    return text.replace("](SECURITY.md)", "](security.md)")


def _of_notebook(path: Path) -> str:
    """Its cells in their order, without what they printed."""
    parts = [f"# {path.name}"]
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        code = cell["cell_type"] == "code"
        parts.append(f"```python\n{text}\n```" if code else re.sub(r"^#", "##", text, flags=re.M))
    return "\n\n".join(parts) + "\n"


def _reference() -> str:
    names = dict(re.findall(r'^    "(\w+)": "(shoal[\w.]*:\w+)",$', (ROOT / "src/shoal/__init__.py").read_text(), re.M))
    lines = ["# Which functions and classes does `import shoal` offer?", ""]
    for name in sorted(set(names) - {"train_job"}, key=str.lower):
        path = BEHIND.get(name, names[name].replace(":", "."))
        lines += [f"::: {path}", "    options:", f"      heading: shoal.{name}", f"      toc_label: {name}", ""]
    return "\n".join(lines)

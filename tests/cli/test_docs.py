"""The documentation mentions nothing that the code does not have: commands parse, strategies are legal, paths exist.

Nothing is run. A command is a line of a code block, or inline code, that begins with `shoal`, `python benchmarks/` or
`torchrun`; what follows `#` is a comment. A line with [brackets] or CAPITALS is a synopsis: only its verb and its
options are checked.
"""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from shoal.cli.main import app
from shoal.strategy import parse, require_legal
from shoal.strategy.terms import REGISTRY

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "shoal"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROOMS = sorted(folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists())
AXES = r"(?:dp|pp|tp|cp|ep|spatial|ensemble|recompute|amp|offload|accumulate)\("
ELSEWHERE = {
    "mine.py",
    "gpt.py",
    "mixtral.py",
    "script.py",
    "bf16_optimizer.py",
    "modeling_llama.py",
    "zero_to_fp32.py",
}
"""Files of the reader's, and of other projects."""

all_pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def code_lines(text: str) -> list[str]:
    """Lines of code blocks, continuation lines joined."""
    lines, fenced = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            lines.append(line.strip())
    return re.sub(r"\\\n|\n(?=\[)", " ", "\n".join(lines)).split("\n")


def inline_code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"^(    .*|```[\s\S]*?^```)$", "", text, flags=re.MULTILINE))


def commands(text: str, program: str) -> list[str]:
    """Commands of a program on a page, without what stands before its name."""
    found = []
    for line in [*code_lines(text), *inline_code(text)]:
        for part in line.split(" && "):
            begun = re.match(rf"(?:\$ )?(?:torchrun .* -m |srun torchrun .* -m )?({program}.*)", part)
            if begun:
                found.append(begun.group(1))
    return found


def in_sections(text: str) -> list[tuple[str, str]]:
    """Paragraphs with the heading they stand under."""
    heading, found = "", []
    for paragraph in re.split(r"\n\s*\n|\n(?=- )", text):
        if paragraph.lstrip().startswith("#"):
            heading = paragraph
        found.append((heading, paragraph))
    return found


def strategies_of(words: list[str]) -> list[str]:
    named = [words[at + 1] for at, word in enumerate(words[:-1]) if word in ("--strategy", "-s")]
    return named + [word for word in words if re.match(AXES, word) and word not in named]


@all_pages
def test_every_command_of_the_documentation_parses(page: Path) -> None:
    verbs: Any = typer.main.get_command(app)
    for line in commands(page.read_text(encoding="utf-8"), r"shoal (?=[a-z])"):
        words = shlex.split(re.sub(r"[\[\]]| \$\w+$", " ", line), comments=True)[1:]
        verb, *rest = words
        assert verb in verbs.commands, line
        if "--" in rest:  # What follows are options of `shoal train`.
            place = rest.index("--")
            of_train = {name for each in verbs.commands["train"].params for name in each.opts}
            assert {word for word in rest[place + 1 :] if word.startswith("-")} <= of_train, line
            rest = rest[:place]
        options = {name for each in verbs.commands[verb].params for name in (*each.opts, *each.secondary_opts)}
        used = {word.partition("=")[0] for word in rest if re.fullmatch(r"--?[a-z].*", word)}
        assert used <= options | {"--help"}, line
        synopsis = "[" in re.sub(r"'[^']*'|\"[^\"]*\"", "", line) or any(
            re.fullmatch(r"[A-Z|.a-z]*[A-Z]{2,}[A-Z|.]*|[A-Z]|S|\.\.\.", word) for word in rest
        )
        # A --config file is the reader's, and opened while the command is parsed.
        if not synopsis and rest and not {"--help", "--config"} & set(rest):
            verbs.commands[verb].make_context(verb, rest)
            for text in strategies_of(rest):
                require_legal(parse(text))


@all_pages
def test_every_benchmark_of_the_documentation_exists_with_its_options(page: Path) -> None:
    for line in commands(page.read_text(encoding="utf-8"), r"(?:python )?benchmarks/\w+\.py"):
        words = [word for word in shlex.split(line, comments=True) if word != "python"]
        script = (ROOT / words[0]).read_text(encoding="utf-8")
        for option in (word for word in words if word.startswith("--")):
            assert f'"{option}"' in script, line


@all_pages
def test_every_strategy_of_the_documentation_is_legal_unless_the_text_says_refused(page: Path) -> None:
    for heading, paragraph in in_sections(page.read_text(encoding="utf-8")):
        for text in inline_code(paragraph):
            if not re.match(AXES, text) or re.search(r"\.\.|=[,)]|\): | or | \| ", text):
                continue  # A template such as dp(n, zero=), or a message.
            names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
            if not names <= set(REGISTRY):
                continue  # A template such as dp(n, zero=3).
            strategy = parse(text)
            if "refuse" not in heading + paragraph:
                require_legal(strategy)


@all_pages
def test_every_path_and_link_of_the_documentation_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    rooms = "|".join(ROOMS)
    for path in re.findall(r"(?<![\w/.$~-])(?:src|tests|benchmarks|docs|examples)/[\w./*-]*\w", text):
        assert list(ROOT.glob(path)), path
    for path in re.findall(rf"`((?:{rooms})/[\w./-]*)`", text):
        assert (PACKAGE / path).exists(), path
    for name in re.findall(r"`(\w+\.py)`", text):
        assert name in ELSEWHERE or list(ROOT.rglob(f"src/**/{name}")), name
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        linked = page.parent / file if file else page
        assert linked.exists(), target
        headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        anchors = [re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings]
        assert not anchor or anchor in anchors, target


@all_pages
def test_every_name_of_the_package_in_the_documentation_exists(page: Path) -> None:
    for dotted in re.findall(r"`(shoal(?:\.\w+)+)", page.read_text(encoding="utf-8")):
        parts = dotted.split(".")[1:]
        place = PACKAGE
        while parts and ((place / parts[0]).is_dir() or (place / f"{parts[0]}.py").exists()):
            place = place / parts.pop(0)
        module = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        known = re.findall(r"\w+", module.read_text(encoding="utf-8"))
        assert not parts or parts[0] in known, dotted


@all_pages
def test_python_in_the_documentation_compiles(page: Path) -> None:
    for block in re.findall(r"```python\n([\s\S]*?)```", page.read_text(encoding="utf-8")):
        compile(block, page.name, "exec")

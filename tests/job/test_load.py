"""Loading a job by name or from a file, and what a person is told when that fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.job import Job, JobError, load_job
from shoal.job.names import JobName, all_words, is_file, parse_name, split_file

JOB = """
from functools import partial
import torch
from shoal.job import Job, TensorData, cross_entropy

def make(name="mine"):
    data = TensorData(x=torch.zeros(4, 2), y=torch.zeros(4, dtype=torch.long))
    return Job(name=name, model=partial(torch.nn.Linear, 2, 2), train=data,
               loss=cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.1), global_batch=2, steps=1)
"""


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("spec", "size", "expected"),
    [
        ("language", None, "language:gpt:tiny"),
        ("image", "small", "image:vgg:small"),
        ("language:tiny", "small", "language:gpt:tiny"),
        ("image:resnet", None, "image:resnet:tiny"),
        ("image:small:resnet", None, "image:resnet:small"),
        ("small:resnet:image", None, "image:resnet:small"),
        ("image:resnet:resnet", None, "image:resnet:tiny"),
        ("Language:GPT2-Medium", None, "language:gpt:gpt2-medium"),
        ("image:vgg16", None, "image:vgg:vgg16"),
        ("resnet50", None, "image:resnet:resnet50"),
        ("image", "resnet50", "image:resnet:resnet50"),
    ],
)
def test_parts_of_a_name_stand_in_any_order(spec: str, size: str | None, expected: str) -> None:
    name = parse_name(spec, size=size)
    assert isinstance(name, JobName)
    assert str(name) == expected


@pytest.mark.parametrize(
    ("spec", "size", "told"),
    [
        ("langage", None, r"unknown job 'langage'.*Did you mean 'language'\?"),
        ("image:resnt", None, r"'resnt' in 'image:resnt'.*Did you mean 'resnet'\?"),
        ("language", "smal", r"unknown size 'smal'.*tiny, small, gpt2-medium.*Did you mean 'small'\?"),
        ("language:resnet", None, "two different tasks, 'language' and 'image'"),
        ("image:resnet:vgg16", None, "two different networks"),
        ("image:tiny:small", None, "two different sizes"),
        ("image:vgg", "resnet50", "'resnet'.*'vgg'"),
        ("tiny", None, "names no task.*language:tiny"),
        ("language:", None, "unknown job ''"),
        ("", None, "no job was named"),
        ("   ", None, "no job was named"),
        ("größe:🐟", None, "unknown job"),
    ],
)
def test_a_wrong_name_is_answered_with_the_valid_ones(spec: str, size: str | None, told: str) -> None:
    with pytest.raises(JobError, match=told):
        load_job(spec, size=size)


def test_files_are_told_from_names_and_split_from_what_they_define() -> None:
    assert is_file("gpt.py")
    assert is_file("a/b.py:c")
    assert is_file("./gpt")
    assert not is_file("image:resnet")
    assert split_file("gpt.py:mine") == ("gpt.py", "mine")
    assert split_file(r"C:\jobs\gpt.py") == (r"C:\jobs\gpt.py", None)
    assert split_file(r"C:\jobs\gpt.py:big") == (r"C:\jobs\gpt.py", "big")


@pytest.mark.processes
def test_names_are_known_without_importing_torch() -> None:
    code = (
        "import sys, shoal.job.names as n; assert n.parse_name('image'); "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    assert len(set(all_words())) == len(all_words())


@pytest.mark.parametrize("name", ["language", "image", "image:resnet"])
def test_built_in_jobs_load(name: str) -> None:
    assert load_job(name).name.startswith(name.split(":")[0])


def test_a_file_may_define_a_job_a_function_or_several(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "jobs.py",
        JOB + "job = make()\nother = make('other')\ndef lazily() -> Job:\n    return make('lazily')\n",
    )
    assert load_job(path).name == "mine"
    assert load_job(f"{path}:other").name == "other"
    assert load_job(f"{path}:lazily").name == "lazily"


def test_a_file_may_import_its_neighbours_and_leaves_the_path_as_it_was(tmp_path: Path) -> None:
    write(tmp_path, "my_neighbour_module.py", "NAME = 'from next door'")
    path = write(
        tmp_path,
        "jöb ü.py",
        JOB + "def job():\n    import my_neighbour_module\n    return make(my_neighbour_module.NAME)\n",
    )
    before = list(sys.path)
    assert load_job(path).name == "from next door"
    assert sys.path == before


def test_a_file_is_read_anew_each_time(tmp_path: Path) -> None:
    path = write(tmp_path, "again.py", JOB + "job = make('one')")
    assert load_job(path).name == "one"
    write(tmp_path, "again.py", JOB + "job = make('another')")
    assert load_job(path).name == "another"


def test_a_file_may_define_dataclasses_with_postponed_annotations(tmp_path: Path) -> None:
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass C:\n    n: int = 1\n" + JOB
    )
    assert isinstance(load_job(write(tmp_path, "typed.py", text + "job = make()")), Job)


def test_a_missing_file_is_answered_with_the_nearest_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "transformer.py", JOB)
    with pytest.raises(JobError, match=r"there is no file .*transfomer\.py\. Did you mean .*transformer\.py\?"):
        load_job(str(tmp_path / "transfomer.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobError, match=r"Did you mean .*transformer\.py\?"):
        load_job("nowhere/transformer.py")
    with pytest.raises(JobError, match=r"There is: .*transformer\.py"):
        load_job("zzz.py")
    with pytest.raises(JobError, match="is a folder"):
        load_job(str(tmp_path) + "/")


def test_a_file_that_is_not_python_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "job.toml", "")
    with pytest.raises(JobError, match="not a Python file"):
        load_job(str(tmp_path / "job.toml"))


def test_a_file_without_a_job_is_told_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"does not define 'job'; write job = Job\(\.\.\.\)"):
        load_job(write(tmp_path, "empty.py", ""))
    with pytest.raises(JobError, match=r"does define mine: load named\.py:mine"):
        load_job(write(tmp_path, "named.py", JOB + "mine = make()"))
    with pytest.raises(JobError, match=r"does not define 'mak'.*Did you mean 'make'"):
        load_job(write(tmp_path, "near.py", JOB) + ":mak")


@pytest.mark.parametrize("text", ["job = 3", "job = None", "def job(): return 'no'", "class job: pass"])
def test_something_else_than_a_job_is_refused_with_its_type(tmp_path: Path, text: str) -> None:
    with pytest.raises(JobError, match=r"is a (int|NoneType|str|type), but must be a Job"):
        load_job(write(tmp_path, "wrong.py", text))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1\ny = x / 0\n", r"bad\.py:2: loading it raised ZeroDivisionError.*\n    y = x / 0"),
        (
            "x = 1\nimport nothing_of_that_name\n",
            r"bad\.py:2: loading it raised ModuleNotFoundError.*nothing_of_that_name",
        ),
        ("x = 1\n\ndef broken(:\n", r"bad\.py:3: loading it raised SyntaxError"),
        (
            "def job():\n    return [][1]\n",
            r"bad\.py:2: calling job\(\) raised IndexError.*\n    return \[\]\[1\]",
        ),
        ("raise SystemExit(3)\n", r"bad\.py:1: loading it raised SystemExit: 3"),
        (
            "import json\n\njson.loads('{')\n",
            r"bad\.py:3: loading it raised JSONDecodeError.*\n    json\.loads",
        ),
        ("def job(size):\n    return 1\n", r"calling job\(\) raised TypeError"),
    ],
)
def test_what_a_file_raises_is_told_with_the_line_of_the_file(tmp_path: Path, text: str, told: str) -> None:
    before = list(sys.path), set(sys.modules)
    with pytest.raises(JobError, match=told):
        load_job(write(tmp_path, "bad.py", text))
    assert sys.path == before[0]
    if "def job" not in text:
        assert not {name for name in set(sys.modules) - before[1] if name.startswith("_shoal_job_bad")}


def test_a_job_that_is_refused_in_a_file_is_told_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"file\.py:\d+: .*name is empty"):
        load_job(write(tmp_path, "file.py", JOB + "job = make('')"))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("Job(name='x', batch_size=3)", r"'batch_size'\. Did you mean 'global_batch'\? A Job has name, model, train"),
        ("Job(name='x', stepps=3)", r"'stepps'\. Did you mean 'steps'\? A Job has name"),
        (
            "replace(make('x'), optimizer=torch.optim.SGD([torch.zeros(1)], lr=0.1))",
            r"optimizer is an optimiser \(SGD\), but must be a function .* write optimizer=lambda groups: SGD\(groups",
        ),
        ("replace(make('x'), loss=[0.123456789] * 40)", r"loss is a list, but must be a function"),
    ],
)
def test_a_wrong_field_is_answered_with_the_right_one(tmp_path: Path, line: str, told: str) -> None:
    text = JOB + f"from dataclasses import replace\nimport torch\nfrom shoal.job import Job\njob = {line}\n"
    with pytest.raises(JobError, match=told):
        load_job(write(tmp_path, "file.py", text))


def test_a_size_does_not_go_with_a_file(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="sizes belong to the built-in jobs"):
        load_job(write(tmp_path, "sized.py", JOB + "job = make()"), size="small")


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.processes
def test_built_in_jobs_do_not_need_transformers_and_its_absence_is_told() -> None:
    hidden = "import sys; sys.modules['transformers'] = None; import shoal.job; "
    assert run_python(hidden + "shoal.job.load_job('language')").returncode == 0
    answer = run_python(hidden + "shoal.job.from_transformers")
    assert answer.returncode == 1
    assert "pip install 'shoal[transformers]'" in answer.stderr


def test_every_public_name_is_there_and_no_other() -> None:
    import shoal.job

    for name in shoal.job.__all__:
        if name != "from_transformers":
            assert getattr(shoal.job, name) is not None
    assert set(shoal.job.__all__) == set(shoal.job._HOME) == set(dir(shoal.job))
    with pytest.raises(AttributeError, match="no attribute 'Jobs'"):
        _ = shoal.job.Jobs

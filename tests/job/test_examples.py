"""The example files are jobs that load, learn, and stay short enough to copy."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.job import load_job, param_groups

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "gpt.py",
        "image.py",
        "huggingface.py",
        "huggingface.py:vit",
        "pipeline.py",
        "tensor.py",
        "context.py",
        "moe.py",
    ],
)
def test_an_example_loads_and_its_loss_falls(name: str) -> None:
    if "huggingface" in name or "context" in name:
        pytest.importorskip("transformers")
    job = load_job(str(EXAMPLES / name))
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer = job.optimizer(param_groups(model, job.options))
    order, counter, losses = job.order(), 0, []
    for _ in range(40):
        batch = job.train.batch(order.indices(counter))
        counter = order.next(counter)
        total, count = job.loss(job.run_model(model, batch), batch)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float((total / count).detach()))
    assert np.mean(losses[-3:]) < 0.97 * losses[0]
    assert job.validation is not None
    assert set(job.measure(job.run_model(model, batch), batch))


COMMAND = re.compile(r'^shoal (train|verify) examples/(\S+) --strategy "(.+?)"', re.MULTILINE)


@pytest.mark.long
@pytest.mark.parametrize("name", ["pipeline.py", "tensor.py", "context.py", "moe.py"])
def test_the_strategies_that_an_example_names_are_legal_and_can_be_trained(name: str) -> None:
    if name == "context.py":
        pytest.importorskip("transformers")
    from shoal.layout.layout import facts_of, layout_of
    from shoal.parallel.runnable import require_runnable
    from shoal.strategy import check, parse

    path = EXAMPLES / name
    commands = COMMAND.findall(path.read_text(encoding="utf-8"))
    assert commands
    job = load_job(str(path))
    for _, named, text in commands:
        assert named == name
        strategy = parse(text)
        require_runnable(strategy)
        assert check(strategy, facts=facts_of(job, layout_of(job, strategy))) == ()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_enough_to_copy(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 120

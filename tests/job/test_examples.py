"""The example files are jobs that load, learn, and stay short enough to copy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.job import load_job, param_groups

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("name", ["gpt.py", "image.py", "huggingface.py", "huggingface.py:vit"])
def test_an_example_loads_and_its_loss_falls(name: str) -> None:
    if "huggingface" in name:
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


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_enough_to_copy(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 120

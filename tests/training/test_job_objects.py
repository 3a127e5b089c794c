"""A Job object, as a notebook defines it, is verified, trained and comes out, without a file."""

from __future__ import annotations

import subprocess
import sys

import pytest

NOTEBOOK = """
import sys, threading, torch
from torch import nn
import shoal

torch.set_num_threads(2)
(torch.randn(300, 300, requires_grad=True) @ torch.randn(300, 300)).sum().backward()   # Threads of the caller.
threading.Thread(target=threading.Event().wait, daemon=True).start()

class Net(nn.Module):                      # In no file that a rank could import.
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 3)
    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))

from shoal.job import TensorData
torch.manual_seed(5)
x = torch.randn(40, 6); y = torch.randint(0, 3, (40,))
job = shoal.Job(
    name="cell", model=Net, train=TensorData(x=x, y=y),
    loss=lambda output, batch: (nn.functional.cross_entropy(output, batch["y"], reduction="sum"), len(output)),
    optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), global_batch=8, steps=4)
certificate = shoal.verify(job, "dp(2, zero=1)", steps=3)
assert certificate.passed, certificate
run = shoal.train(job, shoal.dp(2, zero=3), folder=sys.argv[1])
model = run.model()

torch.manual_seed(0)                       # The same in plain PyTorch.
plain = Net()
optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
order = job.order()
for step in range(4):
    indices = torch.as_tensor(order.indices(8 * step))
    optimizer.zero_grad()
    nn.functional.cross_entropy(plain(x[indices]), y[indices]).backward()
    optimizer.step()
for mine, other in zip(model.parameters(), plain.parameters()):
    assert torch.allclose(mine, other, atol=1e-6), (mine - other).abs().max()
again = shoal.train(job, "tp(2)", folder=sys.argv[1] + "-tp")
assert abs(again.losses[-1] - run.losses[-1]) < 1e-5
print("equal")
"""


@pytest.mark.processes
def test_a_job_object_trains_as_plain_pytorch_does_and_gives_its_model(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-", str(tmp_path / "run")],
        input=NOTEBOOK,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("equal")


def test_what_is_no_job_is_refused() -> None:
    from shoal import train
    from shoal.training.resumed import CannotTrain

    with pytest.raises(CannotTrain, match=r"train_job was given a dict; give a shoal\.Job, the file"):
        train({"model": None}, "dp(2)")  # type: ignore[arg-type]

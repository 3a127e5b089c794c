"""Pretrained weights trained under any strategy are those of plain PyTorch, and come out as they went in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.api.export import export
from shoal.job import from_transformers, start_from
from shoal.training.local import train_job
from shoal.training.record.run import read_run

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

JOB = """
import torch
from transformers import LlamaConfig
from shoal.job import from_transformers
pretrained = from_transformers({folder!r}, sequence=16, global_batch=8, steps=2)
other = from_transformers(LlamaConfig(**{config}), sequence=16, global_batch=8, steps=2)
"""
CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(21)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)  # A start that no seed gives.
    model.save_pretrained(place / "hf", max_shard_size="40KB")
    (place / "job.py").write_text(JOB.format(folder=str(place / "hf"), config=CONFIG))
    return place


@pytest.fixture(scope="module")
def plain(place: Path) -> tuple[list[float], Any]:
    """Losses of two steps in plain PyTorch, and the model after them."""
    job = from_transformers(place / "hf", sequence=16, global_batch=8, steps=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "hf", dtype=torch.float32).train()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], lr=1e-3
    )
    order, counter, losses = job.order(), 0, []
    for step in range(2):
        batch = job.train.batch(order.indices(counter))
        logits = model(input_ids=batch["x"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * job.lr_factor(step)
        optimizer.step()
        losses.append(float(loss))
        counter += 8
    return losses, model.eval()


MORE = ("dp(2)", "dp(2, zero=3) * tp(2)", "tp(2)", "cp(2)", "pp(2, '1f1b', micro=2)", "dp(2, zero=1) * accumulate(2)")
STRATEGIES = ["dp(2, zero=3)", *(pytest.param(each, marks=pytest.mark.slow) for each in MORE)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_pretrained_model_trains_as_in_plain_pytorch_and_comes_out(
    place: Path, plain: tuple[list[float], Any], strategy: str, tmp_path: Path
) -> None:
    run = train_job(f"{place / 'job.py'}:pretrained", strategy, folder=tmp_path / "run", gate=False)
    assert run.losses == pytest.approx(plain[0], rel=1e-5)
    export(tmp_path / "run", to="hf-folder", out=str(tmp_path / "out"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        before = transformers.AutoModelForCausalLM.from_pretrained(place / "hf").eval()(tokens).logits
        found, expected = loaded(tokens).logits, plain[1](tokens).logits
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(found, before, atol=1e-3)
    with torch.no_grad():
        assert torch.allclose(found, read_run(tmp_path / "run").model()(tokens).logits, atol=1e-6)


@pytest.mark.slow
def test_another_job_starts_from_an_export_and_resumes_without_it(place: Path, tmp_path: Path) -> None:
    job = f"{place / 'job.py'}:other"
    first = train_job(f"{place / 'job.py'}:pretrained", "dp(2)", folder=tmp_path / "a", gate=False)
    weights = Path(export(tmp_path / "a", to="dcp", out=str(tmp_path / "dcp")).path)
    options = {"start_from": str(weights), "checkpoint_every": 1}
    run = train_job(job, "dp(2, zero=3)", folder=tmp_path / "b", gate=False, **options)
    fresh = start_from(from_transformers(transformers.LlamaConfig(**CONFIG), sequence=16), weights).model()
    assert torch.equal(fresh.state_dict()["model.norm.weight"], first.model().state_dict()["model.norm.weight"])
    assert run.losses[0] < first.losses[0]
    weights.rename(tmp_path / "gone")
    again = train_job(job, "dp(2)", folder=tmp_path / "b", resume=str(tmp_path / "b"), steps=3, gate=False)
    assert len(again.losses) == 3
    assert read_run(tmp_path / "b").model() is not None


def fsdp_targets(arguments: dict[str, Any], channel: Any) -> None:
    """Two ranks that save a model of FSDP2, as a script of torchtitan's kind does."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    full = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = full[name].chunk(2)[torch.distributed.get_rank()]
            parameter.to_local().copy_(local)
    state = {"app": {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}}
    dcp.save(state, checkpoint_id=arguments["path"])
    if torch.distributed.get_rank() == 0:
        torch.save(full, arguments["full"])
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_a_checkpoint_that_fsdp2_ranks_have_written_is_a_start(tmp_path: Path) -> None:
    import subprocess
    import sys

    script = tmp_path / "save.py"
    script.write_text(
        "import sys\nfrom distributed.test_start_from import fsdp_targets\n"
        f"fsdp_targets({{'path': {str(tmp_path / 'dcp')!r}, 'full': {str(tmp_path / 'full.pt')!r}}}, None)\n"
    )
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        env={"PYTHONPATH": tests, "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    from shoal.job.weights.files import weight_files
    from shoal.job.weights.start import fill

    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    fill(model, weight_files(tmp_path / "dcp"))
    for name, values in torch.load(tmp_path / "full.pt", weights_only=True).items():
        assert torch.equal(model.state_dict()[name], values)

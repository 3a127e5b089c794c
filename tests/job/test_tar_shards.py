"""Samples of tar shards are those that were put in, wherever the shards lie."""

from __future__ import annotations

import io
import multiprocessing
import os
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.job import JobError, ShardCache, TarData

IMAGES = np.random.default_rng(0).normal(size=(7, 2, 3)).astype(np.float32)


def shard(path: Path, files: Iterable[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in files:
            about = tarfile.TarInfo(name)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
    return path


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for number, rows in enumerate((range(3), range(3, 7))):
        pairs = [((f"a/{row:05}.npy", npy(IMAGES[row])), (f"a/{row:05}.cls", b"%d" % row)) for row in rows]
        shard(tmp_path / f"t-{number}.tar", [file for pair in pairs for file in pair])
    return tmp_path


def test_batches_are_the_samples_in_the_order_of_the_shards(shards: Path) -> None:
    data = TarData(shards / "t-*.tar", x="npy", y="cls")
    assert len(data) == 7
    batch = data.batch(np.array([6, 0, 3]))
    assert batch["y"].tolist() == [6, 0, 3]
    assert torch.equal(batch["x"], torch.from_numpy(IMAGES[[6, 0, 3]]))
    empty = data.batch(np.array([], dtype=np.int64))
    assert empty["x"].shape == (0, 2, 3)
    doubled = TarData(shards / "t-0.tar", x="npy", decode={"npy": lambda content: torch.tensor(len(content))})
    assert doubled.batch(np.array([1]))["x"].tolist() == [len(npy(IMAGES[1]))]


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    data = TarData(shard(tmp_path / "t.tar", [("0.npy", npy(np.array([{}], dtype=object)))]), x="npy")
    with pytest.raises(JobError, match="entry x of sample 0 cannot be read"):
        data.batch(np.array([0]))


def test_what_is_no_shard_is_refused(tmp_path: Path, shards: Path) -> None:
    whole = (shards / "t-0.tar").read_bytes()
    cut = tmp_path / "cut.tar"
    cut.write_bytes(whole[: 512 + 60])
    with pytest.raises(JobError, match=r"cut off|not an uncompressed tar"):
        TarData(cut, x="npy")
    (tmp_path / "x.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(JobError, match="not an uncompressed tar file"):
        TarData(tmp_path / "x.tar", x="npy")
    with pytest.raises(JobError, match=r"sample a/00000 has no file \.json; it has cls, npy"):
        TarData(shards / "t-0.tar", x="json")
    with pytest.raises(JobError, match=r"cannot decode \.flac"):
        TarData(shards / "t-0.tar", x="flac")
    with pytest.raises(JobError, match="no file is called"):
        TarData(tmp_path / "none-*.tar", x="npy")
    with pytest.raises(JobError, match="name them"):
        TarData(shards / "t-0.tar")


def test_shards_of_different_shapes_are_named(tmp_path: Path) -> None:
    data = TarData(shard(tmp_path / "t.tar", [("0.npy", npy(IMAGES[0])), ("1.npy", npy(IMAGES[0, 0]))]), x="npy")
    with pytest.raises(JobError, match=r"entry x of samples \[0, 1\] cannot be joined"):
        data.batch(np.array([0, 1]))


class Counted:
    """A fetch that leaves a file for each call."""

    def __init__(self, notes: Path, delay_s: float = 0.0) -> None:
        self.notes, self.delay_s = notes, delay_s
        notes.mkdir(exist_ok=True)

    def __call__(self, url: str, to: Path) -> None:
        time.sleep(self.delay_s)
        (self.notes / f"{os.getpid()}-{time.monotonic_ns()}").touch()
        to.write_bytes(Path(url).read_bytes())

    def __len__(self) -> int:
        return len(list(self.notes.iterdir()))


def test_a_cache_fetches_once_and_makes_room(tmp_path: Path, shards: Path) -> None:
    fetch = Counted(tmp_path / "notes")
    urls = [str(shards / f"t-{number}.tar") for number in (0, 1)]
    largest = max(Path(url).stat().st_size for url in urls)
    cache = ShardCache(tmp_path / "cache", most_bytes=largest, fetch=fetch)
    plain = TarData(urls, x="npy", y="cls").batch(np.arange(7))
    data = TarData(urls, x="npy", y="cls", cache=cache)
    assert len(fetch) == 2
    found = data.batch(np.arange(7))
    for name, value in plain.items():
        assert torch.equal(found[name], value)
    # Room for one shard: the first was deleted for the second, and fetched again for the batch.
    assert len(fetch) >= 3
    held = sum(file.stat().st_size for file in (tmp_path / "cache").glob("*.tar"))
    assert held <= largest
    before = len(fetch)
    again = TarData(urls, x="npy", y="cls", cache=cache)
    assert len(again) == 7
    assert len(fetch) == before  # Known without the shards.


def _read(folder: Path, cache: Path, notes: Path) -> None:
    data = TarData([str(folder / "t-0.tar")], x="npy", cache=ShardCache(cache, fetch=Counted(notes, 0.2)))
    assert len(data.batch(np.arange(3))["x"]) == 3


@pytest.mark.processes
def test_processes_that_start_together_fetch_a_shard_once(tmp_path: Path, shards: Path) -> None:
    fork = multiprocessing.get_context("fork")
    readers = [fork.Process(target=_read, args=(shards, tmp_path / "cache", tmp_path / "notes")) for _ in range(3)]
    for each in readers:
        each.start()
    for each in readers:
        each.join(60)
        assert each.exitcode == 0
    assert len(Counted(tmp_path / "notes")) == 1


def test_a_fetch_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def broken(url: str, to: Path) -> None:
        to.write_bytes(b"half")
        raise OSError("the line was cut")

    cache = ShardCache(tmp_path / "cache", fetch=broken)
    with pytest.raises(JobError, match=r"cannot be fetched .* the line was cut"):
        TarData(["far/t.tar"], x="npy", cache=cache)
    assert [file.name for file in (tmp_path / "cache").iterdir()] == [".lock"]


def test_what_a_killed_process_left_is_deleted(tmp_path: Path, shards: Path) -> None:
    cache = ShardCache(tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "fetch-killed.part").write_bytes(b"half")
    cache.path(str(shards / "t-0.tar"))
    assert not list((tmp_path / "cache").glob("*.part"))


def test_fsspec_fetches_local_files_too(tmp_path: Path, shards: Path) -> None:
    data = TarData([str(shards / "t-0.tar")], y="cls", cache=ShardCache(tmp_path / "cache"))
    assert data.batch(np.arange(3))["y"].tolist() == [0, 1, 2]


def test_few_shards_are_open_at_once(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.job.data.tar_shards.MOST_OPEN", 1)
    data = TarData(shards / "t-*.tar", y="cls")
    before = len(os.listdir("/proc/self/fd"))
    assert data.batch(np.array([0, 6, 1, 5]))["y"].tolist() == [0, 6, 1, 5]
    assert len(os.listdir("/proc/self/fd")) == before + 1

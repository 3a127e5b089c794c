"""Text that is tokenized once trains as the same text does, and a damaged file is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import shoal
from shoal.api.tokenize import CannotTokenize
from shoal.job import JobError, TextData, TokenData

TEXT = "".join(f"line {number}: the sea is déjà blue\n" for number in range(200))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    found = shoal.tokenize(tmp_path / "a.txt", to=tmp_path / "tokens")
    assert (found.tokens, found.documents, found.vocab) == (len(TEXT.encode()) + 1, 1, 256)
    return tmp_path / "tokens"


def test_bytes_of_a_file_are_the_bytes_of_the_text(folder: Path) -> None:
    mapped, plain = TokenData(folder, sequence=16), TextData(TEXT.encode() + b"\0", sequence=16)
    assert len(mapped) == len(plain)
    places = np.array([5, 0, len(plain) - 1])
    for name, value in plain.batch(places).items():
        assert torch.equal(mapped.batch(places)[name], value)
    assert mapped.batch(np.array([], dtype=np.int64))["x"].shape == (0, 16)


def test_parts_share_no_window(folder: Path) -> None:
    every = TokenData(folder, sequence=16)
    train, rest = (TokenData(folder, sequence=16, part=part) for part in ((0.0, 0.9), (0.9, 1.0)))
    assert sorted([*train.starts, *rest.starts]) == list(every.starts)


def test_documents_of_a_line_each_are_separated(tmp_path: Path) -> None:
    lines = [{"text": "ab"}, {"text": ""}, {"text": "é"}]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    read: list[int] = []
    found = shoal.tokenize(str(tmp_path / "d.jsonl"), to=tmp_path / "t", progress=read.append)
    assert found.documents == 3
    assert (tmp_path / "t/tokens.bin").read_bytes() == np.array([97, 98, 0, 0, 195, 169, 0], dtype="<u2").tobytes()
    assert len(read) == 3


def test_a_tokenizer_of_hugging_face(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"the": 0, "sea": 1, "</s>": 2, "[UNK]": 3}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("the sea the fish")
    shoal.tokenize([tmp_path / "a.txt", tmp_path / "a.txt"], to=tmp_path / "t", tokenizer=str(tmp_path))
    data = TokenData(tmp_path / "t", sequence=9)
    assert data.vocab == 4
    assert data.batch(np.array([0]))["x"].tolist() == [[0, 1, 0, 3, 2, 0, 1, 0, 3]]
    with pytest.raises(CannotTokenize, match="no such token"):
        shoal.tokenize(tmp_path / "a.txt", to=tmp_path / "u", tokenizer=str(tmp_path), separator="<end>")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "object"}, "dtype is 'object'"),
        ({"tokens": 10**12}, "but its header says 1,000,000,000,000 tokens"),
        ({"tokens": True}, "must be of type int"),
        ({"vocab": -1}, "run shoal tokenize again"),
        ({"vocab": 50}, "holds token"),
        ({"format": "other"}, "expected the format"),
        ({"separator": "x"}, "must be a token or null"),
    ],
)
def test_a_damaged_folder_is_refused(folder: Path, change: dict[str, object], message: str) -> None:
    header = folder / "tokens.json"
    header.write_text(json.dumps(json.loads(header.read_text()) | change))
    with pytest.raises(JobError, match=message):
        TokenData(folder, sequence=16).batch(np.arange(9))


def test_a_truncated_file_is_refused(folder: Path) -> None:
    with open(folder / "tokens.bin", "r+b") as file:
        file.truncate(99)
    with pytest.raises(JobError, match="has 99 bytes"):
        TokenData(folder, sequence=16)


def test_a_stopped_run_leaves_no_folder_that_looks_complete(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"words": 3}\n')
    with pytest.raises(CannotTokenize, match=r"line 2: it has no text in --field text; it has words|field="):
        shoal.tokenize(tmp_path / "bad.jsonl", to=folder, overwrite=True)
    with pytest.raises(JobError, match="is not a folder of tokens"):
        TokenData(folder, sequence=16)
    assert not list(folder.glob("*.tmp"))


def test_what_is_there_is_kept(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(CannotTokenize, match="holds tokens already"):
        shoal.tokenize(tmp_path / "a.txt", to=folder)
    with pytest.raises(CannotTokenize, match="expected text files"):
        shoal.tokenize(tmp_path / "missing.txt", to=folder)
    with pytest.raises(CannotTokenize, match=r"expected bytes, a tokenizer\.json"):
        shoal.tokenize(tmp_path / "a.txt", to=tmp_path / "n", tokenizer="gpt2")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(CannotTokenize, match="it is not UTF-8"):
        shoal.tokenize(tmp_path / "b.txt", to=tmp_path / "n")
    with pytest.raises(JobError, match="too few for one window"):
        TokenData(folder, sequence=10**6)

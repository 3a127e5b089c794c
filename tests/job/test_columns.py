"""Datasets of Hugging Face as data: columns by name, formats and transforms, what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.job import ColumnData, DatasetData, JobError

datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install 'shoal[datasets]'")
TOKENS = np.arange(60).reshape(10, 6)


@pytest.fixture
def table():
    return datasets.Dataset.from_dict(
        {
            "input_ids": TOKENS.tolist(),
            "label": list(range(10)),
            "text": [f"t{n}" for n in range(10)],
            "ragged": [list(range(n)) for n in range(10)],
        }
    )


@pytest.mark.parametrize("indices", [[7, 0, 7], [], [3]])
def test_columns_are_the_entries_of_a_batch(table, indices):
    data = ColumnData(table, x="input_ids", y="label", again="label")
    batch = data.batch(np.array(indices, dtype=np.int64))
    assert len(data) == 10
    assert batch["x"].tolist() == TOKENS[indices].reshape(-1, 6).tolist()
    assert batch["y"].tolist() == batch["again"].tolist() == indices
    assert batch["y"].dtype == torch.int64


def test_a_dataset_on_disk_and_views_of_one(table, tmp_path: Path):
    table.save_to_disk(str(tmp_path / "table"))
    view = datasets.load_from_disk(str(tmp_path / "table")).shuffle(seed=1).select(range(4))
    data = ColumnData(view, x="input_ids")
    wanted = [view[int(index)]["input_ids"] for index in (2, 1)]
    assert data.batch(np.array([2, 1]))["x"].tolist() == wanted


def test_formats_and_transforms_of_the_user_are_kept(table):
    torch_rows = ColumnData(table.with_format("torch"), x="input_ids").batch(np.array([1]))["x"]
    assert torch_rows.tolist() == [TOKENS[1].tolist()]
    doubled = table.with_transform(lambda rows: {"input_ids": [2 * np.array(row) for row in rows["input_ids"]]})
    assert ColumnData(doubled, x="input_ids").batch(np.array([1]))["x"].tolist() == [(2 * TOKENS[1]).tolist()]


def test_rows_through_a_collate_function_are_arrays(table):
    batch = DatasetData(table.select_columns(["input_ids", "label"])).batch(np.array([4, 2]))
    assert batch["input_ids"].tolist() == TOKENS[[4, 2]].tolist()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: ColumnData(t), "was given no entries"),
        (lambda t: ColumnData(t, x="tokens"), "has no column 'tokens'; it has input_ids, label, text, ragged"),
        (lambda t: ColumnData(datasets.DatasetDict(train=t), x="label"), "choose one, such as dataset\\['train'\\]"),
        (lambda t: ColumnData(t.to_iterable_dataset(), x="label"), "without streaming"),
        (lambda t: ColumnData(t, x="text").batch(np.array([0])), "texts must be tokenized"),
        (lambda t: ColumnData(t, x="ragged").batch(np.array([1, 2])), "cut or padded to one length"),
    ],
)
def test_what_cannot_be_read_is_refused(table, make, message):
    with pytest.raises(JobError, match=message):
        make(table)

"""Curves as CSV: `steps.csv` and `validation.csv` in the run's folder, a row for each step or evaluation."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from shoal.checkpoint.regular import append_to_regular

VALIDATION = "validation/"


class CsvLogger:
    """Two files; the columns of each are those of its first row."""

    identity = None

    def __init__(self, folder: Path, facts: Mapping[str, Any], *, before: str | None, resumed_at: int | None) -> None:
        self._files = {name: _CsvTable(folder / name, resumed_at) for name in ("steps.csv", "validation.csv")}

    def add(self, step: int, values: Mapping[str, float]) -> None:
        validation = any(name.startswith(VALIDATION) for name in values)
        row = {name.rpartition("/")[2]: value for name, value in values.items()}
        self._files["validation.csv" if validation else "steps.csv"].add({"step": step, **row})

    def close(self, status: str, summary: Mapping[str, Any]) -> None:
        for each in self._files.values():
            each.close()


class _CsvTable:
    def __init__(self, path: Path, resumed_at: int | None) -> None:
        rows = _rows(path) if resumed_at is not None else []
        # Of a resumed run, what lies beyond its checkpoint is made again.
        kept = [row for row in rows[1:] if row[0].isdecimal() and int(row[0]) <= (resumed_at or 0)]
        self._columns = rows[0] if rows else []
        path.unlink(missing_ok=True)
        self._file: TextIO = open(append_to_regular(path), "w", newline="", encoding="utf-8")  # noqa: SIM115
        self._writer = csv.writer(self._file)
        if self._columns:
            self._writer.writerows([self._columns, *kept])

    def add(self, row: Mapping[str, float]) -> None:
        if not self._columns:
            self._columns = list(row)
            self._writer.writerow(self._columns)
        self._writer.writerow([row.get(name, "") for name in self._columns])
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _rows(path: Path) -> list[list[str]]:
    try:
        with open(path, newline="", encoding="utf-8") as file:
            return [row for row in csv.reader(file) if row]
    except FileNotFoundError:
        return []

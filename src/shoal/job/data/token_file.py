"""Token files: text that was tokenized once, and is mapped into memory when it is read.

A folder with `tokens.bin`, all tokens one after the other (uint16 or uint32, little-endian), and `tokens.json`, which
says how many there are, of which vocabulary, and by which tokenizer. Ranks of a host share the pages of the mapped
file, so a text much larger than memory can be trained on.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.job.errors import JobError

HEADER, TOKENS = "tokens.json", "tokens.bin"
FORMAT = "shoal tokens 1"
DTYPES = {"uint16": 1 << 16, "uint32": 1 << 32}
"""Type of a token, and the largest vocabulary it holds."""
MOST_HEADER_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenHeader:
    """What `tokens.json` says."""

    tokens: int
    documents: int
    vocab: int
    dtype: str
    tokenizer: str
    """Where the tokenizer came from: "bytes", or the name of its file."""
    separator: int | None
    """The token after each document."""
    format: str = FORMAT


class TokenData:
    """Windows of `sequence` tokens, end to end: x is a window, y the same window one token on.

    `TokenData("folder", sequence=1024)` reads what `shoal tokenize` wrote. `part=(0.0, 0.95)` takes a part of the
    windows, so that one file serves training and validation; `num_samples` keeps that number, spread evenly.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        sequence: int,
        part: tuple[float, float] = (0.0, 1.0),
        num_samples: int | None = None,
    ) -> None:
        if sequence < 1:
            raise JobError(f"sequence is {sequence}, but a window needs at least one token")
        first, last = part
        if not 0.0 <= first < last <= 1.0:
            raise JobError(f"part is {part}, but must be two fractions such as (0.0, 0.95)")
        self.folder, self.sequence = Path(folder), sequence
        self.header = read_header(self.folder)
        windows = (self.header.tokens - 1) // sequence
        begin, end = round(first * windows), round(last * windows)
        if end <= begin:
            raise JobError(
                f"{self.folder} has {self.header.tokens:,} tokens, too few for one window of {sequence} + 1 in part "
                f"{part}"
            )
        kept = end - begin if num_samples is None else min(num_samples, end - begin)
        self.starts = (begin + np.arange(kept, dtype=np.int64) * (end - begin) // kept) * sequence
        # Opened once, here: a rank that could not read it would fail in its first step.
        self.tokens = np.memmap(self.folder / TOKENS, dtype=f"<{np.dtype(self.header.dtype).str[1:]}", mode="r")

    @property
    def vocab(self) -> int:
        """Number of different tokens."""
        return self.header.vocab

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        chosen = np.asarray(indices, dtype=np.int64)
        places = self.starts[chosen][:, None] + np.arange(self.sequence + 1)
        tokens = self.tokens[places].astype(np.int64)
        if tokens.size and tokens.max() >= self.header.vocab:
            raise JobError(
                f"{self.folder / TOKENS} holds token {tokens.max()}, but {HEADER} has a vocabulary of "
                f"{self.header.vocab}; the file is damaged: run shoal tokenize again"
            )
        return {"x": torch.from_numpy(tokens[:, :-1].copy()), "y": torch.from_numpy(tokens[:, 1:].copy())}


def read_header(folder: Path) -> TokenHeader:
    """The header of a token folder, checked against its file of tokens."""
    path = folder / HEADER
    try:
        if path.stat().st_size > MOST_HEADER_BYTES:
            raise JobError(f"{path} is larger than a header of a token file can be")
        found = json.loads(path.read_text(encoding="utf-8"))
        size = (folder / TOKENS).stat().st_size
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise JobError(
            f"{folder} is not a folder of tokens ({error}); write one with: shoal tokenize TEXT --to {folder}"
        ) from None
    return _checked(found, size, folder)


def _checked(found: Any, size: int, folder: Path) -> TokenHeader:
    kinds = {"tokens": int, "documents": int, "vocab": int, "dtype": str, "tokenizer": str}
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise JobError(f"{folder / HEADER}: expected the format {FORMAT!r}")
    for name, kind in kinds.items():
        if type(found.get(name)) is not kind:
            raise JobError(f"{folder / HEADER}: {name} is {found.get(name)!r}, but must be of type {kind.__name__}")
    separator = found.get("separator")
    if separator is not None and type(separator) is not int:
        raise JobError(f"{folder / HEADER}: separator is {separator!r}, but must be a token or null")
    if found["dtype"] not in DTYPES:
        raise JobError(f"{folder / HEADER}: dtype is {found['dtype']!r}, but must be one of {', '.join(DTYPES)}")
    expected = found["tokens"] * np.dtype(found["dtype"]).itemsize
    if size != expected or not 0 < found["vocab"] <= DTYPES[found["dtype"]]:
        raise JobError(
            f"{folder / TOKENS} has {size:,} bytes, but its header says {found['tokens']:,} tokens of "
            f"{found['dtype']} out of {found['vocab']:,}; run shoal tokenize again"
        )
    return TokenHeader(**{name: found[name] for name in kinds}, separator=separator)


def write_tokens(
    folder: Path, documents: Iterable[np.ndarray], *, vocab: int, tokenizer: str, separator: int | None
) -> TokenHeader:
    """Writes documents one after the other. The header comes last, by renaming: a folder that has one is complete."""
    if not 0 < vocab <= DTYPES["uint32"]:
        raise JobError(f"a vocabulary of {vocab} tokens cannot be stored")
    dtype = next(name for name, most in DTYPES.items() if vocab <= most)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / HEADER).unlink(missing_ok=True)
    after = np.array([] if separator is None else [separator], dtype=f"<{np.dtype(dtype).str[1:]}")
    num_tokens = num_documents = 0
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".tmp", delete=False) as file:
        try:
            for document in documents:
                if len(document) and int(document.max()) >= vocab:
                    raise JobError(f"the tokenizer gave token {document.max()}, but its vocabulary has {vocab}")
                file.write(document.astype(after.dtype).tobytes() + after.tobytes())
                num_tokens += len(document) + len(after)
                num_documents += 1
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    Path(file.name).replace(folder / TOKENS)
    header = TokenHeader(
        tokens=num_tokens, documents=num_documents, vocab=vocab, dtype=dtype, tokenizer=tokenizer, separator=separator
    )
    temporary = folder / f"{HEADER}.tmp"
    temporary.write_text(json.dumps(asdict(header), indent=1) + "\n", encoding="utf-8")
    temporary.replace(folder / HEADER)
    return header

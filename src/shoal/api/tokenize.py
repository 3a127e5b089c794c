"""`shoal.tokenize`: text files as a token file that is mapped into memory while training."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.api.call import checked_keywords
from shoal.common.printed import PrintedTable

if TYPE_CHECKING:
    import numpy as np

AT_ONCE = 256
"""Documents handed to the tokenizer together; it uses all cores."""


class CannotTokenize(ValueError):
    """A file that cannot be read, or a tokenizer that is none."""


@dataclass(frozen=True, kw_only=True, repr=False)
class TokenFolder(PrintedTable):
    """What was written."""

    folder: str
    tokens: int
    documents: int
    vocab: int
    dtype: str
    bytes: int

    def to_json(self) -> dict[str, Any]:
        """What the verb prints with `--json`."""
        return asdict(self)

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        title = f"{self.folder}: {self.tokens:,} tokens of {self.documents:,} documents, {self.bytes / 1e6:.2f} MB"
        return title, ["use it"], [[f'TokenData("{self.folder}", sequence=1024)   # vocabulary: {self.vocab:,}']]


@checked_keywords
def tokenize(
    texts: str | Path | Sequence[str | Path],
    *,
    to: str | Path,
    tokenizer: str = "bytes",
    field: str = "text",
    separator: str | None = None,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> TokenFolder:
    """Tokenizes text files once, into a folder that `TokenData` maps into memory.

    Args:
        texts: Text files, each a document, or `.jsonl` files with a document a line.
        to: The folder to write.
        tokenizer: `"bytes"`, a `tokenizer.json` of Hugging Face, or a folder that has one.
        field: The entry of a `.jsonl` line that holds its text.
        separator: The token that ends each document. None: `<|endoftext|>`, `</s>` or `<eos>` if the tokenizer has
            one; byte 0 for bytes.
        overwrite: Whether a folder of tokens at `to` is replaced.
        progress: Is given the bytes of text just read.

    Returns:
        The folder, with its number of tokens and documents and its vocabulary.

    Raises:
        CannotTokenize: A file cannot be read, or the tokenizer or its separator is unknown.

    Example:
        shoal.tokenize(["a.txt", "more.jsonl"], to="tokens", tokenizer="gpt2/tokenizer.json")
    """
    from shoal.job.data.token_file import HEADER, write_tokens

    files = [Path(texts)] if isinstance(texts, str | Path) else [Path(each) for each in texts]
    missing = [str(file) for file in files if not file.is_file()]
    if missing or not files:
        raise CannotTokenize(f"{', '.join(missing) or 'no files'}: expected text files or .jsonl files that exist")
    folder = Path(to)
    if (folder / HEADER).exists() and not overwrite:
        raise CannotTokenize(f"--to {folder}: it holds tokens already; replace them with --overwrite, or name another")
    encode, vocab, end = _tokenizer(tokenizer, separator)

    def documents() -> Iterator[np.ndarray]:
        waiting: list[str] = []
        for text, nbytes in (each for file in files for each in _texts(file, field)):
            progress(nbytes)
            waiting.append(text)
            if len(waiting) == AT_ONCE:
                yield from encode(waiting)
                waiting.clear()
        yield from encode(waiting)

    header = write_tokens(folder, documents(), vocab=vocab, tokenizer=tokenizer, separator=end)
    return TokenFolder(
        folder=str(folder),
        tokens=header.tokens,
        documents=header.documents,
        vocab=header.vocab,
        dtype=header.dtype,
        bytes=(folder / "tokens.bin").stat().st_size,
    )


def _texts(file: Path, field: str) -> Iterator[tuple[str, int]]:
    """Documents of a file, and the bytes read for each."""
    try:
        with open(file, encoding="utf-8", newline="") as stream:
            if file.suffix == ".jsonl":
                for number, line in enumerate(stream, start=1):
                    if line.strip():
                        yield _document(line, file, number, field), len(line.encode())
                return
            yield stream.read(), file.stat().st_size
    except UnicodeDecodeError as error:
        raise CannotTokenize(f"{file}: it is not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise CannotTokenize(f"{file}: it cannot be read ({error.strerror})") from None


def _document(line: str, file: Path, number: int, field: str) -> str:
    try:
        found = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise CannotTokenize(f"{file}, line {number}: it is not JSON ({error})") from None
    if not isinstance(found, dict) or not isinstance(found.get(field), str):
        known = ", ".join(found) if isinstance(found, dict) else type(found).__name__
        raise CannotTokenize(f"{file}, line {number}: it has no text in --field {field}; it has {known}")
    text = found[field]
    assert isinstance(text, str)
    return text


def _tokenizer(name: str, separator: str | None) -> tuple[Callable[[list[str]], Iterator[np.ndarray]], int, int | None]:
    """(encodes texts to arrays, size of the vocabulary, the token that ends a document)"""
    import numpy as np

    if name == "bytes":
        if separator is not None:
            raise CannotTokenize(f"--separator {separator}: bytes are separated by byte 0; leave it out")
        return (lambda texts: (np.frombuffer(each.encode(), dtype=np.uint8) for each in texts)), 256, 0
    path = Path(name)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise CannotTokenize(
            f"--tokenizer {name}: expected bytes, a tokenizer.json of Hugging Face, or a folder that has one"
        )
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise CannotTokenize(f"--tokenizer {name}: it needs the package tokenizers: pip install tokenizers") from None
    try:
        loaded = Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises bare exceptions.
        raise CannotTokenize(f"--tokenizer {path}: it cannot be read ({error})") from None
    ends = ["<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>"] if separator is None else [separator]
    end = next((token for token in map(loaded.token_to_id, ends) if token is not None), None)
    if separator is not None and end is None:
        raise CannotTokenize(f"--separator {separator}: {path} has no such token")

    def encode(texts: list[str]) -> Iterator[np.ndarray]:
        for each in loaded.encode_batch(texts, add_special_tokens=False):
            yield np.array(each.ids, dtype=np.int64)

    return encode, loaded.get_vocab_size(), end

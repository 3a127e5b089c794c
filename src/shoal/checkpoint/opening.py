"""Finds and opens checkpoints on disk. A manifest is verified before anything in it is used."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from shoal.checkpoint.files import CHECKSUMS, FORMAT, MANIFEST, checkpoints, checksums_text, step_of
from shoal.checkpoint.regular import read_regular
from shoal.checkpoint.rows import CheckpointBroken
from shoal.checkpoint.saved import Checkpoint
from shoal.checkpoint.tensor_files import why

MOST_MANIFEST_BYTES = 1 << 30


def latest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step, not verified; None if there is none."""
    found = checkpoints(Path(folder))
    return found[-1][1] if found else None


def is_readable(path: Path) -> bool:
    """Whether its manifest and the sizes of its files are correct; checksums of tensors are not computed."""
    try:
        checkpoint = from_manifest(path)
        return all((path / name).lstat().st_size == size for name, (size, _) in checkpoint.files.items())
    except (CheckpointBroken, OSError):
        return False


def open_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint:
    """Opens a checkpoint; verifies its manifest and, unless `verify` is False, every file. Not a collective."""
    path = Path(path)
    if not path.is_dir():
        raise CheckpointBroken(f"there is no checkpoint {path}")
    if not (path / MANIFEST).exists() and latest(path) is not None:
        raise CheckpointBroken(f"{path} is a folder of checkpoints; name one of them, for example {latest(path)}")
    checkpoint = from_manifest(path)
    if verify:
        for name in sorted(checkpoint.files):
            checkpoint.verify_file(name)
    return checkpoint


def from_manifest(path: Path) -> Checkpoint:
    """Opens a checkpoint from its verified manifest; its tensor files are not read."""
    text, sums = (_bytes(path / name) for name in (MANIFEST, CHECKSUMS))
    digest = hashlib.sha256(text).hexdigest()
    if not sums.startswith(checksums_text(digest, {}).encode()):
        raise CheckpointBroken(
            f"{path / MANIFEST} has been altered or truncated since it was written: "
            f"its checksum is not the one in {CHECKSUMS}"
        )
    try:
        manifest = json.loads(text, parse_constant=_no_constant)
        if manifest["format"] > FORMAT:
            raise CheckpointBroken(
                f"{path} has format {manifest['format']}, and this Shoal reads up to {FORMAT}: it is newer; "
                "use the version of Shoal that wrote it, or a later one"
            )
        checkpoint = Checkpoint(path, manifest)
    except CheckpointBroken:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
        raise CheckpointBroken(f"{path / MANIFEST} is not a checkpoint's manifest ({error!r})") from error
    named = step_of(path)
    if named is not None and named != checkpoint.step:
        raise CheckpointBroken(
            f"{path} is named after step {named}, but its {MANIFEST} has step {checkpoint.step}: it was renamed or "
            "forged"
        )
    recorded = {name: sha256 for name, (_, sha256) in checkpoint.files.items()}
    if sums != checksums_text(digest, recorded).encode():
        raise CheckpointBroken(f"{path / CHECKSUMS} has been altered since it was written: {MANIFEST} differs")
    return checkpoint


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _bytes(path: Path) -> bytes:
    try:
        return read_regular(path, most=MOST_MANIFEST_BYTES)
    except FileNotFoundError as error:
        raise CheckpointBroken(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointBroken(f"{path} cannot be read: {why(error)}") from error

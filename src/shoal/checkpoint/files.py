"""The folder of checkpoints: names of its entries, which of them are complete, how files are written to disk.

    step-00000120/            a checkpoint: it appears under this name only when it is complete
        checkpoint.json       the manifest: step, progress, parameters, the file of each of their ranges
        rank-00000.safetensors, rank-00001.safetensors, ...
        SHA256SUMS            of all of these; `sha256sum -c SHA256SUMS` checks a checkpoint by hand
    step-00000160.partial/    a checkpoint being written, or what a crash left of it
    step-00000120.replaced/   a checkpoint that is being replaced by a new one of the same step

Tensor files are written here rather than by safetensors' own function, which does not flush them to the disk,
does not give their checksum, and hides the operating system's error number.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.regular import discard
from shoal.comm.points import reach
from shoal.job.on_disk import has_read

FORMAT = 3
"""2: adds optimiser state that belongs to several parameters together. 3: weights only. Both earlier ones can be read,
and a full checkpoint is still written as 2."""
FULL_FORMAT = 2
MANIFEST = "checkpoint.json"
CHECKSUMS = "SHA256SUMS"
PARTIAL = ".partial"
REPLACED = ".replaced"

CHUNK_BYTES = 16 << 20

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes a checkpoint holds, by the names that safetensors has for them."""

COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64}
"""Complex tensors are stored as real ones, with a last dimension of real and imaginary parts."""

_STEP = re.compile(r"step-(\d{8,})")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def to_json(value: Any) -> Any:
    """The value as strict JSON; NaN and the infinities, which JSON lacks, as {"float": "nan"}."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, dict):
        return {key: to_json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(entry) for entry in value]
    return value


def from_json(value: Any) -> Any:
    """The inverse of `to_json`."""
    if isinstance(value, dict):
        if value.keys() == {"float"} and value["float"] in ("nan", "inf", "-inf"):
            return float(value["float"])
        return {key: from_json(entry) for key, entry in value.items()}
    return [from_json(entry) for entry in value] if isinstance(value, list) else value


def digest_of_values(manifest: dict[str, Any]) -> str:
    """Digest of the numbers in a manifest, which no checksum of a tensor file covers."""
    values = [manifest.get(key) for key in ("progress", "numbers", "optimizer")]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def about_file(step: int, name: str) -> dict[str, str]:
    """The metadata of a tensor file, so that the file of another rank or step is not mistaken for it."""
    return {"step": str(step), "file": name}


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name; None if the name has another form."""
    match = _STEP.fullmatch(path.name.removesuffix(REPLACED))
    return int(match[1]) if match else None


def folder_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """The complete checkpoints as (step, path), oldest step first."""
    if not folder.is_dir():
        return []
    found: dict[int, Path] = {}
    for path in folder.iterdir():
        # A crash between the two renames of a replacement leaves the old checkpoint under its second name only.
        name = path.name.removesuffix(REPLACED)
        match = _STEP.fullmatch(name)
        if match and path.is_dir() and (name == path.name or not (folder / name).exists()):
            found[int(match[1])] = path
    return sorted(found.items())


def tidy(folder: Path) -> None:
    """Removes what crashed saves left behind. Call it in one process, and only while no rank saves."""
    if not folder.is_dir():
        return
    for path in list(folder.iterdir()):
        if path.name.endswith(PARTIAL) and _STEP.fullmatch(path.name.removesuffix(PARTIAL)):
            discard(path)
        elif path.name.endswith(REPLACED) and _STEP.fullmatch(path.name.removesuffix(REPLACED)):
            original = folder / path.name.removesuffix(REPLACED)
            if original.exists():
                discard(path)
            else:
                path.rename(original)


def put_in_place(partial: Path, target: Path) -> None:
    """Renames a complete checkpoint to its final name, replacing an earlier one of the same step."""
    replaced = target.with_name(target.name + REPLACED)
    if target.exists() or target.is_symlink():
        target.rename(replaced)
        reach("save: old one renamed")
    partial.rename(target)
    sync_folder(target.parent)
    discard(replaced)


def remove(path: Path) -> None:
    """Removes a checkpoint. Renames it first, so that a crash halfway leaves no broken checkpoint."""
    gone = path.with_name(path.name.removesuffix(REPLACED) + PARTIAL)
    path.rename(gone)
    discard(gone)


def checksums_text(manifest_sha256: str, files: dict[str, str]) -> str:
    """The text of SHA256SUMS; `files`: the checksum of each tensor file."""
    return "".join(f"{digest}  {name}\n" for name, digest in {MANIFEST: manifest_sha256, **files}.items())


def sync_folder(folder: Path) -> None:
    """Flushes the entries of a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, data: bytes) -> str:
    """Writes a file and flushes it to disk; returns its SHA-256."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def write_tensors(path: Path, tensors: Sequence[tuple[str, torch.Tensor]], about: dict[str, str]) -> tuple[int, str]:
    """Writes a safetensors file with its metadata and flushes it to disk; returns its size and SHA-256."""
    # The widest elements first, so that every tensor starts at a multiple of its element size.
    real = [(key, torch.view_as_real(t.resolve_conj()) if t.dtype in COMPLEX else t) for key, t in tensors]
    ordered = sorted(real, key=lambda entry: -entry[1].element_size())
    header: dict[str, Any] = {"__metadata__": about}
    position = 0
    for key, tensor in ordered:
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{key} has dtype {dtype_name(tensor.dtype)}, which a checkpoint cannot hold")
        if key in header:
            raise ValueError(f"two tensors of one checkpoint file are called {key!r}")
        stop = position + tensor.numel() * tensor.element_size()
        header[key] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    opening = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(opening)
    with open(path, "wb") as file:
        file.write(opening)
        for _, tensor in ordered:
            data = memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
            for start in range(0, len(data), CHUNK_BYTES):
                chunk = data[start : start + CHUNK_BYTES]
                digest.update(chunk)
                file.write(chunk)
            has_read(tensor)
        file.flush()
        os.fsync(file.fileno())
    return len(opening) + position, digest.hexdigest()

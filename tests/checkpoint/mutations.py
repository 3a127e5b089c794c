"""Checkpoints altered at random: damage with the old checksums, and forgeries whose checksums were computed anew.

A forgery changes the structure (shapes, types, ranges, names, files, steps) or exchanges tensors, and signs files and
manifest anew; the checksums of tensors and numbers inside the manifest stay. Somebody who computes these too can write
any values: checksums without a key cannot tell.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

ODD: list[Any] = [
    -1,
    0,
    1,
    2,
    3,
    7,
    10**9,
    2**63,
    10**40,
    -(10**9),
    0.5,
    1e999,
    float("nan"),
    True,
    None,
    "",
    "1",
    "float16",
    "complex64",
    "../x",
    "rank-00000.safetensors",
    "rank-00001.safetensors",
    [],
    [1],
    [0],
    [[1]],
    {},
    {"float": "inf"},
]


def mutate(path: Path, chance: random.Random) -> str:
    """Alters a checkpoint in place; says how."""
    how = chance.choice(
        [_flip, _cut_off, _lose, _manifest, _manifest, _manifest, _header, _header, _exchange, _swap, _special]
    )
    return f"{how.__name__}: {how(path, chance)}"


def _files(path: Path) -> list[Path]:
    return sorted(path.iterdir())


def _tensor_files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def _flip(path: Path, chance: random.Random) -> str:
    file = chance.choice(_files(path))
    data = bytearray(file.read_bytes())
    for _ in range(chance.choice([1, 1, 2, 9])):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)
    return file.name


def _cut_off(path: Path, chance: random.Random) -> str:
    file = chance.choice(_files(path))
    size = file.stat().st_size
    os.truncate(file, chance.choice([0, 1, 8, size - 1, size + 1, chance.randrange(size)]))
    signed = chance.random() < 0.5
    if signed and file.suffix == ".safetensors":
        sign(path)
    return f"{file.name}, signed: {signed}"


def _lose(path: Path, chance: random.Random) -> str:
    file = chance.choice(_files(path))
    file.unlink()
    return file.name


def _special(path: Path, chance: random.Random) -> str:
    file = chance.choice(_files(path))
    kind = chance.choice(["pipe", "link", "folder", "endless"])
    aside = path.parent / f"aside-{file.name}"
    file.rename(aside)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to(aside if kind == "link" else "/dev/zero")
    return f"{file.name} is a {kind}"


def _manifest(path: Path, chance: random.Random) -> str:
    manifest = json.loads((path / "checkpoint.json").read_text())
    told = []
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        place = list(manifest)
        if not place:
            break
        told.append(_somewhere(manifest, chance.choice(place), chance, depth=chance.randrange(6)))
    sign(path, manifest)
    return ", ".join(told)


def _somewhere(node: Any, key: Any, chance: random.Random, depth: int) -> str:
    """Walks down at random and replaces, removes, repeats or adds to what is there."""
    below = node[key]
    if depth and isinstance(below, dict | list) and below:
        inner = chance.choice(list(below) if isinstance(below, dict) else range(len(below)))
        return f"{key}/{_somewhere(below, inner, chance, depth - 1)}"
    what = chance.randrange(5)
    if what == 0:
        del node[key]
        return f"{key} removed"
    if what == 1 and isinstance(node, list):
        node.append(below)
        return f"{key} twice"
    if what == 2 and type(below) is int:
        node[key] = below + chance.choice([-2, -1, 1, 2, below, 1000])
    elif what == 3 and isinstance(node, dict) and len(node) > 1:
        other = chance.choice(list(node))
        node[key], node[other] = node[other], node[key]
        return f"{key} exchanged with {other}"
    else:
        node[key] = chance.choice(ODD)
    return f"{key} = {str(node[key])[:40]}"


def _header(path: Path, chance: random.Random) -> str:
    """What a tensor file says of its tensors, with right checksums."""
    file = chance.choice(_tensor_files(path))
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = chance.choice(sorted(header))
    told = _somewhere(header, name, chance, depth=chance.randrange(4))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    length = len(text) if chance.random() < 0.9 else chance.choice([0, 2**40, 2**63, len(text) - 8, len(text) + 8])
    file.write_bytes(length.to_bytes(8, "little") + text + data[8 + size :])
    sign(path)
    return f"{file.name} {told} (header of {length})"


def _exchange(path: Path, chance: random.Random) -> str:
    """Two tensors of one file change places, by their names in its header, in the manifest, or in both."""
    file = chance.choice(_tensor_files(path))
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    alike: dict[str, list[str]] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            alike.setdefault(str((entry["dtype"], entry["shape"])), []).append(name)
    one, other = chance.sample(chance.choice([names for names in alike.values() if len(names) > 1]), 2)
    where = chance.choice(["header", "manifest", "both"])
    if where != "manifest":
        header[one], header[other] = header[other], header[one]
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    manifest = json.loads((path / "checkpoint.json").read_text())
    if where != "header":
        rows = [*manifest["pieces"], *manifest["buffers"].values(), *manifest["extras"].values()]
        for row in rows:
            if row["file"] == file.name and row["tensor"] in (one, other):
                row["tensor"] = other if row["tensor"] == one else one
    sign(path, manifest)
    return f"{one} and {other} of {file.name} in {where}"


def _swap(path: Path, chance: random.Random) -> str:
    """The file of one rank for that of another, or the name of the checkpoint for another step's."""
    files = _tensor_files(path)
    if len(files) > 1:
        one, other = chance.sample(files, 2)
        one_bytes, other_bytes = one.read_bytes(), other.read_bytes()
        one.write_bytes(other_bytes)
        if chance.random() < 0.5:
            other.write_bytes(one_bytes)
        sign(path)
        return f"{one.name} and {other.name}"
    manifest = json.loads((path / "checkpoint.json").read_text())
    manifest["step"] = chance.choice([-5, -1, 2, 10**6, 10**30])
    sign(path, manifest)
    return f"step {manifest['step']}"


def sign(path: Path, manifest: Any = None) -> None:
    """Computes all checksums anew, as somebody would who wants a forgery to pass."""
    if manifest is None:
        manifest = json.loads((path / "checkpoint.json").read_text())
    files = manifest.get("files") if isinstance(manifest, dict) else None
    sums = ""
    for name, entry in files.items() if isinstance(files, dict) else ():
        file = path / name
        if file.is_file() and isinstance(entry, dict) and entry.keys() >= {"bytes", "sha256"}:
            data = file.read_bytes()
            if type(entry["bytes"]) is int:
                entry.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        sums += f"{entry.get('sha256') if isinstance(entry, dict) else entry}  {name}\n"
    text = json.dumps(manifest)
    (path / "checkpoint.json").write_text(text)
    first = f"{hashlib.sha256(text.encode()).hexdigest()}  checkpoint.json\n"
    (path / "SHA256SUMS").write_text(first + sums)


def try_many(
    originals: list[Path],
    folder: Path,
    read: Callable[[Path], Any],
    refused: type[Exception] | tuple[Any, ...],
    *,
    seed: int,
    count: int,
) -> dict[str, Any]:
    """Counts what was refused and what was read as before; lists everything else."""
    chance, right = random.Random(seed), [read(path) for path in originals]
    found: dict[str, Any] = {"refused": 0, "identical": 0, "wrong": []}
    for number in range(count):
        which = chance.randrange(len(originals))
        place = folder / str(number)
        copy = Path(shutil.copytree(originals[which], place / originals[which].name))
        how = mutate(copy, chance)
        try:
            same = read(copy) == right[which]
        except refused:
            found["refused"] += 1
        except Exception as error:
            found["wrong"].append(f"{number} {how}: {error!r}")
        else:
            if same:
                found["identical"] += 1
            else:
                found["wrong"].append(f"{number} {how}: read as something else")
        shutil.rmtree(place)
    return found

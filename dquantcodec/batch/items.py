"""Which files a batch is about, and what becomes of each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError
from ..places import exists, is_folder, listing
from ..remote import RemoteBytes
from ..urls import base_name, beside, filesystem, is_url, plain, shown, storage

INDEX_SUFFIX = ".safetensors.index.json"
_PATTERN = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Item:
    """One input and one output (paths or URLs; no output where files are only checked)."""

    input: str
    output: str = ""

    @property
    def files(self) -> tuple[str, ...]:
        """The files that the input consists of: an index and its shards, or the input alone."""
        return (self.input, *_shards(self.input)) if self.input.endswith(INDEX_SUFFIX) else (self.input,)


def plan_items(inputs: Sequence[str], out: str, suffixes: Sequence[str], made: str) -> list[Item]:
    """An item for every file that ``inputs`` name, with an output of the suffix ``made`` in the folder ``out``.

    An input is a file, a pattern (``runs/**/*.npz``; below ``runs`` outputs have the folders that their inputs have),
    or a folder, of which the files with one of ``suffixes`` are taken, shards that an index names together.  Without
    ``out`` items have no output.

    Raises :class:`InputError`: ``input-empty`` where an input names no file, ``output-duplicate`` where two would
    become one output, ``not-folder`` where ``out`` is a file; and FileNotFoundError.
    """
    out = plain(out)
    if out and not is_url(out) and exists(out):
        raise InputError("is a file; several outputs need a folder", code="not-folder", path=shown(out))
    items: list[Item] = []
    taken: dict[str, str] = {}
    for name in map(plain, inputs):
        for file, below in _expanded(name, suffixes):
            stem = next((below.removesuffix(end) for end in (INDEX_SUFFIX, *suffixes) if below.endswith(end)), below)
            output = beside(out, stem + made) if out else ""
            if out and output in taken:
                raise InputError(
                    f"{shown(taken[output])} and {shown(file)} would both become {shown(output)}; give a folder or a "
                    "quoted pattern above both, or rename one",
                    code="output-duplicate",
                    path=shown(file),
                )
            taken[output] = file
            items.append(Item(file, output))
    return items


def _expanded(name: str, suffixes: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The files that ``name`` stands for, and what each is called below the folder or pattern."""
    if is_folder(name):
        found = [(beside(name, entry), entry) for entry in _together(name, listing(name), suffixes)]
    elif _PATTERN.search(name) and not exists(name):
        root = name[: _PATTERN.search(name).start()].rpartition("/")[0]  # type: ignore[union-attr]
        found = sorted(_matching(name, root))
    else:
        found = [(name, base_name(name))]
        if not exists(name):
            raise FileNotFoundError(2, "No such file or directory", shown(name))
    if not found:
        raise InputError(f"there is no file of {', '.join(suffixes)} in it", code="input-empty", path=shown(name))
    yield from found


def _matching(pattern: str, root: str) -> Iterator[tuple[str, str]]:
    if not is_url(pattern):
        base = Path(root or ("/" if pattern.startswith("/") else "."))
        for match in base.glob(pattern[len(root) :].lstrip("/")):
            if match.is_file():
                yield str(match), match.relative_to(base).as_posix()
        return
    fs, inner = filesystem(pattern)
    inner_root = filesystem(root)[1].rstrip("/")
    with storage(pattern):
        fs.invalidate_cache(inner_root)
        for match, info in fs.glob(inner, detail=True).items():
            if info["type"] == "file":
                below = match[len(inner_root) :].lstrip("/")
                yield f"{root}/{below}", below


def _together(folder: str, names: Sequence[str], suffixes: Sequence[str]) -> list[str]:
    """The files of a folder; shards of an index are left to it."""
    if ".safetensors" not in suffixes:
        return [name for name in names if name.endswith(tuple(suffixes))]
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    shards = {base_name(shard) for index in indexes for shard in _shards(beside(folder, index))}
    return [*indexes, *(name for name in names if name.endswith(tuple(suffixes)) and name not in shards)]


def _shards(index: str) -> list[str]:
    if is_url(index):
        remote = RemoteBytes(index)
        text = remote.fetch(0, remote.size)
    else:
        text = Path(index).read_bytes()
    try:
        names = sorted({Path(name).name for name in json.loads(text)["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError("no weight_map of tensors to files in it", code="input-damaged", path=shown(index)) from error
    folder = index.rpartition("/")[0] if is_url(index) else str(Path(index).parent)
    return [beside(folder, name) for name in names]

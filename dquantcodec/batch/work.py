"""What is done to every file of a batch, and how a finished output is known.

An output carries a note of what it was made from: of every input file its name, size and version (the time of its last
change, or what storage says: an ETag), and the options that decide what the output holds.  An output that is complete
and has the note that would be written now is passed over.  Threads and library version are not part of the note.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from ..cli.compress import Settings, encode_source
from ..cli.console import Console
from ..cli.decompress import Decoding, decode_file
from ..errors import ChecksumError, DQuantError
from ..places import exists, stamp
from ..remote import RemoteBytes
from ..urls import filesystem, is_url, storage
from .items import Item

#: Where an output has its note.
NOTE = "made_from"
#: Options that change how the work is done but not what comes of it.
_HOW = ("threads", "device")
_QUIET = Console(quiet=True)


class Work(Protocol):
    """Something to do to files.  Instances travel to other processes."""

    #: The word for it, and what its inputs and outputs end with.
    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    made: ClassVar[str]

    def finished(self, item: Item) -> bool:
        """Whether the output is there, complete, and made of the same input with the same options."""

    def run(self, item: Item) -> None:
        """Do it.  Raises whatever is wrong; nothing half done stays."""


@dataclass(frozen=True)
class Compress:
    """Saved keys and values into ``.dqkv`` files.

    ``reading`` are keyword arguments of :func:`dquantcodec.tensors.open_source`.
    """

    settings: Settings = field(default_factory=Settings)
    reading: Mapping[str, Any] = field(default_factory=dict)
    name: ClassVar[str] = "compress"
    suffixes: ClassVar[tuple[str, ...]] = (".safetensors", ".npz")
    made: ClassVar[str] = ".dqkv"

    def note(self, item: Item) -> dict[str, Any]:
        return _note(item, {**_options(self.settings), **self.reading})

    def finished(self, item: Item) -> bool:
        from ..file import open as open_file

        if not exists(item.output):
            return False
        try:
            with open_file(item.output, mode="strict") as reader:
                return bool(reader.metadata.get(NOTE) == self.note(item))
        except DQuantError:
            return False

    def run(self, item: Item) -> None:
        from ..tensors import open_source

        make_folder(item.output)
        note = {NOTE: self.note(item)}  # before reading: an input that changes meanwhile is then not taken for done
        source = open_source(item.input, **self.reading)
        for number in self.settings.exact_layers:
            source.layer(number)
        encode_source(source, item.output, self.settings, _QUIET, note)


@dataclass(frozen=True)
class Decompress:
    """``.dqkv`` files back into safetensors."""

    decoding: Decoding = field(default_factory=Decoding)
    name: ClassVar[str] = "decompress"
    suffixes: ClassVar[tuple[str, ...]] = (".dqkv",)
    made: ClassVar[str] = ".safetensors"

    def note(self, item: Item) -> dict[str, Any]:
        return _note(item, _options(self.decoding))

    def finished(self, item: Item) -> bool:
        if not exists(item.output):
            return False
        try:
            # The name was given to a complete file, and the header is what says which.
            return bool(json.loads(_safetensors_metadata(item.output).get(NOTE, "null")) == self.note(item))
        except ValueError:
            return False

    def run(self, item: Item) -> None:
        make_folder(item.output)
        note = {NOTE: json.dumps(self.note(item))}
        decode_file(item.input, item.output, self.decoding, _QUIET, note)


@dataclass(frozen=True)
class Verify:
    """Every byte of ``.dqkv`` files checked; nothing is written, so nothing is ever finished already."""

    name: ClassVar[str] = "verify"
    suffixes: ClassVar[tuple[str, ...]] = (".dqkv",)
    made: ClassVar[str] = ""

    def finished(self, _item: Item) -> bool:
        return False

    def run(self, item: Item) -> None:
        """Raises :class:`ChecksumError` with code and place of the first finding, and how many there are."""
        from ..file import open as open_file

        with open_file(item.input) as reader:
            findings = list(reader.verify())
            path = reader.path
        if findings:
            first = findings[0]
            more = f" (and {len(findings) - 1} more findings)" if len(findings) > 1 else ""
            where = {word: fact for word, fact in first.where.items() if word != "path"}
            raise ChecksumError(f"{path}: {first.message}{more}", code=first.code, path=path, **where)


def make_folder(name: str) -> None:
    """The folder that ``name`` lies in, where there are folders to make."""
    if not is_url(name):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        return
    fs, path = filesystem(name)
    parent = fs._parent(path)
    # Object stores have no folders, and their topmost level is not ours to make.
    if "/" in parent.strip("/"):
        with storage(name):
            fs.makedirs(parent, exist_ok=True)


def _note(item: Item, options: Mapping[str, Any]) -> dict[str, Any]:
    note: dict[str, Any] = json.loads(
        json.dumps({"input": [stamp(name) for name in item.files], "options": dict(options)}, sort_keys=True)
    )
    return note


def _options(settings: Any) -> dict[str, Any]:
    return {one.name: _value(getattr(settings, one.name)) for one in fields(settings) if one.name not in _HOW}


def _value(value: Any) -> Any:
    """``value`` as JSON has it, the same for equal ones."""
    if is_dataclass(value):
        return {one.name: _value(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _value(one) for name, one in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return [_value(one) for one in value] if isinstance(value, (list, tuple)) else value


def _safetensors_metadata(name: str) -> dict[str, str]:
    """The text entries in the header of a safetensors file at a path or URL.  Raises ValueError where there is none."""
    if is_url(name):
        remote = RemoteBytes(name)
        size, read = remote.size, remote.fetch
    else:
        path = Path(name)
        size = path.stat().st_size

        def read(start: int, stop: int) -> bytes:
            with path.open("rb") as file:
                file.seek(start)
                return file.read(stop - start)

    length = int.from_bytes(read(0, min(8, size)), "little")
    if size < 8 + length:
        raise ValueError("cut")
    header = json.loads(read(8, 8 + length))
    end = max((entry["data_offsets"][1] for word, entry in header.items() if word != "__metadata__"), default=0)
    if size != 8 + length + end:
        raise ValueError("cut")
    found: dict[str, str] = header.get("__metadata__", {})
    return found

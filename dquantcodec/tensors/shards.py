"""Finding the files of an input and listing the tensors in them: safetensors, ``.npz``, folders of both."""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import InputError
from ..places import is_folder, listing
from ..remote import RemoteBytes
from ..urls import base_name, beside, is_url, plain, shown
from .dtypes import from_numpy, from_safetensors
from .remote import remote_tensors
from .stored import StoredTensor, UnpackedMember, plain_file

SUFFIXES = (".safetensors", ".npz")
INDEX_SUFFIX = ".safetensors.index.json"


def list_tensors(path: str | Path) -> dict[str, StoredTensor]:
    """Every tensor under ``path`` by name: a file, a ``*.safetensors.index.json``, or a folder of such files.

    ``path`` may be a URL.  Nothing but headers is read.  Raises :class:`InputError` for a file that is no such file, a
    shard that an index names but that is missing, and a name that stands in two files.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in _url_files(plain(path)) if is_url(plain(path)) else _files(Path(plain(path))):
        for tensor in remote_tensors(file, _read_headers) if isinstance(file, str) else _read_headers(file):
            if tensor.name in tensors:
                raise InputError(
                    f"tensor {tensor.name} stands in two files: {tensors[tensor.name].path} and {tensor.path}",
                    code="tensor-duplicate",
                    path=shown(str(path)),
                )
            tensors[tensor.name] = tensor
    if not tensors:
        raise InputError("there are no tensors in it", code="input-empty", path=shown(str(path)))
    return tensors


def _url_files(url: str) -> list[str]:
    """As :func:`_files`, of a file or folder in storage."""
    name = base_name(url)
    if name.endswith(INDEX_SUFFIX):
        return _url_indexed(url)
    if name.endswith(SUFFIXES) or not is_folder(url):
        return [url]
    inside = listing(url)
    files = [beside(url, entry) for entry in inside if entry.endswith(SUFFIXES)]
    for index in (beside(url, entry) for entry in inside if entry.endswith(INDEX_SUFFIX)):
        files.extend(named for named in _url_indexed(index) if named not in files)
    if not files:
        raise InputError("the folder holds no .safetensors or .npz file", code="input-empty", path=shown(url))
    return files


def _url_indexed(url: str) -> list[str]:
    """The shards that an index in storage names; one that is missing is found when its header is read."""
    index = RemoteBytes(url)
    try:
        names = set(json.loads(index.fetch(0, index.size))["weight_map"].values())
        return [beside(url.rpartition("/")[0], Path(name).name) for name in sorted(names)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError("no weight_map of tensors to files in it", code="input-damaged", path=shown(url)) from error


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return _indexed(path) if path.name.endswith(INDEX_SUFFIX) else [path]
    inside = sorted(entry for entry in path.iterdir() if entry.is_file() and not entry.name.startswith("."))
    files = [entry for entry in inside if entry.suffix in SUFFIXES]
    for index in (entry for entry in inside if entry.name.endswith(INDEX_SUFFIX)):
        files.extend(named for named in _indexed(index) if named not in files)
    if not files:
        raise InputError("the folder holds no .safetensors or .npz file", code="input-empty", path=str(path))
    return files


def _indexed(index: Path) -> list[Path]:
    """The shards an index names; all must be there."""
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        files = sorted(index.parent / Path(name).name for name in names)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError("no weight_map of tensors to files in it", code="input-damaged", path=str(index)) from error
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise InputError(f"missing shards: {', '.join(missing)}", code="shard-missing", path=str(index))
    return files


def _read_headers(file: Path) -> Iterator[StoredTensor]:
    if file.suffix == ".npz":
        return _npz_tensors(file)
    if file.suffix == ".safetensors":
        return _safetensors_tensors(file)
    raise InputError(
        "not a .safetensors or .npz file (nor a folder of them)"
        + ("; to decode a .dqkv file use decompress" if file.suffix == ".dqkv" else ""),
        code="input-unknown",
        path=str(file),
    )


def _safetensors_tensors(file: Path) -> Iterator[StoredTensor]:
    from safetensors import SafetensorError, safe_open

    with file.open("rb") as stream:  # unreadable files fail here with the operating system's own reason
        start = stream.read(8)
    try:
        # The package checks the header by the format's rules: sizes, order, no hole, no overlap, nothing after.
        with safe_open(file, framework="numpy"):
            pass
    except SafetensorError as error:
        raise InputError(f"not a valid safetensors file: {error}", code="input-damaged", path=str(file)) from error
    (length,) = struct.unpack("<Q", start)
    with file.open("rb") as stream:
        stream.seek(8)
        header = json.loads(stream.read(length))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        yield StoredTensor(
            name=name,
            path=str(file),
            dtype=from_safetensors(entry["dtype"]),
            shape=tuple(entry["shape"]),
            offset=8 + length + entry["data_offsets"][0],
            open=plain_file(str(file)),
        )


def _npz_tensors(file: Path) -> Iterator[StoredTensor]:
    with file.open("rb") as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                for info in archive.infolist():
                    if info.filename.endswith(".npy"):
                        yield _npz_tensor(file, archive, info)
        except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"not a valid .npz file: {error}", code="input-damaged", path=str(file)) from error


def _npz_tensor(file: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> StoredTensor:
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(member)
        header_bytes = member.tell()
    contiguous = not fortran or len(shape) < 2
    in_place = info.compress_type == zipfile.ZIP_STORED and contiguous and dtype.str[0] != ">"
    path = str(file)
    return StoredTensor(
        name=info.filename.removesuffix(".npy"),
        path=path,
        dtype=from_numpy(dtype),
        shape=tuple(int(size) for size in shape),
        offset=_member_start(file, info) + header_bytes if in_place else 0,
        open=plain_file(path)
        if in_place
        else UnpackedMember(path, info.filename, header_bytes, convert=not contiguous or dtype.str[0] == ">"),
    )


def _member_start(file: Path, info: zipfile.ZipInfo) -> int:
    """Byte where a stored member's data starts: by its local header, whose lengths may differ from the index."""
    with file.open("rb") as stream:
        stream.seek(info.header_offset + 26)
        name_bytes, extra_bytes = struct.unpack("<HH", stream.read(4))
    return info.header_offset + 30 + int(name_bytes) + int(extra_bytes)

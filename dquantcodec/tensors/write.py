"""Writing a safetensors file piece by piece: header first, then token ranges in any order.

The file grows beside its final name and takes it by renaming, complete and on the disk, or not at all.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .dtypes import FLOATS, numpy_dtype, to_safetensors
from .layouts import Geometry, token_runs


@dataclass(frozen=True)
class OutputTensor:
    """One tensor to write: its name, element type, axis order and sizes."""

    name: str
    dtype: str
    layout: str
    geometry: Geometry

    @property
    def shape(self) -> tuple[int, ...]:
        return self.geometry.shape(self.layout)

    @property
    def values(self) -> int:
        sizes = self.geometry
        return sizes.sequences * sizes.heads * sizes.tokens * sizes.head_dim

    @property
    def nbytes(self) -> int:
        return self.values * FLOATS[self.dtype]


class SafetensorsWriter:
    """Writes the given tensors to ``path``; a context manager.

    Leaving the block normally syncs and renames; leaving it by an exception removes the unfinished file and leaves what
    stood under ``path`` untouched.  Tokens never written read as zeros.
    """

    def __init__(self, path: str | Path, tensors: Sequence[OutputTensor], metadata: Mapping[str, str]) -> None:
        self._path = Path(os.path.realpath(path))  # a link stays one: its target is replaced
        self._tensors = {tensor.name: tensor for tensor in tensors}
        if len(self._tensors) != len(tensors):
            raise InputError("two tensors to write have the same name", code="tensor-duplicate", path=str(path))
        header, self._offsets, total = _header(tensors, metadata)
        self._unfinished = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}.tmp")
        self._file = self._unfinished.open("xb", buffering=0)
        try:
            self._write_at(0, header)
            self._file.truncate(total)
        except BaseException:
            self.abort()
            raise

    def write(self, name: str, sequence: int, start: int, block: NDArray[Any]) -> None:
        """Put ``block`` ``[t, H, D]``, of the tensor's element type, at tokens ``start ..`` of ``sequence``."""
        tensor = self._tensors[name]
        block = np.ascontiguousarray(block, numpy_dtype(tensor.dtype))
        for run in token_runs(tensor.geometry, tensor.layout, sequence, start, start + block.shape[0]):
            part = block if run.head is None else np.ascontiguousarray(block[:, run.head])
            offset = self._offsets[name] + run.offset * FLOATS[tensor.dtype]
            self._write_at(offset, part.reshape(-1).view(np.uint8).data)

    def close(self) -> None:
        """Sync the file and give it its name."""
        if self._file.closed:
            return
        try:
            os.fsync(self._file.fileno())
            self._file.close()
            self._unfinished.replace(self._path)
        except BaseException:
            self.abort()
            raise
        _sync_folder(self._path.parent)

    def abort(self) -> None:
        """Remove the unfinished file."""
        self._file.close()
        self._unfinished.unlink(missing_ok=True)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _write_at(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        self._file.seek(offset)
        while view:
            view = view[self._file.write(view) :]


def _header(tensors: Sequence[OutputTensor], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int], int]:
    """Header bytes, the byte each tensor starts at, and the length of the file."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, end = {}, 0
    for tensor in tensors:
        starts[tensor.name] = end
        entries[tensor.name] = {
            "dtype": to_safetensors(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # safetensors asks for tensors at a multiple of 8
    data = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {name: data + start for name, start in starts.items()}, data + end


def _sync_folder(folder: Path) -> None:
    """Make a rename durable; where folders cannot be opened (Windows) the system does it by itself."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""A tensor that lies in a file: where its bytes are, and reading a range of them.

Reads are ordinary file reads.  A mapping would count every page it touched as resident memory, and a cache of many
gigabytes must be read with a few hundred megabytes.
"""

from __future__ import annotations

import os
import tempfile
import weakref
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .dtypes import FLOATS, numpy_dtype
from .layouts import Geometry, token_runs


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """Name, place, element type and shape of one saved tensor.

    ``dtype`` is a name (``"float16"``), whatever the file holds; ``path`` is the file to show to people.  ``open``
    gives a binary file in which the elements stand in C order, little-endian, from byte ``offset`` on.
    """

    name: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    open: Callable[[], BinaryIO] = field(repr=False)

    @property
    def values(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    def read(self, layout: str, sequence: int, start: int, stop: int) -> NDArray[Any]:
        """Tokens ``[start, stop)`` of one sequence as ``[t, H, D]`` in the stored element type."""
        geometry = Geometry.of(self.shape, layout)
        dtype = numpy_dtype(self.dtype)
        tokens, heads, width = stop - start, geometry.heads, geometry.head_dim
        by_head = not layout.endswith("THD")
        block = np.empty((heads, tokens, width) if by_head else (tokens, heads, width), dtype)
        with self.open() as file:
            for run in token_runs(geometry, layout, sequence, start, stop):
                part = block if run.head is None else block[run.head]
                self._fill(file, self.offset + run.offset * FLOATS[self.dtype], part)
        return np.ascontiguousarray(block.transpose(1, 0, 2)) if by_head else block

    def _fill(self, file: BinaryIO, offset: int, into: NDArray[Any]) -> None:
        # Through uint8, because bfloat16 arrays have no buffer protocol.
        view = into.reshape(-1).view(np.uint8).data
        file.seek(offset)
        while view:
            count = file.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise InputError(
                    f"tensor {self.name} ends too early: the file was cut", code="input-truncated", path=self.path
                )
            view = view[count:]


def plain_file(path: str) -> Callable[[], BinaryIO]:
    """Opens ``path`` anew for every read, so that a folder of a thousand shards needs one descriptor."""
    return partial(open, path, "rb", buffering=0)  # type: ignore[return-value]


class UnpackedMember:
    """Opens a member of an ``.npz`` that cannot be read in place, unpacked to an unnamed temporary file.

    The file is made on the first read and lives as long as this object.  A compressed member is copied through a small
    buffer; Fortran order or big-endian elements go through memory, one tensor at a time.
    """

    def __init__(self, path: str, member: str, header_bytes: int, *, convert: bool) -> None:
        self._path, self._member, self._header_bytes, self._convert = path, member, header_bytes, convert
        self._file: BinaryIO | None = None

    def __call__(self) -> BinaryIO:
        if self._file is None:
            self._file = self._unpack()
            weakref.finalize(self, self._file.close)
        return os.fdopen(os.dup(self._file.fileno()), "rb", buffering=0)

    def _unpack(self) -> BinaryIO:
        target = tempfile.TemporaryFile(prefix="dqkv-")  # noqa: SIM115 (lives as long as this object)
        try:
            with zipfile.ZipFile(self._path) as archive, archive.open(self._member) as member:
                if self._convert:
                    array = np.lib.format.read_array(member, allow_pickle=False)
                    little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
                    target.write(little.reshape(-1).view(np.uint8).data)
                else:
                    member.read(self._header_bytes)
                    while chunk := member.read(1 << 20):
                        target.write(chunk)
            target.flush()
        except zipfile.BadZipFile as error:
            target.close()
            raise InputError(f"{self._member}: {error}", code="input-damaged", path=self._path) from error
        except BaseException:
            target.close()
            raise
        return target

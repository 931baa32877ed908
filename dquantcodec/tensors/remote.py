"""Tensors of files in storage: headers by ranges, and each tensor fetched once, in full, when it is first read.

Keys and values are read by token range in every head, which would be many small requests; a tensor is one range.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from ..errors import InputError
from ..staged import Staged
from ..urls import shown
from .dtypes import FLOATS
from .stored import StoredTensor

#: The longest header that the safetensors package takes.
MAX_HEADER = 100_000_000


@dataclass(frozen=True, eq=False)
class _Fetched:
    """Opens the local copy of an object once bytes ``start`` to ``stop`` are in it."""

    staged: Staged
    start: int
    stop: int
    open: Callable[[], BinaryIO]

    def __call__(self) -> BinaryIO:
        self.staged.hold(self.start, self.stop)
        return self.open()


def remote_tensors(url: str, read_headers: Callable[[Path], Iterator[StoredTensor]]) -> Iterator[StoredTensor]:
    """The tensors of the ``.safetensors`` or ``.npz`` file at ``url``, which ``read_headers`` lists of a local file.

    Of an ``.npz`` file everything is fetched at once, of the other kind headers only.
    """
    staged = Staged(url)
    size = staged.remote.size
    by_range = staged.path.suffix == ".safetensors"
    if by_range:
        start = staged.remote.fetch(0, min(8, size))
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        # What is no such header is found by whoever reads it.
        staged.hold(0, min(size, 8 + min(length, MAX_HEADER)))
    elif staged.path.suffix == ".npz":
        staged.hold(0, size)
    try:
        for tensor in read_headers(staged.path):
            start_at = tensor.offset if by_range else 0
            stop = start_at + tensor.values * FLOATS.get(tensor.dtype, 0) if by_range else size
            yield replace(tensor, path=shown(url), open=_Fetched(staged, start_at, stop, tensor.open))
    except InputError as error:
        error.where["path"] = shown(url)
        raise

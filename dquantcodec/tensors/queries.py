"""Saved queries: the newest positions of a cache, to measure attention with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .dtypes import FLOATS
from .names import recognise_queries
from .shards import list_tensors
from .stored import StoredTensor


@dataclass(frozen=True, eq=False)
class QuerySource:
    """Query tensors by layer number, each ``[B, Q, L, D]`` or ``[Q, L, D]``: query heads, then the last L positions."""

    path: str
    layers: Mapping[int, StoredTensor]

    def read(self, layer: int, sequence: int) -> NDArray[np.float32]:
        """Queries of one layer and sequence, ``[Q, L, D]`` float32."""
        tensor = self.layers[layer]
        shape = tensor.shape if len(tensor.shape) == 4 else (1, *tensor.shape)
        if sequence >= shape[0]:
            raise InputError(
                f"{tensor.name} has {shape[0]} sequences, sequence {sequence} is asked for",
                code="query-mismatch",
                path=tensor.path,
            )
        heads_of_one = tensor.read("BHTD" if len(tensor.shape) == 4 else "HTD", sequence, 0, shape[2])
        return np.ascontiguousarray(heads_of_one.transpose(1, 0, 2).astype(np.float32))


def open_queries(path: str | Path) -> QuerySource | None:
    """The queries in a file or folder (``layers.{layer}.query`` and the like), or ``None`` if there are none."""
    tensors = list_tensors(path)
    found = {number: tensors[name] for number, name in sorted(recognise_queries(tensors).items())}
    for tensor in found.values():
        if tensor.dtype not in FLOATS or len(tensor.shape) not in (3, 4):
            raise InputError(
                f"{tensor.name} is {tensor.dtype} {list(tensor.shape)}; queries must be float [B,Q,L,D]",
                code="query-mismatch",
                path=tensor.path,
            )
    return QuerySource(str(path), found) if found else None

"""Arrays handed to a writer: checked against the layers before anything is taken in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .layer import KINDS, Layer


def incoming_rows(layers: Sequence[Layer], keys: Sequence[Any], values: Sequence[Any]) -> list[NDArray[Any]]:
    """Key and value ``[T, H, D]`` of each stored layer in turn, all of one ``T`` and in their layers' dtypes.

    Raises :class:`InputError` (``layer-count``, ``layer-missing``, ``layer-absent``, ``input-shape``,
    ``dtype-mismatch``).
    """
    if len(keys) != len(layers) or len(values) != len(layers):
        raise InputError(
            f"{len(keys)} key and {len(values)} value arrays for {len(layers)} layers; give one of each per layer",
            code="layer-count",
        )
    rows: list[NDArray[Any]] = []
    for place, layer in enumerate(layers):
        for kind, array in zip(KINDS, (keys[place], values[place])):
            where: dict[str, Any] = {"layer": place, "kind": kind}
            if layer.storage == "absent":
                if array is not None:
                    raise InputError(f"layer {place} is absent but {kind}s are given", code="layer-absent", **where)
                continue
            rows.append(_checked(array, layer, where))
            if len(rows[-1]) != len(rows[0]):
                raise InputError(
                    f"layer {place} has {len(rows[-1])} tokens of {kind}s, the first layer {len(rows[0])}",
                    code="input-shape",
                    **where,
                )
    return rows


def _checked(array: Any, layer: Layer, where: dict[str, Any]) -> NDArray[Any]:
    name = f"{where['kind']}s of layer {where['layer']}"
    if array is None:
        raise InputError(f'no {name} are given; say storage="absent" to leave them out', code="layer-missing", **where)
    rows = np.asarray(array)
    if rows.dtype == np.uint16 and layer.dtype == "bfloat16":
        rows = rows.view(layer.array_dtype)
    if rows.dtype != layer.array_dtype:
        raise InputError(
            f"{name} are {rows.dtype}, the file was created for {layer.dtype}; convert them, or create the layer with "
            "their dtype",
            code="dtype-mismatch",
            **where,
        )
    if rows.ndim != 3 or rows.shape[1:] != (layer.kv_heads, layer.head_dim):
        raise InputError(
            f"{name} have shape {rows.shape}; expected [tokens, {layer.kv_heads}, {layer.head_dim}]",
            code="input-shape",
            **where,
        )
    return rows

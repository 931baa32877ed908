"""A saved KV cache as layers of keys and values that can be read by token range."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..errors import InputError
from ..urls import shown
from .dtypes import FLOATS
from .layouts import Geometry, decide_layout
from .names import Naming, listing, match, recognise
from .numbers import format_numbers
from .shards import list_tensors
from .stored import StoredTensor

KINDS = ("key", "value")
MAX_LAYER = 1023


@dataclass(frozen=True, eq=False)
class KVLayer:
    """Keys and values of one layer, of equal shape and element type; ``number`` is the one in the names."""

    number: int
    key: StoredTensor
    value: StoredTensor
    kv_heads: int
    head_dim: int
    dtype: str

    def tensor(self, kind: str) -> StoredTensor:
        return self.key if kind == "key" else self.value


@dataclass(frozen=True, eq=False)
class KVSource:
    """What was recognised in an input: ``layers`` by ascending number, all with the same sequences and tokens.

    ``layout`` is one of :data:`.layouts.LAYOUTS`, ``layout_reason`` says why; ``key_template`` and ``value_template``
    restore the names; ``others`` counts tensors that are neither keys nor values.
    """

    path: str
    layers: tuple[KVLayer, ...]
    sequences: int
    tokens: int
    layout: str
    layout_reason: str
    key_template: str
    value_template: str
    others: int

    def layer(self, number: int) -> KVLayer:
        """The layer of that number; :class:`InputError` ``layer-missing`` if there is none."""
        for layer in self.layers:
            if layer.number == number:
                return layer
        have = format_numbers(layer.number for layer in self.layers)
        raise InputError(f"there is no layer {number}; the layers are {have}", code="layer-missing", path=self.path)

    def read(self, layer: int, kind: str, sequence: int, start: int, stop: int) -> NDArray[Any]:
        """Tokens ``[start, stop)`` of one tensor as ``[t, H, D]`` in the stored element type; reads no other bytes."""
        return self.layer(layer).tensor(kind).read(self.layout, sequence, start, stop)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one sequence over all layers, keys and values."""
        return sum(2 * layer.kv_heads * layer.head_dim * FLOATS[layer.dtype] for layer in self.layers)

    @property
    def values(self) -> int:
        """All key and value numbers of all layers, sequences and tokens."""
        return sum(layer.key.values + layer.value.values for layer in self.layers)

    def describe(self) -> tuple[str, str]:
        """What was recognised, in two lines."""
        numbers = format_numbers(layer.number for layer in self.layers)
        one = len(self.layers) == 1
        heads = _span(layer.kv_heads for layer in self.layers)
        width = _span(layer.head_dim for layer in self.layers)
        dtypes = "/".join(sorted({layer.dtype for layer in self.layers}))
        axes = ",".join(self.layout)
        count = "1 sequence" if self.sequences == 1 else f"{self.sequences} sequences"
        ignored = f"; besides, {self.others} other tensor{'s' if self.others > 1 else ''}" if self.others else ""
        return (
            f"{len(self.layers)} layer{'' if one else 's'} ({numbers}): {self.key_template} and {self.value_template}",
            f"{dtypes} [{axes}] ({self.layout_reason}): {count} of {self.tokens} tokens, "
            f"{heads} KV head{'' if heads == '1' else 's'} of {width}{ignored}",
        )

    def record(self) -> dict[str, Any]:
        """What a file must remember to restore names and layout: ``{"key", "value", "layout"}``.

        ``key`` and ``value`` are templates with ``{layer}``, ``layout`` is spelled as in :data:`.layouts.LAYOUTS`.  The
        element type is the layer's own in the file.
        """
        return {"key": self.key_template, "value": self.value_template, "layout": self.layout}


def open_source(
    path: str | Path,
    *,
    key: str | None = None,
    value: str | None = None,
    layout: str | None = None,
    layers: Iterable[int] | None = None,
    bits: str | None = None,
) -> KVSource:
    """Recognise the keys and values in a file or folder, of this machine or at a URL; reads headers only.

    ``key`` and ``value`` are name patterns with ``{layer}`` (both or none), ``layout`` an axis order; without them
    names and layout are recognised, and :class:`InputError` says what to give if they cannot be.  ``layers`` takes
    only the layers of those numbers, and only they must agree with each other.  ``bits`` (``"bfloat16"`` or
    ``"float16"``) says what 16-bit integers stand for; without it they are refused like any non-float tensor.
    """
    tensors = list_tensors(path)
    try:
        naming = match(tensors, key, value) if key is not None and value is not None else recognise(tensors)
        if layers is not None:
            naming = _only(naming, set(layers))
        return _source(shown(str(path)), tensors, naming, layout, bits)
    except InputError as error:
        error.where.setdefault("path", shown(str(path)))
        raise


def _only(naming: Naming, numbers: set[int]) -> Naming:
    missing = sorted(numbers - set(naming.layers))
    if missing:
        raise InputError(
            f"there is no layer {format_numbers(missing)}; the layers are {format_numbers(naming.layers)}",
            code="layer-missing",
        )
    return replace(naming, layers={number: names for number, names in naming.layers.items() if number in numbers})


def _source(
    path: str, tensors: dict[str, StoredTensor], naming: Naming, layout: str | None, bits: str | None
) -> KVSource:
    beyond = [number for number in naming.layers if number > MAX_LAYER]
    if beyond:
        raise InputError(f"layer number {beyond[0]} is beyond {MAX_LAYER}", code="limit-layers")
    pairs = {
        number: (_as_float(tensors[names[0]], bits), _as_float(tensors[names[1]], bits))
        for number, names in naming.layers.items()
    }
    _check_floats(tensor for pair in pairs.values() for tensor in pair)
    _check_pairs(pairs)
    shapes = {tensor.name: tensor.shape for pair in pairs.values() for tensor in pair}
    axes, reason = decide_layout(shapes, layout)
    geometries = {number: Geometry.of(pair[0].shape, axes) for number, pair in pairs.items()}
    _check_extent(axes, pairs, geometries)
    first = next(iter(geometries.values()))
    layers = tuple(
        KVLayer(number, *pair, geometries[number].heads, geometries[number].head_dim, pair[0].dtype)
        for number, pair in pairs.items()
    )
    return KVSource(
        path=path,
        layers=layers,
        sequences=first.sequences,
        tokens=first.tokens,
        layout=axes,
        layout_reason=reason,
        key_template=naming.key,
        value_template=naming.value,
        others=len(tensors) - 2 * len(layers),
    )


def _as_float(tensor: StoredTensor, bits: str | None) -> StoredTensor:
    return replace(tensor, dtype=bits) if bits is not None and tensor.dtype in ("uint16", "int16") else tensor


def _check_floats(tensors: Iterable[StoredTensor]) -> None:
    wrong = [tensor for tensor in tensors if tensor.dtype not in FLOATS]
    if not wrong:
        return
    hint = ""
    if all(tensor.dtype in ("uint16", "int16") for tensor in wrong):
        hint = "; if these are bfloat16 bits, give --bits bfloat16"
    elif all(tensor.dtype == "float64" for tensor in wrong):
        hint = "; convert them to float32"
    found = listing(f"{tensor.name} is {tensor.dtype}" for tensor in wrong)
    raise InputError(f"keys and values must be bfloat16, float16 or float32{hint}" + found, code="dtype-unsupported")


def _check_pairs(pairs: dict[int, tuple[StoredTensor, StoredTensor]]) -> None:
    shapes = [
        f"layer {number}: {key.name} {list(key.shape)}, {value.name} {list(value.shape)}"
        for number, (key, value) in pairs.items()
        if key.shape != value.shape
    ]
    if shapes:
        raise InputError("keys and values of a layer must have the same shape" + listing(shapes), code="shape-mismatch")
    dtypes = [
        f"layer {number}: {key.name} is {key.dtype}, {value.name} is {value.dtype}"
        for number, (key, value) in pairs.items()
        if key.dtype != value.dtype
    ]
    if dtypes:
        raise InputError("keys and values of a layer must have the same type" + listing(dtypes), code="dtype-mismatch")


def _check_extent(
    layout: str, pairs: dict[int, tuple[StoredTensor, StoredTensor]], geometries: dict[int, Geometry]
) -> None:
    lines = [f"layer {number}: {pairs[number][0].name} {list(pairs[number][0].shape)}" for number in geometries]
    if len({(geometry.sequences, geometry.tokens) for geometry in geometries.values()}) > 1:
        raise InputError(
            f"all layers must have the same number of sequences and tokens (read as {layout}); "
            "use --layers to take those that agree" + listing(lines),
            code="tokens-mismatch",
        )
    if any(0 in (geo.sequences, geo.tokens, geo.heads, geo.head_dim) for geo in geometries.values()):
        raise InputError("the tensors are empty" + listing(lines), code="input-empty")


def _span(numbers: Iterable[int]) -> str:
    distinct = sorted(set(numbers))
    return str(distinct[0]) if len(distinct) == 1 else f"{distinct[0]} to {distinct[-1]}"

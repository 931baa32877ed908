"""llama.cpp: sequence state files (``ggsq``, version 2) to ``.dqkv`` and back.

``llama_state_seq_save_file`` and the server's ``/slots/ID?action=save`` write them.  All numbers are little-endian:

    u32 magic 0x67677371, u32 version, u32 token count, i32 token ids
    u32 streams; of each: u32 cells, and if there are any
        of every cell: i32 position, u32 sequence ids (1), i32 sequence id
        u32 values are transposed, u32 layers
        keys of every layer: i32 type, u64 bytes of a row, one row [H * D] a cell
        values of every layer: the same
        or transposed: i32 type, u32 bytes of a number, u32 H * D, one row [cells] a channel

Caches of F16, F32 and BF16 are read; what llama.cpp quantised already is refused.  Models with positions in more than
one dimension, sliding windows or recurrent layers write other states and are refused too.  Keys stand in the order of
channels that llama.cpp has, so a file made here goes back to llama.cpp and not to another engine.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError, IdentityError, InputError, LimitError, TruncatedError, UnsupportedError
from ..file import create
from ..file.layer import Layer
from ..file.reader import Reader
from ..file.structs import MAX_JSON
from ..profile import DEFAULT_PROFILE, Profile

MAGIC = 0x67677371
SESSION_MAGIC = 0x6767736E
VERSION = 2
#: Numbers that ggml has for types, those that hold plain numbers.
TYPES: dict[int, np.dtype[Any]] = {
    0: np.dtype("<f4"),
    1: np.dtype("<f2"),
    30: np.dtype(ml_dtypes.bfloat16),
}
QUANTISED = {2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 20: "iq4_nl"}
#: The key of the file's metadata under which what only llama.cpp needs stands.
FACTS = "llama.cpp"
#: More token ids than a header has room for stand in an exact layer behind those of the model: the key of a token is
#: its id's multiple of 65536 and its value the rest, both of which float32 holds exactly.
IDS = "ids"
IDS_SPLIT = 1 << 16
#: Tokens taken in and decoded at a time.
PORTION = 4096


@dataclass(frozen=True, eq=False)
class State:
    """A sequence state: ``tokens`` int32, ``keys`` and ``values`` of each layer ``[cells, H * D]`` by position.

    ``streams`` and ``stream`` say how many the cache had and which one held the sequence, ``sequence`` is its id there,
    ``position`` that of the first cell; the others follow without gap.
    """

    tokens: NDArray[np.int32]
    keys: list[NDArray[Any]]
    values: list[NDArray[Any]]
    position: int = 0
    transposed: bool = False
    streams: int = 1
    stream: int = 0
    sequence: int = 0


class _Bytes:
    """Fields of a file, one after another."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data = data
        self._at = 0

    def numbers(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{layout}", self.array(np.dtype(np.uint8), struct.calcsize(f"<{layout}")).tobytes())

    def number(self, layout: str) -> int:
        return int(self.numbers(layout)[0])

    def array(self, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        size = count * dtype.itemsize
        if size > len(self._data) - self._at:
            raise TruncatedError(
                f"the state ends at byte {len(self._data)}, {size} more are needed from {self._at} on",
                code="state-truncated",
                offset=self._at,
            )
        part = self._data[self._at : self._at + size]
        self._at += size
        return part.view(dtype) if part.ctypes.data % max(1, dtype.alignment) == 0 else part.copy().view(dtype)

    @property
    def rest(self) -> int:
        return len(self._data) - self._at


def is_state(path: str | PathLike[str]) -> bool:
    """Whether a file begins as a state of llama.cpp."""
    with Path(path).open("rb") as file:
        head = file.read(4)
    return len(head) == 4 and struct.unpack("<I", head)[0] in (MAGIC, SESSION_MAGIC)


def read_state(path: str | PathLike[str]) -> State:
    """The state of one sequence; the file is mapped, not read at once.

    Raises :class:`FormatError`, :class:`TruncatedError`, and :class:`UnsupportedError` for another version
    (``state-version``), a whole session (``state-session``), a quantised cache (``state-type``), and what else
    is no plain cache of one sequence (``state-cells``, ``state-layers``).
    """
    size = Path(path).stat().st_size
    data = _Bytes(np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8))
    magic, version, count = data.numbers("III")
    if magic == SESSION_MAGIC:
        raise UnsupportedError(
            "a whole session (ggsn); save the sequence alone: llama_state_seq_save_file, or /slots/ID?action=save",
            code="state-session",
        )
    if magic != MAGIC:
        raise FormatError(f"no state of llama.cpp: it begins with {magic:#x}", code="state-magic")
    if version != VERSION:
        raise UnsupportedError(
            f"a state of version {version}; this reads {VERSION}, whose layout is known", code="state-version"
        )
    tokens = data.array(np.dtype("<i4"), count).astype(np.int32)
    streams = data.number("I")
    if not 1 <= streams <= 1 << 16:
        raise FormatError(f"a state of {streams} streams", code="state-streams")
    found = None
    for stream in range(streams):
        cells = data.number("I")
        if cells and found:
            raise UnsupportedError("cells in several streams; save one sequence", code="state-cells")
        if cells:
            found = State(tokens, **_read_stream(data, cells), streams=streams, stream=stream)
    if data.rest:
        raise UnsupportedError(
            f"{data.rest} bytes follow the cache: the model has more than plain attention", code="state-layers"
        )
    if not found:
        raise InputError("the state holds no cells", code="state-cells")
    return found


def _read_stream(data: _Bytes, cells: int) -> dict[str, Any]:
    """The members of a :class:`State` that a stream has, by name."""
    meta = data.array(np.dtype([("position", "<i4"), ("ids", "<u4"), ("id", "<i4")]), cells)
    order = np.argsort(meta["position"], kind="stable")
    positions = meta["position"][order]
    # With a second dimension of positions every cell is longer, and what is read as a count is none.
    if (
        (meta["ids"] != 1).any()
        or (meta["id"] != meta["id"][0]).any()
        or positions[0] < 0
        or (np.diff(positions) != 1).any()
    ):
        raise UnsupportedError(
            "cells are not one sequence of consecutive positions in one dimension", code="state-cells"
        )
    transposed, layers = data.numbers("II")
    if transposed not in (0, 1) or not 1 <= layers <= 1024:
        raise FormatError(f"{layers} layers, transposed {transposed}", code="state-layers")
    keys, values = [], []
    for layer in range(layers):
        keys.append(_read_rows(data, cells, layer, "key")[order])
    for layer in range(layers):
        if not transposed:
            rows = _read_rows(data, cells, layer, "value")
        else:
            dtype = _dtype(data.number("i"), layer, "value")
            size, width = data.numbers("II")
            if size != dtype.itemsize:
                raise FormatError(f"values of {size} bytes in layer {layer}", code="state-layers", layer=layer)
            rows = data.array(dtype, width * cells).reshape(width, cells).T
        if rows.shape != keys[layer].shape or rows.dtype != keys[layer].dtype:
            raise UnsupportedError(
                f"keys and values of layer {layer} differ in width or type", code="state-layers", layer=layer
            )
        values.append(rows[order])
    return {
        "keys": keys,
        "values": values,
        "position": int(positions[0]),
        "transposed": bool(transposed),
        "sequence": int(meta["id"][0]),
    }


def _read_rows(data: _Bytes, cells: int, layer: int, kind: str) -> NDArray[Any]:
    dtype = _dtype(data.number("i"), layer, kind)
    size = data.number("Q")
    if size % dtype.itemsize or not size:
        raise FormatError(f"rows of {size} bytes in layer {layer}", code="state-layers", layer=layer)
    return data.array(dtype, cells * (size // dtype.itemsize)).reshape(cells, -1)


def _dtype(number: int, layer: int, kind: str) -> np.dtype[Any]:
    if number not in TYPES:
        raise UnsupportedError(
            f"the {kind}s of layer {layer} are of type {QUANTISED.get(number, number)}; run llama.cpp with "
            "--cache-type-k f16 --cache-type-v f16",
            code="state-type",
            layer=layer,
        )
    return TYPES[number]


def write_state(path: str | PathLike[str], state: State) -> None:
    """The reverse of :func:`read_state`; the file appears whole or not at all."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    numbers = {dtype: number for number, dtype in TYPES.items()}
    cells = len(state.keys[0])
    try:
        with partial.open("wb") as out:
            out.write(struct.pack("<III", MAGIC, VERSION, len(state.tokens)) + state.tokens.astype("<i4").tobytes())
            out.write(struct.pack("<I", state.streams) + bytes(4 * state.stream) + struct.pack("<I", cells))
            for cell in range(cells):
                out.write(struct.pack("<iIi", state.position + cell, 1, state.sequence))
            out.write(struct.pack("<II", state.transposed, len(state.keys)))
            for rows in state.keys:
                out.write(struct.pack("<iQ", numbers[rows.dtype], rows.shape[1] * rows.dtype.itemsize))
                out.write(np.ascontiguousarray(rows).view(np.uint8).data)
            for rows in state.values:
                if state.transposed:
                    out.write(struct.pack("<iII", numbers[rows.dtype], rows.dtype.itemsize, rows.shape[1]))
                    rows = rows.T
                else:
                    out.write(struct.pack("<iQ", numbers[rows.dtype], rows.shape[1] * rows.dtype.itemsize))
                out.write(np.ascontiguousarray(rows).view(np.uint8).data)
            out.write(bytes(4 * (state.streams - state.stream - 1)))
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def to_dqkv(
    state: State,
    path: str | PathLike[str],
    head_dim: int,
    *,
    profile: str | Profile = DEFAULT_PROFILE,
    recent: int = 128,
    sinks: int | None = None,
    model: str = "",
    threads: int = 1,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Code a state into a file.  ``head_dim`` is what a state does not say.

    Token ids stand in the file's header; those of long sequences (more than about 25,000) in an exact layer of 1 head
    of 1 value behind the layers of the model.

    Raises :class:`InputError` (``state-heads``) where it does not divide the rows, and :class:`LimitError`
    (``limit-json``) for ids of more tokens than the cache holds, if they do not fit the header.
    """
    layers = []
    for number, rows in enumerate(state.keys):
        if head_dim < 1 or rows.shape[1] % head_dim:
            raise InputError(
                f"layer {number} has rows of {rows.shape[1]} numbers, which heads of {head_dim} do not divide",
                code="state-heads",
                layer=number,
            )
        layers.append(Layer(rows.shape[1] // head_dim, head_dim, _name(rows.dtype), profile))
    facts: dict[str, Any] = {
        "version": VERSION,
        "tokens": base64.b64encode(zlib.compress(state.tokens.astype("<i4").tobytes(), 9)).decode(),
        "transposed": state.transposed,
        "streams": state.streams,
        "stream": state.stream,
        "sequence": state.sequence,
    }
    ids = None
    if len(facts["tokens"]) > MAX_JSON - 1024:
        cells = len(state.keys[0])
        if len(state.tokens) > cells:
            raise LimitError(
                f"{len(state.tokens)} token ids fit neither the header of a file nor its {cells} tokens",
                code="limit-json",
            )
        ids = np.zeros((2, cells, 1, 1), np.float32)
        ids[:, : len(state.tokens), 0, 0] = np.divmod(state.tokens, IDS_SPLIT)
        facts = {**facts, "tokens": len(state.tokens), IDS: len(layers)}
        layers.append(Layer(1, 1, "float32", storage="exact"))
    with create(
        path, layers, sinks=sinks, recent=recent, model=model, positions_start=state.position,
        metadata={FACTS: facts}, threads=threads, progress=progress,
    ) as out:  # fmt: skip
        for start in range(0, len(state.keys[0]), PORTION):
            part = slice(start, start + PORTION)
            keys, values = (
                [np.reshape(x[part], (-1, layer.kv_heads, head_dim)) for x, layer in zip(rows, layers)]
                for rows in (state.keys, state.values)
            )
            if ids is not None:
                keys, values = ([*rows, x[part]] for rows, x in zip((keys, values), ids))
            out.append(keys, values)


def from_dqkv(file: Reader) -> State:
    """The state that :func:`to_dqkv` made a file of, decoded.

    Raises :class:`IdentityError` (``identity-state``) for a file that does not come from llama.cpp.
    """
    facts = file.metadata.get(FACTS)
    if not isinstance(facts, dict) or facts.get("version") != VERSION:
        raise IdentityError("the file was not made from a state of llama.cpp", code="identity-state")
    layers = list(file.layers)
    try:
        if IDS in facts:
            stored = layers.pop(int(facts[IDS]))
            high, low = (getattr(stored, kind)[: int(facts["tokens"])] for kind in ("key", "value"))
            tokens = (high.reshape(-1).astype(np.int64) * IDS_SPLIT + low.reshape(-1).astype(np.int64)).astype(np.int32)
        else:
            tokens = np.frombuffer(zlib.decompress(base64.b64decode(facts["tokens"])), "<i4").astype(np.int32)
        places = [int(facts[name]) for name in ("streams", "stream", "sequence")]
        transposed = bool(facts["transposed"])
    except (IndexError, KeyError, TypeError, ValueError, zlib.error):
        raise FormatError("what the file says of its state is damaged", code="state-facts") from None
    keys, values = (
        [np.reshape(getattr(layer, kind)[:], (layer.tokens, -1)) for layer in layers] for kind in ("key", "value")
    )
    return State(tokens, keys, values, file.header.info.positions_start, transposed, *places)


def _name(dtype: np.dtype[Any]) -> str:
    return {4: "float32", 2: "float16"}[dtype.itemsize] if dtype.kind == "f" else "bfloat16"

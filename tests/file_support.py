"""Making, damaging and crafting small ``.dqkv`` files for the tests of the file layer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dquantcodec.codec import Codec
from dquantcodec.file import Layer, create
from dquantcodec.file import structs as s
from dquantcodec.plan import Plan
from dquantcodec.testing.plans import SMALL as SMALL

FORMATS = Path(__file__).parents[1] / "formats"
FILE_ID = bytes(range(16))

Pairs = list[tuple[NDArray[Any], NDArray[Any]] | tuple[None, None]]


def load_source(name: str, path: Path) -> ModuleType:
    """The module that the source file at ``path`` is."""
    spec = spec_from_file_location(name, path)
    assert spec and spec.loader
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


#: The decoder in plain Python, written from the specification.
plain_reader = load_source("plain_reader", FORMATS / "reader.py")


def tensors(layers: Sequence[Layer], tokens: int, seed: int = 0) -> Pairs:
    """Keys and values of every layer, None for absent ones."""
    rng = np.random.default_rng(seed)
    return [
        (None, None)
        if layer.storage == "absent"
        else tuple(
            rng.standard_normal((tokens, layer.kv_heads, layer.head_dim)).astype(layer.array_dtype) for _ in range(2)
        )  # type: ignore[misc]
        for layer in layers
    ]


def write(path: Path, layers: Sequence[Layer], pairs: Pairs, cuts: Sequence[int] = (), **options: Any) -> bytes:
    """The bytes of a file of one sequence, its tokens appended in portions that end at ``cuts``."""
    tokens = max((len(keys) for keys, _ in pairs if keys is not None), default=0)
    with create(path, layers, _file_id=FILE_ID, **options) as writer:
        for start, stop in zip([0, *cuts], [*cuts, tokens]):
            writer.append(*part(pairs, start, stop))
    return path.read_bytes()


def part(pairs: Pairs, start: int, stop: int) -> tuple[list[Any], list[Any]]:
    """Tokens ``start`` to ``stop`` of all layers, as :meth:`Writer.append` takes them."""
    cut = [tuple(None if a is None else a[start:stop] for a in pair) for pair in pairs]
    return [keys for keys, _ in cut], [values for _, values in cut]


def expected(
    layer: Layer, pair: tuple[Any, Any], sinks: int, recent: int, dtype: Any = None, plan: Plan | None = None
) -> tuple[Any, Any]:
    """What a file must return for ``pair``: exact rows at both ends, the codec's own round trip between them.

    ``plan`` is the one the file holds, for profiles that are fitted.
    """
    dtype = layer.array_dtype if dtype is None else dtype
    keys, values = (np.array(array).astype(dtype) for array in pair)
    tokens = len(keys)
    stop = max(sinks, tokens - recent)
    if layer.storage == "coded" and stop > sinks:
        plan = plan or layer.resolved(0).plan
        assert plan is not None
        codec = Codec(plan)
        pages = codec.encode(pair[0][sinks:stop], pair[1][sinks:stop])
        keys[sinks:stop], values[sinks:stop] = codec.decode(pages, dtype=dtype)
    return keys, values


def same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Equal in dtype, shape and every bit."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def with_header_crc(data: bytes) -> bytes:
    """``data`` with the header block's checksum made right again."""
    size = min(int.from_bytes(data[12:16], "little"), len(data))
    crc = s.crc32c(data[128:size], s.crc32c(data[:124]))
    return data[:124] + crc.to_bytes(4, "little") + data[128:]


def record_offsets(data: bytes) -> list[int]:
    """Where the records of an undamaged file begin."""
    offset = int.from_bytes(data[12:16], "little")
    offsets = []
    while offset < len(data):
        header = s.RecordHeader.unpack(data[offset : offset + 64])
        assert header is not None
        offsets.append(offset)
        offset = s.align(offset + 64 + header.payload_bytes, s.BLOCK)
    return offsets


def edit_record(data: bytes, number: int, change: Callable[[dict[str, Any]], None]) -> bytes:
    """``data`` without its INDEX, the header fields of record ``number`` changed, all checksums right."""
    offsets = record_offsets(data)
    data = data[: offsets[-1]]
    offset = offsets[number]
    header = s.RecordHeader.unpack(data[offset : offset + 64])
    assert header is not None
    fields = dict(header.__dict__)
    change(fields)
    return data[:offset] + s.RecordHeader(**fields).pack() + data[offset + 64 :]

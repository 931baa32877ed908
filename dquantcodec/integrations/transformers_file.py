"""A :class:`~dquantcodec.integrations.transformers.DQuantCache` as a ``.dqkv`` file, and back.

A sequence of the file is a row of the batch without its padding; a layer of the file is a layer of the model that holds
keys and values of its own.  A sliding-window layer that has dropped tokens is stored with zeros in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import DummyLayer, DynamicIndexedLayer, DynamicLayer, LinearAttentionCacheLayerMixin

from ..errors import IdentityError, InputError, UnsupportedError
from ..file import create
from ..file.compose import write_pages, write_rows
from ..file.layer import Layer
from ..file.reader import Reader, open
from ..file.structs import EXACT_ONLY
from ..file.writer import Writer
from ..foreign import to_numpy
from ..plan import make_plan
from .tensors import as_torch
from .transformers_layer import DQuantLayer
from .transformers_rows import Row

#: The key of the file's metadata under which the cache's own facts stand.
FACTS = "transformers"


def save(cache: Any, path: str | PathLike[str], model: str, revision: str, metadata: Mapping[str, Any]) -> None:
    """Write ``cache`` to ``path``; see :meth:`DQuantCache.save`."""
    held = dict(_held(cache))
    if not held:
        raise InputError("the cache holds no tokens yet", code="cache-empty")
    if FACTS in metadata:
        raise InputError(f"metadata {FACTS!r} is the cache's own; choose another name", code="info-field")
    coded = cache.coded_layers
    rows = [layer.rows for layer in coded.values()]
    padding = [row.padding for row in rows[0]] if rows else [0] * len(next(iter(held.values())).keys)
    tokens = {layer.get_seq_length() for layer in held.values()}
    if len(tokens) > 1:
        raise InputError(f"layers hold {sorted(tokens)} tokens; save between forward passes", code="cache-layer")
    facts = {
        "tokens": tokens.pop(),
        "padding": padding,
        "planned": sorted(cache.plans),
        "held": {str(n): int(layer.keys.shape[-2]) for n, layer in held.items() if n not in coded},
    }
    settings = cache.settings
    layers = [_layer(cache, number, layer) for number, layer in held.items()]
    with create(
        path, layers, sinks=settings.sinks, recent=settings.recent, model=model, revision=revision,
        metadata={**metadata, FACTS: facts}, sequences=len(padding),
    ) as writer:  # fmt: skip
        for sequence, skipped in enumerate(padding):
            _write(writer, sequence, facts["tokens"] - skipped, held, settings.sinks)


def _held(cache: Any) -> Iterator[tuple[int, Any]]:
    """Layers with keys and values of their own, by number."""
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, DummyLayer):
            continue
        if isinstance(layer, (LinearAttentionCacheLayerMixin, DynamicIndexedLayer)) or not isinstance(
            layer, DynamicLayer
        ):
            raise UnsupportedError(
                f"layer {number} is a {type(layer).__name__}: a file holds keys and values of tokens alone",
                code="cache-layer",
                layer=number,
            )
        if layer.is_initialized:
            yield number, layer


def _layer(cache: Any, number: int, layer: Any) -> Layer:
    if isinstance(layer, DQuantLayer):
        heads, _, dim = layer.rows[0].keys.shape
        dtype = layer.rows[0].keys.dtype
        # Without pages any plan of the profile serves; the facts say that none was fitted.
        plan = layer.plan or make_plan(cache.settings.profile, heads, dim)
        return Layer(heads, dim, _name(dtype), plan, number=number)
    _, heads, _, dim = layer.keys.shape
    if layer.values.shape != layer.keys.shape:
        raise UnsupportedError(f"keys and values of layer {number} differ in shape", code="cache-layer", layer=number)
    return Layer(heads, dim, _name(layer.keys.dtype), storage="exact", number=number)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write(writer: Writer, sequence: int, tokens: int, held: Mapping[int, Any], sinks: int) -> None:
    """One sequence: leading rows, pages with the exact layers' rows beside them, newest rows."""
    coded = [layer for layer in held.values() if isinstance(layer, DQuantLayer)]
    pages = {len(layer.rows[sequence].pages) for layer in coded} or {0}
    if len(pages) > 1:
        raise InputError(f"layers hold {sorted(pages)} pages; give plans for all or for none", code="cache-layer")
    windows = pages.pop()
    window = coded[0].window if coded else 1
    first, last = (sinks, sinks + windows * window) if windows else (0, 0)

    def rows(start: int, stop: int) -> list[NDArray[Any]]:
        found = []
        for layer in held.values():
            if isinstance(layer, DQuantLayer):
                row = layer.rows[sequence]
                skipped = windows * window if start >= last else 0
                part = slice(start - skipped, stop - skipped)
                found += [_numpy(x[:, part]) for x in (row.keys, row.values)]
            else:
                found += [_sliding(x[sequence], tokens, start, stop) for x in (layer.keys, layer.values)]
        return found

    ready = [layer.store.data(layer.rows[sequence].pages) for layer in coded if layer.store] if windows else []
    exact = [
        _sliding(x[sequence], tokens, first, last)
        for layer in held.values()
        if not isinstance(layer, DQuantLayer)
        for x in (layer.keys, layer.values)
    ]
    put_ready(writer, sequence, rows(0, first), ready, exact, window, rows(last, tokens))


def put_ready(
    writer: Writer,
    sequence: int,
    leading: list[NDArray[Any]],
    pages: list[NDArray[np.uint8]],
    exact: list[NDArray[Any]],
    window: int,
    newest: list[NDArray[Any]],
) -> None:
    """A whole sequence that is coded already, record by record, in the order of the format's clause 4.2."""
    first = len(leading[0]) if leading else 0
    layers = writer._header.layers
    present, beside_pages = ([layers[place] for place in places] for places in (writer._present, writer._exact))
    write_rows(writer._log, present, sequence, 0, leading)
    windows = len(pages[0]) if pages else 0
    for start in range(0, windows, writer._run_windows):
        stop = min(start + writer._run_windows, windows)
        at, tokens = first + start * window, (stop - start) * window
        write_pages(writer._log, writer._run, sequence, at, tokens, [[part[start:stop]] for part in pages])
        beside = [array[start * window : stop * window] for array in exact]
        write_rows(writer._log, beside_pages, sequence, at, beside, EXACT_ONLY)
    write_rows(writer._log, present, sequence, first + windows * window, newest)


def _numpy(x: torch.Tensor) -> NDArray[Any]:
    """``[H, t, D]`` of a device as ``[t, H, D]`` in the CPU's memory."""
    return np.ascontiguousarray(to_numpy(x.transpose(0, 1).cpu(), "rows"))


def _sliding(x: torch.Tensor, tokens: int, start: int, stop: int) -> NDArray[Any]:
    """Tokens ``start`` to ``stop`` of a layer that holds the newest ones of ``tokens``, ``[t, H, D]``; others are 0."""
    held = _numpy(x)[-tokens:] if tokens else _numpy(x)[:0]
    dropped = tokens - len(held)
    found = np.zeros((stop - start, *held.shape[1:]), held.dtype)
    if stop > dropped:
        found[max(0, dropped - start) :] = held[max(0, start - dropped) : stop - dropped]
    return found


def load(
    kind: type[Any], path: str | PathLike[str], config: Any, model: str | None, threads: int, settings: dict[str, Any]
) -> Any:
    """A ``kind`` from the file at ``path``; see :meth:`DQuantCache.load`."""
    with open(path, expect={} if model is None else {"model": model}, threads=threads) as file:
        facts = file.metadata.get(FACTS)
        if not isinstance(facts, dict):
            raise IdentityError(f"{path} was not saved from a cache of transformers", code="identity-cache")
        specs = {layer.spec.number: layer.spec for layer in file.layers}
        plans = {number: spec.plan for number, spec in specs.items() if number in facts["planned"]}
        exact = {number for number, spec in specs.items() if spec.storage == "exact"}
        cache = kind(
            config,
            **{
                "sinks": file.header.sinks,
                "recent": file.header.recent,
                "plans": plans,
                "threads": threads,
                **settings,
            },
            exact_layers=exact,
        )
        if cache.settings.sinks != file.header.sinks:
            raise InputError(f"the file keeps {file.header.sinks} sinks; load it with as many", code="cache-settings")
        _check(cache, file, specs)
        for place, number in enumerate(specs):
            assert number is not None
            _fill(cache, number, [sequence.layers[place] for sequence in file.sequences], facts)
    return cache


def _check(cache: Any, file: Reader, specs: Mapping[int | None, Layer]) -> None:
    config = cache.config
    heads = getattr(config, "num_key_value_heads", None)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for number, spec in specs.items():
        if number is None or number >= len(cache.layers) or isinstance(cache.layers[number], DummyLayer):
            raise IdentityError(
                f"{file.path} has a layer {number}, the model {len(cache.layers)} layers", code="identity-layers"
            )
        layer = cache.layers[number]
        if spec.storage == "coded" and not isinstance(layer, DQuantLayer):
            raise IdentityError(f"layer {number} of the model has no full attention", code="identity-layers")
        if isinstance(layer, DQuantLayer):
            if spec.plan and spec.plan.window != layer.window:
                raise IdentityError(
                    f"pages of {spec.plan.window} tokens, a profile of {layer.window}: load with the profile of the "
                    "file",
                    code="identity-window",
                )
            if (spec.kv_heads, spec.head_dim) != (heads, dim) and heads is not None:
                raise IdentityError(
                    f"layer {number} of the file has {spec.kv_heads} heads of {spec.head_dim}, the model {heads} of "
                    f"{dim}",
                    code="identity-kv-heads",
                )


def _fill(cache: Any, number: int, readers: list[Any], facts: Mapping[str, Any]) -> None:
    layer = cache.layers[number]
    if isinstance(layer, DQuantLayer):
        rows = []
        for reader, padding in zip(readers, facts["padding"]):
            keys, values = (as_torch(x).transpose(0, 1) for x in reader.exact_rows())
            pages = reader.pages().data if reader.coded_tokens else np.empty((0, 0), np.uint8)
            rows.append(Row(padding, keys, values, pages))
        layer.restore(rows, facts["tokens"])
        return
    held = facts["held"][str(number)]
    parts = []
    for name in ("key", "value"):
        rows_of = []
        for reader in readers:
            tensor = getattr(reader, name)
            stored = as_torch(tensor[max(0, reader.tokens - held) :]).transpose(0, 1)
            missing = stored.new_zeros(stored.shape[0], held - stored.shape[1], stored.shape[2])
            rows_of.append(torch.cat([missing, stored], dim=1))
        parts.append(torch.stack(rows_of))
    layer.lazy_initialization(*parts)
    layer.keys, layer.values = parts
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = facts["tokens"]

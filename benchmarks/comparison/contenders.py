"""Everything that is compared, as an encoder and a decoder that can be timed apart.

What can be taken from elsewhere is: our profiles and byte counts from ``benchmarks/quality/ours.py``, the quantisers of
published packages from the packages, and otherwise the own code of ``benchmarks/quality/peers``.  What a package needs
that is not installed is reported, and the rest runs without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import blocks
import numpy as np
import ours
from method import Coded
from numpy.typing import NDArray
from peers import affine, turbo_attn

from dquantcodec import PROFILES, Codec, fit_plan
from dquantcodec.file.groupings import plan_bytes

Array = NDArray[np.float32]

#: Our profiles in the table.
PROFILE_NAMES = ("3.0", "2.26", "2.26-t", "1.96", "paper-2.26")
#: The group of transformers' quantised caches, their default.
GROUP = 64


@dataclass(frozen=True, eq=False)
class Coder:
    """One layer, ready to be coded: its numbers are in the dtype and order that the implementation wants.

    ``encode()`` gives what is stored, ``decode(stored)`` what the implementation calls decoded, ``arrays(decoded)``
    keys and values float32 ``[T, H, D]`` of it, ``sizes(stored)`` the bytes of keys and of values with all that has to
    be kept for them.
    """

    encode: Callable[[], Any]
    decode: Callable[[Any], Any]
    arrays: Callable[[Any], tuple[Array, Array]]
    sizes: Callable[[Any], tuple[float, float]]

    def code(self) -> Coded:
        stored = self.encode()
        return Coded(*self.arrays(self.decode(stored)), *self.sizes(stored))


@dataclass(frozen=True)
class Contender:
    """``make(keys, values)`` takes float32 ``[T, H, D]`` of one layer, the numbers that a float16 cache held.

    ``runs`` says what the speed is a speed of; ``package`` names what must be installed for it.
    """

    name: str
    family: str
    runs: str
    make: Callable[[Array, Array], Coder]
    package: str = ""

    def code(self, keys: Array, values: Array) -> Coded:
        return self.make(keys, values).code()


def dquantcodec(keys: Array, values: Array, *, profile: str) -> Coder:
    """Fitted to the layer itself, as files do; leading tokens stay exact as the profile asks, at 16 bits a value."""
    sinks = min(PROFILES[profile].sinks, len(keys) - 1)
    key_rows, value_rows = (np.ascontiguousarray(x[sinks:], np.float16) for x in (keys, values))
    codec = Codec(fit_plan(profile, key_rows, value_rows), threads=1)

    def sizes(pages: Any) -> tuple[float, float]:
        beside = 2 * keys[:sinks].size + plan_bytes(codec.plan) / 2
        key_bytes, value_bytes = ours.stored_bytes(codec, len(key_rows))
        return key_bytes + beside, value_bytes + beside

    def arrays(decoded: Any) -> tuple[Array, Array]:
        first = (keys[:sinks], values[:sinks])
        return tuple(np.concatenate(parts) for parts in zip(first, decoded))  # type: ignore[return-value]

    return Coder(lambda: codec.encode(key_rows, value_rows), codec.decode, arrays, sizes)


def _both(
    keys: Any, values: Any, encode: Callable[[Any], Any], decode: Callable[[Any], Any],
    array: Callable[[Any], Array], size: Callable[[Any], float],
) -> Coder:  # fmt: skip
    """Keys and values coded in the same way, one after the other."""
    return Coder(
        lambda: (encode(keys), encode(values)),
        lambda stored: tuple(map(decode, stored)),
        lambda decoded: tuple(map(array, decoded)),  # type: ignore[arg-type,return-value]
        lambda stored: tuple(map(size, stored)),  # type: ignore[arg-type,return-value]
    )


def transformers_layer(keys: Array, values: Array, *, kind: str, **settings: Any) -> Coder:
    """The quantiser of one of transformers' own quantised cache layers, on float16 ``[1, H, T, D]``."""
    layer = getattr(import_module("transformers.cache_utils"), kind)(**settings)
    states = [_states(x) for x in (keys, values)]
    if kind == "Fp8QuantizedLayer":
        # Its lazy initialisation quantises; only the dtype is wanted.
        layer.keys = layer.values = states[0][..., :0, :]
        quantise = [layer._quantize, layer._quantize]
    else:
        layer.lazy_initialization(*states)
        quantise = [partial(layer._quantize, axis=axis) for axis in (layer.axis_key, layer.axis_value)]
    return Coder(
        lambda: [one(x) for one, x in zip(quantise, states)],
        lambda stored: [layer._dequantize(part) for part in stored],
        lambda decoded: tuple(_rows(x) for x in decoded),  # type: ignore[return-value]
        lambda stored: tuple(tensor_bytes(part) for part in stored),  # type: ignore[return-value]
    )


def _states(x: Array) -> Any:
    """float16 ``[1, H, T, D]`` of ``[T, H, D]``, as a model hands it to its cache."""
    torch = import_module("torch")
    return torch.from_numpy(np.ascontiguousarray(x.transpose(1, 0, 2)[None], np.float16))


def _rows(x: Any) -> Array:
    return np.ascontiguousarray(x.float().numpy()[0].transpose(1, 0, 2))


def tensor_bytes(thing: Any) -> float:
    """Bytes of all tensors in ``thing``; sizes and names in between are constants."""
    torch = import_module("torch")
    if hasattr(thing, "__tensor_flatten__"):
        return sum(tensor_bytes(getattr(thing, name)) for name in thing.__tensor_flatten__()[0])
    if isinstance(thing, torch.Tensor):
        return float(thing.numel() * thing.element_size())
    if isinstance(thing, dict):
        return sum(map(tensor_bytes, thing.values()))
    return sum(map(tensor_bytes, thing)) if isinstance(thing, (list, tuple)) else 0.0


def turbo(keys: Array, values: Array, *, bits: int) -> Coder:
    codec = turbo_attn.codec(bits, keys.shape[2])
    torch = import_module("torch")
    tensors = [torch.from_numpy(np.ascontiguousarray(x)) for x in (keys, values)]
    kinds = ("k", "v")
    return Coder(
        lambda: [getattr(codec, f"compress_{kind}")(x) for kind, x in zip(kinds, tensors)],
        lambda stored: [getattr(codec, f"decompress_{kind}")(*part) for kind, part in zip(kinds, stored)],
        lambda decoded: tuple(x.float().numpy().reshape(keys.shape) for x in decoded),  # type: ignore[return-value]
        lambda stored: tuple(tensor_bytes(part) for part in stored),  # type: ignore[return-value]
    )


def aither(keys: Array, values: Array, *, bits: int) -> Coder:
    torch = import_module("torch")
    codec = import_module("aither_kvcache").TurboQuant(head_dim=keys.shape[2], bits=bits, device="cpu")
    tensors = [torch.from_numpy(np.ascontiguousarray(x, np.float16)) for x in (keys, values)]
    return _both(*tensors, codec.encode, lambda s: codec.decode(*s), lambda x: x.float().numpy(), tensor_bytes)


def llama_cpp(keys: Array, values: Array, *, kind: str) -> Coder:
    encode, decode = blocks.CODERS[kind]
    return _both(
        *(np.ascontiguousarray(x.reshape(-1, blocks.BLOCK)) for x in (keys, values)),
        encode, decode, lambda x: x.reshape(keys.shape), lambda stored: sum(part.nbytes for part in stored),
    )  # fmt: skip


def kivi(keys: Array, values: Array, *, bits: int, group: int) -> Coder:
    """Keys per channel over ``group`` tokens, values per token over ``group`` channels, codes packed into bytes."""
    tokens, _, dim = keys.shape

    def encode() -> Any:
        by_channel = np.ascontiguousarray(keys.transpose(1, 2, 0))
        parts = (by_channel, group), (values, min(group, dim))
        return [packed(*affine.quantise_groups(*part, bits), bits) for part in parts]

    def decode(stored: Any) -> Any:
        keys_by_channel, rows = (
            affine.restore_groups(*unpacked(*part, bits), length) for part, length in zip(stored, (tokens, dim))
        )
        return keys_by_channel.transpose(2, 0, 1), rows

    return Coder(
        encode, decode, lambda decoded: tuple(map(np.ascontiguousarray, decoded)),  # type: ignore[arg-type,return-value]
        lambda stored: tuple(sum(part.nbytes for part in one) for one in stored),  # type: ignore[return-value]
    )  # fmt: skip


def packed(codes: NDArray[np.uint8], scale: Any, zero: Any, bits: int) -> tuple[NDArray[np.uint8], Any, Any]:
    """Codes of 2 or 4 bits of the last axis, neighbours in one byte."""
    each = 8 // bits
    out = codes[..., ::each].copy()
    for place in range(1, each):
        out |= codes[..., place::each] << np.uint8(bits * place)
    return out, scale, zero


def unpacked(data: NDArray[np.uint8], scale: Any, zero: Any, bits: int) -> tuple[NDArray[np.uint8], Any, Any]:
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return (data[..., None] >> shifts & np.uint8(2**bits - 1)).reshape(*data.shape[:-1], -1), scale, zero


def contenders() -> Iterator[Contender]:
    for name in PROFILE_NAMES:
        family = "the paper's profile" if name.startswith("paper") else "dquantcodec"
        yield Contender(f"dquantcodec {name}", family, "Numba", partial(dquantcodec, profile=name))
    hqq = {"kind": "HQQQuantizedLayer", "axis_key": 1, "axis_value": 1, "q_group_size": GROUP}
    quanto = {"kind": "QuantoQuantizedLayer", "axis_key": 0, "axis_value": 0, "q_group_size": GROUP}
    for backend, settings, package in (("hqq", hqq, "hqq"), ("quanto", quanto, "optimum-quanto")):
        for bits in (4, 2):
            make = partial(transformers_layer, nbits=bits, **settings)
            name = f"transformers QuantizedCache, {backend}, {bits} bits"
            yield Contender(name, "transformers", "PyTorch", make, package)
    make = partial(transformers_layer, kind="Fp8QuantizedLayer")
    yield Contender("FP8 e4m3 (transformers' fp8 cache)", "FP8", "PyTorch", make, "transformers")
    for kind in ("q8_0", "q4_0"):
        yield Contender(f"llama.cpp {kind}", "llama.cpp", "own code, Numba", partial(llama_cpp, kind=kind))
    for bits in (4, 3, 2):
        yield Contender(f"turbo-attn {bits} bits", "turbo-attn", "PyTorch", partial(turbo, bits=bits), "turbo-attn")
    for bits in (4, 3, 2):
        make = partial(aither, bits=bits)
        yield Contender(f"aither-kvcache {bits} bits", "aither-kvcache", "PyTorch", make, "aither-kvcache")
    for bits, group in ((4, 32), (2, 32), (2, 128)):
        make = partial(kivi, bits=bits, group=group)
        yield Contender(f"KIVI {bits} bits, groups of {group}", "KIVI", "own code, NumPy", make)

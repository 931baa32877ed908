"""A model's own KV cache: filled by a prompt, its keys and values exchanged for reconstructions, and read on.

transformers keeps one layer object per model layer.  A full-attention layer holds all ``S`` tokens seen.  A layer with
a sliding window of ``w`` holds the last ``min(S, w - 1)``: the next token attends to itself and to ``w - 1`` before it.
Only what is held is coded, and the newest ``recent`` tokens of every layer stay exact, so a sliding layer has
``min(S, w - 1) - recent`` coded tokens and a full one ``S - recent``.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from method import Method
from numpy.typing import NDArray
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


@dataclass(frozen=True)
class CodedSize:
    """What replacing a cache cost and changed.

    ``stored_bytes`` and ``values`` count the coded tokens of all layers, keys and values together; ``tokens`` has the
    number of coded tokens of each layer.  ``key_nmse`` and ``value_nmse`` are error energy over energy of the coded
    tokens, averaged over the layers that code any (0 where none does).
    """

    stored_bytes: float
    values: int
    tokens: tuple[int, ...]
    key_nmse: float
    value_nmse: float

    @property
    def bits_per_value(self) -> float:
        return 8 * self.stored_bytes / self.values if self.values else 0.0


def prefill(network: Any, tokens: Sequence[int]) -> tuple[DynamicCache, torch.Tensor]:
    """The cache of ``tokens``, and the logits ``[V]`` of what follows them."""
    cache = DynamicCache(config=network.config)
    logits = read(network, tokens, cache, last_only=True)
    return cache, logits[-1]


@torch.inference_mode()
def read(network: Any, tokens: Sequence[int], cache: DynamicCache, *, last_only: bool = False) -> torch.Tensor:
    """Logits ``[len(tokens), V]`` (``[1, V]`` for the last only) after each token; ``cache`` grows by the tokens."""
    # transformers 5 renamed the argument; both names are in use.
    parameter = "cache" if "cache" in inspect.signature(network.forward).parameters else "past_key_values"
    output = network(
        torch.tensor([list(tokens)], device=network.device),
        use_cache=True,
        logits_to_keep=1 if last_only else 0,
        **{parameter: cache},
    )
    logits: torch.Tensor = output.logits[0]
    return logits


def shared_copy(cache: DynamicCache) -> DynamicCache:
    """A cache that grows on its own; tensors are shared, since layers only ever replace theirs by longer ones."""
    copied = copy.copy(cache)
    copied.layers = [copy.copy(layer) for layer in cache.layers]
    return copied


def coded_tokens(cache: DynamicCache, recent: int) -> tuple[int, ...]:
    """How many tokens of each layer are coded: all it holds but the newest ``recent``."""
    return tuple(max(0, _held(layer)[0].shape[-2] - recent) for layer in cache.layers)


@torch.inference_mode()
def coded_copy(cache: DynamicCache, method: Method, recent: int) -> tuple[DynamicCache, CodedSize]:
    """``cache`` with all but the newest ``recent`` tokens of every layer replaced by what ``method`` gives back."""
    copied = shared_copy(cache)
    counts = coded_tokens(cache, recent)
    stored, values, key_nmse, value_nmse = 0.0, 0, [], []
    layers: list[Any] = [layer for layer, count in zip(copied.layers, counts) if count]
    pairs = [
        tuple(_to_numpy(x[..., :count, :]) for x in _held(layer))
        for layer, count in zip(copied.layers, counts)
        if count
    ]
    for layer, (keys, exact_values), coded in zip(layers, pairs, method.code_layers(pairs)):
        count = len(keys)
        held_keys, held_values = _held(layer)
        if coded.keys.shape != keys.shape or coded.values.shape != exact_values.shape:
            raise ValueError(f"{method.name} returned {coded.keys.shape} and {coded.values.shape} for {keys.shape}")
        layer.keys = torch.cat([_to_torch(coded.keys, held_keys), held_keys[..., count:, :]], dim=-2)
        layer.values = torch.cat([_to_torch(coded.values, held_values), held_values[..., count:, :]], dim=-2)
        stored += coded.key_bytes + coded.value_bytes
        values += keys.size + exact_values.size
        key_nmse.append(_nmse(keys, coded.keys))
        value_nmse.append(_nmse(exact_values, coded.values))
    mean = [float(np.mean(x)) if x else 0.0 for x in (key_nmse, value_nmse)]
    return copied, CodedSize(stored, values, counts, *mean)


def greedy(network: Any, cache: DynamicCache, first: int, count: int) -> list[int]:
    """The ``count`` tokens of largest logit after ``first``; ``cache`` is not changed."""
    cache, token, chosen = shared_copy(cache), first, []
    for _ in range(count):
        token = int(read(network, [token], cache, last_only=True)[-1].argmax())
        chosen.append(token)
    return chosen


def _held(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[1, H, T, D]`` of a layer."""
    # Recurrent or compressed states have no keys and values per token that a method could code.
    if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
        raise TypeError(f"a layer of type {type(layer).__name__} holds no keys and values per token")
    return layer.keys, layer.values


def _to_numpy(x: torch.Tensor) -> NDArray[np.float32]:
    """``[1, H, T, D]`` of the cache to float32 ``[T, H, D]``, contiguous and never a view."""
    return x[0].transpose(0, 1).to("cpu", torch.float32, copy=True).contiguous().numpy()


def _to_torch(x: NDArray[np.float32], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x, np.float32)).transpose(0, 1)[None].to(like.device, like.dtype)


def _nmse(exact: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    energy = np.square(exact, dtype=np.float64).sum()
    error = np.square(exact.astype(np.float64) - other).sum()
    return float(error / energy) if energy else float(error > 0)

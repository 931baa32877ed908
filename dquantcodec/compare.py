"""How far a decoded cache is from the original: sums that add up over blocks of tokens, and one row per layer.

Every measure is a sum over tokens, so a cache of any length is compared in blocks, in constant memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import InputError

#: Bits of one value of the format that caches are usually kept in; ratios are relative to it.
BF16_BITS = 16


@dataclass(frozen=True)
class ErrorSums:
    """Energies (sums of squares) over some tokens: of the error, the original, and the original without its means.

    The means are those of every channel over a window of tokens; the codec stores them apart for keys, so
    ``error / centred`` is the error relative to what is left to quantise.
    """

    error: float = 0.0
    energy: float = 0.0
    centred: float = 0.0

    def __add__(self, other: ErrorSums) -> ErrorSums:
        return ErrorSums(self.error + other.error, self.energy + other.energy, self.centred + other.centred)

    @property
    def nmse(self) -> float:
        """Error energy over energy; 0 for an exact copy, whatever its energy."""
        return _ratio(self.error, self.energy)

    @property
    def centred_nmse(self) -> float:
        """Error energy over the energy of the original minus its window means."""
        return _ratio(self.error, self.centred)


def error_sums(original: NDArray[Any], decoded: NDArray[Any], window: int = 128) -> ErrorSums:
    """The sums of one block, both arrays ``[t, H, D]`` of any float type; windows are counted from its first token.

    Blocks add up to the sums of the whole if each but the last holds whole windows.
    """
    if original.shape != decoded.shape:
        raise InputError(f"shapes differ: {original.shape} and {decoded.shape}", code="shape-mismatch")
    exact = original.astype(np.float64)
    total = ErrorSums()
    for start in range(0, exact.shape[0], window):
        part = exact[start : start + window]
        error = part - decoded[start : start + window].astype(np.float64)
        centred = part - part.mean(axis=0, keepdims=True)
        total += ErrorSums(_energy(error), _energy(part), _energy(centred))
    return total


@dataclass(frozen=True, eq=False)
class AttentionSums:
    """Attention of the last ``L`` positions over the tokens seen so far, before the final division.

    ``peak`` and ``weight`` are ``[H, G*L]`` (largest score, sum of exponentials relative to it), ``mixed``
    ``[H, G*L, D]`` is the weighted sum of values; query heads are grouped by the KV head they use.
    """

    peak: NDArray[np.float32]
    weight: NDArray[np.float32]
    mixed: NDArray[np.float32]

    @staticmethod
    def empty(kv_heads: int, rows: int, head_dim: int) -> AttentionSums:
        return AttentionSums(
            np.full((kv_heads, rows), -np.inf, np.float32),
            np.zeros((kv_heads, rows), np.float32),
            np.zeros((kv_heads, rows, head_dim), np.float32),
        )

    def output(self) -> NDArray[np.float32]:
        """The attention output ``[H, G*L, D]``."""
        return np.asarray(self.mixed / self.weight[..., None])


def group_queries(query: NDArray[np.float32], kv_heads: int) -> NDArray[np.float32]:
    """Queries ``[Q, L, D]`` by KV head, ``[H, G*L, D]`` with ``G = Q / H``: query head h uses KV head ``h // G``."""
    heads, positions, head_dim = query.shape
    if heads % kv_heads:
        raise InputError(f"{heads} query heads do not divide among {kv_heads} KV heads", code="query-mismatch")
    return query.reshape(kv_heads, heads // kv_heads * positions, head_dim)


def attend_block(
    sums: AttentionSums,
    grouped: NDArray[np.float32],
    keys: NDArray[Any],
    values: NDArray[Any],
    *,
    positions: int,
    tokens: int,
    start: int,
    scale: float | None = None,
) -> AttentionSums:
    """``sums`` with tokens ``start ..`` added: ``keys`` and ``values`` ``[t, H, D]``.

    ``grouped`` comes from :func:`group_queries`.  The queries stand at the last ``positions`` of ``tokens`` positions
    and see every token up to their own.  ``scale`` multiplies the logits and defaults to ``1/sqrt(D)``.
    """
    head_dim = grouped.shape[-1]
    factor = np.float32(1 / math.sqrt(head_dim) if scale is None else scale)
    by_head = keys.astype(np.float32).transpose(1, 2, 0)
    scores = np.matmul(grouped * factor, by_head)  # [H, G*L, t]
    own = np.tile(np.arange(tokens - positions, tokens), grouped.shape[1] // positions)
    hidden = np.arange(start, start + keys.shape[0]) > own[:, None]
    scores[:, hidden] = -np.inf
    peak = np.maximum(sums.peak, scores.max(axis=2))
    # A row that has seen no token yet keeps weight 0; its peak is -inf and must not be subtracted from itself.
    shift = np.where(np.isneginf(peak), np.float32(0), peak)
    old = np.exp(sums.peak - shift)
    weights = np.exp(scores - shift[..., None])
    mixed = np.matmul(weights, values.astype(np.float32).transpose(1, 0, 2))
    return AttentionSums(peak, sums.weight * old + weights.sum(axis=2), sums.mixed * old[..., None] + mixed)


def relative_error(exact: NDArray[Any], other: NDArray[Any]) -> tuple[float, float]:
    """Error energy and energy of an attention output; ``sqrt`` of the ratio of their sums is the relative error."""
    return _energy(exact.astype(np.float64) - other), _energy(exact.astype(np.float64))


@dataclass(frozen=True)
class LayerQuality:
    """One row of the quality table.

    ``stored_bytes`` counts every byte the file keeps for the layer, coded and exact; ``values`` its keys and values.
    ``attention_error`` is ``None`` without queries, the drifted shares are ``None`` where nothing is coded, speeds
    (values a second) are ``None`` where not measured.
    """

    layer: int
    profile: str
    values: int
    stored_bytes: int
    key_nmse: float
    key_centred_nmse: float
    value_nmse: float
    attention_error: float | None = None
    key_drift: float | None = None
    value_drift: float | None = None
    encode_speed: float | None = None
    decode_speed: float | None = None

    @property
    def bits_per_value(self) -> float:
        return 8 * self.stored_bytes / self.values

    @property
    def ratio(self) -> float:
        """How many times smaller than BF16."""
        return BF16_BITS / self.bits_per_value if self.stored_bytes else math.inf


def _energy(array: NDArray[np.float64]) -> float:
    flat = np.ascontiguousarray(array).reshape(-1)
    return float(np.dot(flat, flat))


def _ratio(error: float, energy: float) -> float:
    if error == 0.0:
        return 0.0
    return error / energy if energy else math.inf

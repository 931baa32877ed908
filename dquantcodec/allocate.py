"""Containers for every layer and kind from one budget: bytes go where they lower the error of attention most.

Coding one layer's keys with an error of variance ``s2`` on the logits, or its values with a relative error ``D``, moves
the output of its attention by a relative ``s2`` or ``D`` (small errors).  A bit more per value divides either by four,
so the sum over layers is least where all are equal (reverse water-filling), within the bounds of what containers can
do.  Errors are measured, not modelled: a sample of every layer is coded with equal containers first.  Whoever can run
the model measures better what a layer's error does to its predictions, and gives that instead.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .attention_estimate import estimate_attention
from .codec import Codec
from .errors import CapacityError, InputError
from .fit import fit_plan
from .page_layout import KINDS, PageLayout
from .plan import Plan, StreamPlan
from .profile import Profile

#: Containers stay within these parts of the profile's.
LEAST_PART, MOST_PART = 0.5, 2.0


@dataclass(frozen=True, eq=False)
class LayerSample:
    """Keys (after RoPE) and values ``[T, H, D]`` of windows of a layer, and, where known, queries ``[L, Q, D]``.

    ``harm``, where given, is what coding the keys alone and the values alone with the profile does, in one unit for all
    layers: for instance the KL divergence of the model's predictions.  Layers count by their tokens ``T``, so a layer
    that holds fewer than others, for its sliding window, should say so by a smaller sample.
    """

    keys: ArrayLike | Any
    values: ArrayLike | Any
    queries: ArrayLike | Any | None = None
    harm: tuple[float, float] | None = None

    @property
    def tokens(self) -> int:
        return int(np.shape(self.keys)[0])


def allocate(
    profile: str | Profile,
    samples: Sequence[LayerSample],
    *,
    bits_per_value: float | None = None,
    attention_error: float | None = None,
) -> list[Plan]:
    """Plans of the layers, fitted to their samples, with containers by layer and kind.

    They take no more bytes together than ``profile``'s own, or than pages of ``bits_per_value``, every byte counted; or
    the fewest with which the relative error of attention outputs, a root mean square over the layers' tokens, is
    predicted to be at most ``attention_error``.

    Without harm but with queries, a kind's error is that of the attention output when it alone is coded.  With neither,
    queries are taken to be as large as keys (:mod:`dquantcodec.attention_estimate`).

    Raises :class:`InputError` for a target that containers of 0.5 to 2 times the profile's cannot meet.
    """
    profile = Profile.named(profile) if isinstance(profile, str) else profile
    if not samples:
        raise InputError("there are no layers to allocate containers for", code="input-shape")
    if bits_per_value is not None and attention_error is not None:
        raise InputError("give bits per value or an attention error, not both", code="target-both")
    if attention_error is not None and any(sample.harm for sample in samples):
        raise InputError("harm is no attention error; give bits per value", code="target-error")
    plans = [fit_plan(profile, sample.keys, sample.values) for sample in samples]
    errors = [pair for sample, plan in zip(samples, plans) for pair in sample.harm or coding_errors(sample, plan)]
    streams = [getattr(plan, kind) for plan in plans for kind in KINDS]
    values = [plan.values for plan in plans for _ in KINDS]
    tokens = [sample.tokens for sample in samples for _ in KINDS]
    least = [max(2, math.ceil(LEAST_PART * stream.words)) for stream in streams]
    total = None if bits_per_value is None else container_bytes(plans, samples, bits_per_value)
    while True:
        if attention_error is not None:
            words = words_for_error(errors, values, tokens, streams, least, attention_error)
        else:
            words = share_words(errors, values, tokens, streams, least, total)
        fitted = []
        for i, sample in enumerate(samples):
            try:
                fitted.append(fit_plan(profile, sample.keys, sample.values, words=(words[2 * i], words[2 * i + 1])))
            except CapacityError as error:
                least[2 * i + KINDS.index(str(error.where["kind"]))] += 1
        if len(fitted) == len(samples):
            return fitted


def container_bytes(plans: Sequence[Plan], samples: Sequence[LayerSample], bits_per_value: float) -> float:
    """Bytes of containers that pages of ``bits_per_value`` leave beside scales and means, for the samples' tokens."""
    total = 0.0
    for plan, sample in zip(plans, samples):
        containers = plan.window * (plan.key.container + plan.value.container)
        beside = PageLayout.of(plan).page_bytes - containers
        total += sample.tokens * (bits_per_value / 8 * 2 * plan.values - beside / plan.window)
    return total


def coding_errors(sample: LayerSample, plan: Plan) -> tuple[float, float]:
    """Relative squared errors of the attention output from coding the keys and from coding the values."""
    codec = Codec(plan)
    keys, values = (np.asarray(x, np.float32) for x in (sample.keys, sample.values))
    decoded_keys, decoded_values = codec.decode(codec.encode(keys, values))
    if sample.queries is not None:
        queries = np.asarray(sample.queries, np.float32)
        exact = attention(queries, keys, values)
        energy = float(np.square(exact).sum())
        if energy > 0:
            others = (attention(queries, decoded_keys, values), attention(queries, keys, decoded_values))
            from_keys, from_values = (float(np.square(other - exact).sum()) / energy for other in others)
            return from_keys, from_values
    logit_error = estimate_attention(keys, values, decoded_keys, values).logit_error
    energy = float(np.square(values, dtype=np.float64).sum())
    error = float(np.square(values.astype(np.float64) - decoded_values).sum())
    return logit_error**2, error / energy if energy else 0.0


def attention(
    queries: NDArray[np.float32], keys: NDArray[np.float32], values: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Outputs float64 ``[L, Q, D]`` of queries that see all tokens, logits scaled by ``1/sqrt(D)``."""
    positions, count, dim = queries.shape
    heads = keys.shape[1]
    q = queries.reshape(positions, heads, count // heads, dim).astype(np.float64)
    logits = np.einsum("lhgd,thd->lhgt", q, keys) / math.sqrt(dim)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out: NDArray[np.float64] = np.einsum("lhgt,thd->lhgd", weights, values).reshape(queries.shape)
    return out


def share_words(
    errors: Sequence[float],
    values: Sequence[int],
    tokens: Sequence[int],
    streams: Sequence[StreamPlan],
    least: Sequence[int],
    total: float | None = None,
) -> list[int]:
    """Words of a sub-stream of every stream, ``least`` or more, of no more than ``total`` bytes over their ``tokens``.

    Without a total it is what the streams have now.  Words go one by one to where the error they remove is largest;
    ``errors`` are those at the streams' own sizes.
    """
    bits = _bits_per_word(values, streams)
    words = list(least)
    most = [max(2, math.floor(MOST_PART * stream.words)) for stream in streams]
    costs = _bytes_per_word(tokens, streams)
    if total is None:
        total = sum(stream.words * cost for stream, cost in zip(streams, costs))
    room = total - sum(count * cost for count, cost in zip(words, costs))
    beyond = total - sum(count * cost for count, cost in zip(most, costs)) >= max(costs)
    if room < 0 or beyond:
        raise InputError(
            f"the target needs containers {'larger' if beyond else 'smaller'} than "
            f"{MOST_PART if beyond else LEAST_PART:g} times the profile's; give another profile",
            code="target-bits",
        )

    def gain(i: int) -> float:
        """The error that a word more removes, a byte."""
        now = errors[i] * math.pow(4.0, -bits[i] * (words[i] - streams[i].words))
        return now * (1 - math.pow(4.0, -bits[i])) / costs[i]

    queue = [(-gain(i), i) for i in range(len(streams))]
    heapq.heapify(queue)
    while queue:
        _, i = heapq.heappop(queue)
        if words[i] >= most[i] or costs[i] > room:
            continue
        words[i] += 1
        room -= costs[i]
        heapq.heappush(queue, (-gain(i), i))
    return words


def predicted_error(
    errors: Sequence[float],
    values: Sequence[int],
    tokens: Sequence[int],
    streams: Sequence[StreamPlan],
    words: Sequence[int],
) -> float:
    """Relative error of attention outputs, a root mean square over the layers' tokens, with ``words``."""
    bits = _bits_per_word(values, streams)
    moved = [count - stream.words for count, stream in zip(words, streams)]
    left = (error * math.pow(4.0, -b * more) * t for error, b, more, t in zip(errors, bits, moved, tokens))
    return math.sqrt(2 * math.fsum(left) / sum(tokens))


def words_for_error(
    errors: Sequence[float],
    values: Sequence[int],
    tokens: Sequence[int],
    streams: Sequence[StreamPlan],
    least: Sequence[int],
    target: float,
) -> list[int]:
    """Words of the fewest bytes whose predicted error is at most ``target``."""
    costs = _bytes_per_word(tokens, streams)
    low = sum(count * cost for count, cost in zip(least, costs))
    high = sum(max(2, math.floor(MOST_PART * stream.words)) * cost for stream, cost in zip(streams, costs))
    best = share_words(errors, values, tokens, streams, least, high)
    if (reached := predicted_error(errors, values, tokens, streams, best)) > target:
        raise InputError(
            f"an attention error of {target:g} needs more than {MOST_PART:g} times the profile's containers, which "
            f"reach {reached:.3g}; give a larger profile",
            code="target-error",
        )
    while high - low > min(costs):
        middle = (low + high) // 2
        words = share_words(errors, values, tokens, streams, least, middle)
        if predicted_error(errors, values, tokens, streams, words) <= target:
            best, high = words, middle
        else:
            low = middle
    return best


def _bits_per_word(values: Sequence[int], streams: Sequence[StreamPlan]) -> list[float]:
    """Bits a value that a word more is worth."""
    return [8 * stream.word_bytes * stream.substreams / n for stream, n in zip(streams, values)]


def _bytes_per_word(tokens: Sequence[int], streams: Sequence[StreamPlan]) -> list[int]:
    """Bytes that a word more takes over all tokens."""
    return [stream.word_bytes * stream.substreams * count for stream, count in zip(streams, tokens)]

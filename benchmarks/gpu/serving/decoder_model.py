"""A decoder of a language model with random weights in PyTorch: one step of decoding, whatever holds keys and values.

The architecture is Qwen3's: RMS norms, keys and queries normalised by head, rotary positions, grouped heads, gated MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from fused_steps import add_norm, norm_rope, silu_product
from torch.nn.functional import linear

#: Standard deviation of weights, as models of this family are initialised.
WEIGHT = 0.02
#: Base of rotary positions.
BASE = 1e6
#: Standard deviation of the logarithm of a channel's magnitude, keys and values, as in ``attend.py``.
SPREAD = 0.6


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder.  The defaults are Qwen3-8B's, whose output head is not its embedding."""

    layers: int = 36
    hidden: int = 4096
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    mlp: int = 12288
    vocabulary: int = 151936

    @property
    def parameters(self) -> int:
        heads = (2 * self.query_heads + 2 * self.kv_heads) * self.head_dim
        norms = 2 * self.hidden + 2 * self.head_dim
        layer = self.hidden * (heads + 3 * self.mlp) + norms
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden


class KVCache(Protocol):
    """Keys and values of all layers for a batch of sequences."""

    def positions(self) -> torch.Tensor:
        """int32 ``[B]``: the position that the next token has."""

    def attend(self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Take in one token's ``keys`` and ``values`` ``[B, H, D]``, then attend ``query`` ``[B, Q, D]`` to all."""


def channel_spread(shape: DecoderShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Magnitudes of channels, the same for every call: of keys ``[D]`` and of values ``[H, D]``, float32."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(shape.kv_heads + 1, shape.head_dim, generator=generator)
    spread = torch.exp(SPREAD * draws)
    return spread[0], spread[1:]


def rotations(shape: DecoderShape, positions: int, device: str) -> torch.Tensor:
    """float32 ``[positions, 2, D / 2]``: cosines and sines."""
    half = torch.arange(shape.head_dim // 2, device=device, dtype=torch.float64)
    angles = torch.arange(positions, device=device)[:, None] * BASE ** (-2 * half / shape.head_dim)
    return torch.stack((angles.cos(), angles.sin()), dim=1).float()


def random_rows(shape: DecoderShape, tokens: int, seed: int) -> torch.Tensor:
    """float32 ``[2, T, H, D]``: keys and values distributed as those that the model of these weights computes."""
    generator = torch.Generator().manual_seed(seed)
    key_spread, value_spread = channel_spread(shape)
    rows = torch.randn(2, tokens, shape.kv_heads, shape.head_dim, generator=generator)
    keys = rows[0] * torch.rsqrt(rows[0].square().mean(-1, keepdim=True)) * key_spread
    cosines, sines = rotations(shape, tokens, "cpu")[:, :, None].unbind(1)
    low, high = keys.chunk(2, dim=-1)
    keys = torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1)
    return torch.stack((keys, rows[1] * value_spread))


class LayerWeights:
    """BF16 weights of one layer, drawn on their device."""

    def __init__(self, shape: DecoderShape, device: str) -> None:
        def draw(outputs: int, inputs: int) -> torch.Tensor:
            return torch.empty(outputs, inputs, device=device, dtype=torch.bfloat16).normal_(0, WEIGHT)

        heads = shape.query_heads + 2 * shape.kv_heads
        self.qkv = draw(heads * shape.head_dim, shape.hidden)
        key_spread, value_spread = (x.to(device) for x in channel_spread(shape))
        # Normalised rows of ``hidden`` values: products with these weights have the magnitudes of the channels.
        rows = self.qkv[-shape.kv_heads * shape.head_dim :]
        rows *= (value_spread.reshape(-1, 1) / (WEIGHT * shape.hidden**0.5)).to(torch.bfloat16)
        self.output = draw(shape.hidden, shape.query_heads * shape.head_dim)
        self.gate_up = draw(2 * shape.mlp, shape.hidden)
        self.down = draw(shape.hidden, shape.mlp)
        self.norm, self.mlp_norm = torch.ones(2, shape.hidden, device=device, dtype=torch.bfloat16)
        self.query_norm = torch.ones(shape.head_dim, device=device, dtype=torch.bfloat16)
        self.key_norm = key_spread.to(torch.bfloat16)


class Decoder:
    """The model.  ``positions`` bounds the length of a sequence."""

    def __init__(self, shape: DecoderShape, positions: int, device: str = "cuda") -> None:
        torch.manual_seed(1)
        self.shape, self.device = shape, device
        draw = {"device": device, "dtype": torch.bfloat16}
        self.embedding = torch.empty(shape.vocabulary, shape.hidden, **draw).normal_(0, WEIGHT)
        self.head = torch.empty(shape.vocabulary, shape.hidden, **draw).normal_(0, WEIGHT)
        self.norm = torch.ones(shape.hidden, **draw)
        self.layers = [LayerWeights(shape, device) for _ in range(shape.layers)]
        self.rotations = rotations(shape, positions, device)

    def logits(self, ids: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """BF16 ``[B, vocabulary]`` for the next token after ``ids`` int64 ``[B]``."""
        shape = self.shape
        x = self.embedding[ids]
        residual = torch.zeros_like(x)
        positions = cache.positions()
        for number, weights in enumerate(self.layers):
            x = add_norm(x, residual, weights.norm)
            heads = linear(x, weights.qkv).view(len(ids), -1, shape.head_dim)
            query = norm_rope(
                heads,
                shape.query_heads,
                shape.kv_heads,
                weights.query_norm,
                weights.key_norm,
                self.rotations,
                positions,
            )
            keys, values = heads[:, shape.query_heads :].chunk(2, dim=1)
            attended = cache.attend(number, query, keys, values)
            x = linear(attended.reshape(len(ids), -1), weights.output)
            x = add_norm(x, residual, weights.mlp_norm)
            x = linear(silu_product(linear(x, weights.gate_up)), weights.down)
        return linear(add_norm(x, residual, self.norm), self.head)

    def step(self, ids: torch.Tensor, cache: KVCache) -> None:
        """One token more: ``ids`` become those of the largest logits."""
        ids.copy_(self.logits(ids, cache).argmax(dim=-1))

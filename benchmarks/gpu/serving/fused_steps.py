"""What a decoder does between its matrix products, each in one launch: Triton on a GPU, PyTorch's operators elsewhere.

An engine fuses these too; as operators of their own they would take longer than attention at small batches, for any
cache.
"""

from __future__ import annotations

import os

import torch
from torch.nn.functional import silu

try:
    import triton
    import triton.language as tl
except ImportError:  # without a GPU nothing needs it
    triton = None

#: Added to mean squares.
EPSILON = 1e-6
#: Values of one program of :func:`silu_product`.
BLOCK = 1024


def _fused(x: torch.Tensor) -> bool:
    return triton is not None and (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Add ``x`` ``[B, N]`` to ``residual`` in place; returns the sum's RMS norm times ``weight`` ``[N]``."""
    if _fused(x):
        out = torch.empty_like(x)
        width = x.shape[1]
        _add_norm[(x.shape[0],)](x, residual, weight, out, width, EPSILON, triton.next_power_of_2(width), num_warps=8)
        return out
    residual.copy_(residual.float() + x.float())
    return _norm(residual, weight)


def norm_rope(
    heads: torch.Tensor,
    query_heads: int,
    kv_heads: int,
    query_norm: torch.Tensor,
    key_norm: torch.Tensor,
    rotations: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Normalise and rotate heads ``[B, Q + 2 H, D]`` of queries, keys and values: keys in place.

    Returns queries ``[B, Q, D]``, contiguous.
    """
    batch, _, dim = heads.shape
    if _fused(heads):
        queries = torch.empty(batch, query_heads, dim, device=heads.device, dtype=heads.dtype)
        _norm_rope[(batch, query_heads + kv_heads)](
            heads, queries, query_norm, key_norm, rotations, positions, query_heads, heads.stride(0), dim // 2, EPSILON,
            triton.next_power_of_2(dim // 2), num_warps=1,
        )  # fmt: skip
        return queries
    at = rotations[positions.long()]
    cosines, sines = at[:, None, 0], at[:, None, 1]

    def turned(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        low, high = _norm(x, weight).float().chunk(2, dim=-1)
        return torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1).to(x.dtype)

    keys = heads[:, query_heads : query_heads + kv_heads]
    keys.copy_(turned(keys, key_norm))
    return turned(heads[:, :query_heads], query_norm)


def silu_product(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` ``[B, M]`` of both side by side ``[B, 2 M]``."""
    width = gate_up.shape[1] // 2
    if _fused(gate_up):
        out = torch.empty(gate_up.shape[0], width, device=gate_up.device, dtype=gate_up.dtype)
        _silu_product[(gate_up.shape[0], triton.cdiv(width, BLOCK))](gate_up, out, width, BLOCK, num_warps=4)
        return out
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (silu(gate) * up).to(gate_up.dtype)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON) * weight.float()).to(x.dtype)


if triton is not None:
    # Without annotations of types: Triton reads them, and knows its own alone.

    @triton.jit
    def _add_norm(x, residual, weight, out, width, epsilon, block: tl.constexpr):
        row = tl.program_id(0).to(tl.int64) * width
        at = tl.arange(0, block)
        inside = at < width
        total = tl.load(x + row + at, inside, 0).to(tl.float32) + tl.load(residual + row + at, inside, 0).to(tl.float32)
        kept = total.to(residual.dtype.element_ty)
        tl.store(residual + row + at, kept, inside)
        total = kept.to(tl.float32)
        scale = tl.rsqrt(tl.sum(total * total) / width + epsilon)
        scaled = total * scale * tl.load(weight + at, inside, 0).to(tl.float32)
        tl.store(out + row + at, scaled.to(out.dtype.element_ty), inside)

    @triton.jit
    def _norm_rope(
        heads, queries, query_norm, key_norm, rotations, positions, query_heads, stride, half, epsilon,
        block: tl.constexpr,
    ):  # fmt: skip
        row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        at = tl.arange(0, block)
        inside = at < half
        source = heads + row * stride + head * 2 * half
        low = tl.load(source + at, inside, 0).to(tl.float32)
        high = tl.load(source + half + at, inside, 0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(low * low + high * high) / (2 * half) + epsilon)
        weight = query_norm
        target = queries + (row * query_heads + head) * 2 * half
        if head >= query_heads:
            weight = key_norm
            target = source
        kind = heads.dtype.element_ty
        # Rounded between the two steps, as separate operators do.
        low = (low * scale * tl.load(weight + at, inside, 0).to(tl.float32)).to(kind).to(tl.float32)
        high = (high * scale * tl.load(weight + half + at, inside, 0).to(tl.float32)).to(kind).to(tl.float32)
        turn = rotations + tl.load(positions + row).to(tl.int64) * 2 * half
        cosines = tl.load(turn + at, inside, 0)
        sines = tl.load(turn + half + at, inside, 0)
        tl.store(target + at, (low * cosines - high * sines).to(kind), inside)
        tl.store(target + half + at, (high * cosines + low * sines).to(kind), inside)

    @triton.jit
    def _silu_product(gate_up, out, width, block: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * block + tl.arange(0, block)
        inside = at < width
        gate = tl.load(gate_up + row * 2 * width + at, inside, 0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * width + width + at, inside, 0).to(tl.float32)
        product = gate / (1 + tl.exp(-gate)) * up
        tl.store(out + row * width + at, product.to(out.dtype.element_ty), inside)

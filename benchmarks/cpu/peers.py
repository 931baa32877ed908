"""Other KV codecs that install with pip and run on a CPU, on the same tensors; skipped where they are not installed.

turbo-attn needs only PyTorch for this path:  pip install torch && pip install --no-deps turbo-attn
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import numpy as np

from dquantcodec.bench.timing import Row, row

SECTION = "codec"
TOKENS, HEADS, DIM = 512, 8, 128
#: Tokens attended to, and queries of a KV head, as in the codec's own rows.
LONG, GROUP = 2048, 4


def rows() -> Iterator[Row]:
    try:
        import torch
        from tkv import TkvCodec
    except ImportError as error:
        print(f"(turbo-attn is skipped: {error})")
        return
    torch.set_num_threads(1)
    keys = torch.from_numpy(np.random.default_rng(0).standard_normal((TOKENS, HEADS, DIM), dtype=np.float32))
    for bits in (2, 4):
        codec = TkvCodec(head_dim=DIM, bit_width=bits)
        packed, norms = codec.compress_k(keys)
        stored = 8 * (packed.numel() * packed.element_size() + norms.numel() * norms.element_size()) / keys.numel()
        amount = keys.numel() / 1e6
        yield row(
            SECTION, f"turbo-attn {bits} bits: encode keys", lambda c=codec: c.compress_k(keys), amount, "M values/s",
            bits=stored, note="PyTorch on the CPU, the package's reference path", repeats=5, what="encode", of="peer",
        )  # fmt: skip
        yield row(
            SECTION, f"turbo-attn {bits} bits: decode keys", lambda c=codec, p=packed, n=norms: c.decompress_k(p, n),
            amount, "M values/s", bits=stored, repeats=5, what="decode", of="peer",
        )  # fmt: skip
    yield from _attention(torch)


def _attention(torch: ModuleType) -> Iterator[Row]:
    """Attention over keys and values as they are, which a codec must not be much slower than."""
    attend = torch.nn.functional.scaled_dot_product_attention
    for dtype in (torch.float32, torch.bfloat16):
        query = torch.randn(HEADS, GROUP, DIM).to(dtype)
        keys, values = torch.randn(2, HEADS, LONG, DIM).to(dtype)
        amount = 2 * keys.numel() / 1e6
        yield row(
            SECTION, f"PyTorch attention over {str(dtype).removeprefix('torch.')}, no codec",
            lambda q=query, k=keys, v=values: attend(q, k, v), amount, "M values/s",
            bits=8 * keys.element_size(), repeats=5, what="attend", of="peer",
        )  # fmt: skip

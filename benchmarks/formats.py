"""Other ways to store a KV cache beside ours, at their own stored bytes, on one real capture.

    python benchmarks/formats.py [CAPTURE.safetensors] [--json benchmarks/results/formats.json]

Every method gets the keys and values of the same layers; metadata (scales, zero points, offsets, means) is counted.
The reported attention error is the relative error of the attention output over the last positions, causal, with the
real queries.  The other methods are plain re-implementations of a storage format, without calibration:

    fp8         float8 e4m3, no scale
    q8_0, q4_0  blocks of 32 values of a token's head with one FP16 scale (llama.cpp's block formats)
    kivi2       2 bits, keys per channel over 128 tokens, values per token and head, FP16 scale and zero each
    rotated2    2 bits per token and head after a Hadamard rotation, FP16 scale and zero each
"""

from __future__ import annotations

import argparse
import json
import platform
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import safe_open

from dquantcodec import PROFILES, Codec, fit_plan
from dquantcodec.file.groupings import plan_bytes
from dquantcodec.rotate import random_signs, rotate, unrotate

WINDOW = 128


def fp8(key, value):
    coded = [x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) for x in (key, value)]
    return *coded, 8.0


def blocks(x, bits):
    """llama.cpp's symmetric blocks of 32: the value of largest magnitude maps to -2**(bits - 1)."""
    b = x.reshape(-1, 32)
    largest = np.take_along_axis(b, np.abs(b).argmax(axis=1)[:, None], axis=1)
    if bits == 8:
        scale = (np.abs(largest) / 127).astype(np.float16).astype(np.float32)
        levels = np.rint(np.divide(b, scale, out=np.zeros_like(b), where=scale != 0))
    else:
        scale = (largest / -8).astype(np.float16).astype(np.float32)
        levels = np.clip(np.floor(np.divide(b, scale, out=np.zeros_like(b), where=scale != 0) + 8.5), 0, 15) - 8
    return (levels * scale).reshape(x.shape)


def q8_0(key, value):
    return blocks(key, 8), blocks(value, 8), 8 + 16 / 32


def q4_0(key, value):
    return blocks(key, 4), blocks(value, 4), 4 + 16 / 32


def asymmetric(x, axis, bits):
    low, high = x.min(axis=axis, keepdims=True), x.max(axis=axis, keepdims=True)
    zero = low.astype(np.float16).astype(np.float32)
    scale = ((high - zero) / (2**bits - 1)).astype(np.float16).astype(np.float32)
    levels = np.divide(x - zero, scale, out=np.zeros_like(x), where=scale != 0)
    return zero + scale * np.clip(np.rint(levels), 0, 2**bits - 1)


def kivi2(key, value):
    heads, dim = key.shape[1:]
    windows = key.reshape(-1, WINDOW, heads, dim)
    bits = 2 + (32 / WINDOW + 32 / dim) / 2
    return asymmetric(windows, 1, 2).reshape(key.shape), asymmetric(value, 2, 2), bits


def rotated2(key, value):
    signs = random_signs(*key.shape[1:])
    coded = [unrotate(asymmetric(rotate(x, signs), 2, 2), signs) for x in (key, value)]
    return *coded, 2 + 32 / key.shape[2]


def ours(profile):
    def code(key, value):
        codec = Codec(fit_plan(profile, key, value))
        pages = codec.encode(key, value)
        return *codec.decode(pages), (pages.nbytes + plan_bytes(codec.plan)) * 8 / (2 * key.size)

    return code


METHODS = {"fp8": fp8, "q8_0": q8_0, "q4_0": q4_0, "kivi2": kivi2, "rotated2": rotated2}
METHODS |= {f"dquantcodec {name}": ours(name) for name in PROFILES}


def attention(query, key, value):
    """``query`` [Q, L, D] of the last L positions, ``key`` and ``value`` [T, H, D], in float64."""
    heads, length, dim = query.shape
    tokens, kv_heads, _ = key.shape
    group = heads // kv_heads
    visible = np.arange(tokens)[None, :] <= np.arange(tokens - length, tokens)[:, None]
    out = np.empty((heads, length, dim))
    for h in range(heads):
        k, v = key[:, h // group].astype(float), value[:, h // group].astype(float)
        logits = np.where(visible, query[h].astype(float) @ k.T / np.sqrt(dim), -np.inf)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        out[h] = weights / weights.sum(axis=1, keepdims=True) @ v
    return out


def measure(layers):
    rows = []
    for name, code in METHODS.items():
        errors = []
        for key, value, query in layers:
            k, v, bits = code(key, value)
            windows = key.reshape(-1, WINDOW, *key.shape[1:])
            centred = windows - windows.mean(axis=1, keepdims=True)
            exact, other = attention(query, key, value), attention(query, k, v)
            errors.append(
                (
                    np.square(key - k).sum() / np.square(centred).sum(),
                    np.square(value - v).sum() / np.square(value).sum(),
                    np.linalg.norm(other - exact) / np.linalg.norm(exact),
                )
            )
        key_nmse, value_nmse, attention_error = np.mean(errors, axis=0)
        rows.append(
            {
                "method": name,
                "bits_per_value": round(float(bits), 4),
                "ratio_to_bf16": round(16 / float(bits), 2),
                "key_nmse_centred": round(float(key_nmse), 4),
                "value_nmse": round(float(value_nmse), 4),
                "attention_error": round(float(attention_error), 4),
            }
        )
    return rows


def load(path, queries):
    layers = []
    with safe_open(path, "np") as f, safe_open(queries, "np") as q:
        for name in sorted(n for n in f.keys() if n.endswith(".key")):  # noqa: SIM118
            key, value = (f.get_tensor(n)[0].transpose(1, 0, 2) for n in (name, name.replace("key", "value")))
            query = q.get_tensor(name.replace("key", "query"))[0]
            layers.append([np.ascontiguousarray(x).astype(np.float32) for x in (key, value, query)])
    return layers


def main():
    bundled = Path(str(files("dquantcodec"))) / "data" / "sample.safetensors"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("capture", nargs="?", type=Path, default=bundled)
    parser.add_argument("--queries", type=Path, help="where the queries are, if not in the capture")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    layers = load(arguments.capture, arguments.queries or arguments.capture)
    rows = measure(layers)
    print(f"{'method':<24} bits/value  vs BF16  key NMSE  value NMSE  attention error")
    for r in rows:
        print(
            f"{r['method']:<24} {r['bits_per_value']:>10.3f} {r['ratio_to_bf16']:>7.2f}x {r['key_nmse_centred']:>9.4f}"
            f" {r['value_nmse']:>11.4f} {r['attention_error']:>16.3f}"
        )
    if arguments.json:
        result = {
            "what": "storage formats on one real capture, metadata counted",
            "capture": arguments.capture.name,
            "layers": len(layers),
            "tokens": len(layers[0][0]),
            "values_per_stream": layers[0][0][0].size,
            "dquantcodec": version("dquantcodec"),
            "numpy": np.__version__,
            "python": platform.python_version(),
            "command": "python benchmarks/formats.py --json benchmarks/results/formats.json",
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

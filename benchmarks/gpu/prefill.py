"""What share of a prefill encoding its keys and values would be, on one card in one run.

    python benchmarks/gpu/prefill.py --out benchmarks/results/gpu-prefill.json

The model's shape is Qwen3-8B's: 36 layers, hidden size 4096, 32 query heads on 8 KV heads of 128, MLP of 12288.
Measured: the device time of encoding keys and values of all layers, BF16, into page pools (one call a layer, each with
data and a pool of its own), and the device time of one layer's work of a prefill: its four matrix products (Q, K and V;
O; gate and up; down) in BF16 by the library's own routine, and causal attention by PyTorch's fastest back end.
Estimated: the prefill as 36 times the measured layer.  Normalisation, activations, RoPE and the output head are left
out, so a real prefill takes longer and the share is lower.  ``share`` is encoding over that estimate;
``share_by_flops`` uses 2 * 8.2e9 operations a token at the rate that the products reached, plus the measured attention.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attend import machine, spread
from torch.nn.attention import SDPBackend, sdpa_kernel

from dquantcodec import fit_plan
from dquantcodec.cuda import Codec

LAYERS, HIDDEN, QUERY_HEADS, KV_HEADS, HEAD_DIM, MLP = 36, 4096, 32, 8, 128, 12288
PARAMETERS = 8.2e9
RUNS = 9
#: Inputs and outputs of a layer's products.
PRODUCTS = {
    "qkv": (HIDDEN, (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM),
    "o": (QUERY_HEADS * HEAD_DIM, HIDDEN),
    "gate and up": (HIDDEN, 2 * MLP),
    "down": (MLP, HIDDEN),
}


def times(work: Callable[[], object]) -> list[float]:
    """Milliseconds of ``work`` on the device, one number a run; captured, so that launches by the host do not count."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    found = []
    for run in range(RUNS + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if run >= 2:
            found.append(begin.elapsed_time(end))
    return found


def product_times(tokens: int) -> dict[str, Any]:
    found = {}
    for name, (inputs, outputs) in PRODUCTS.items():
        x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(tokens, outputs, device="cuda", dtype=torch.bfloat16)
        taken = times(lambda x=x, weight=weight, out=out: torch.mm(x, weight.T, out=out))
        operations = 2 * tokens * inputs * outputs
        found[name] = {**spread(taken), "tera_operations_per_s": round(operations / statistics.median(taken) / 1e9, 1)}
    return found


def attention_times(tokens: int) -> dict[str, Any]:
    shape = (1, QUERY_HEADS, tokens, HEAD_DIM)
    query = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    keys, values = torch.randn(2, 1, KV_HEADS, tokens, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    found = {}
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        with sdpa_kernel(backend):
            found[name] = spread(
                times(
                    lambda: torch.nn.functional.scaled_dot_product_attention(
                        query, keys, values, is_causal=True, enable_gqa=True
                    )
                )
            )
    return found


def rows_of(tokens: int, seed: int) -> torch.Tensor:
    """Keys and values ``[2, T, H, D]`` whose channels differ in magnitude, the same ones for every seed."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    spread_of = torch.exp(0.6 * torch.randn(2, 1, KV_HEADS, HEAD_DIM, device="cuda", generator=generator))
    generator.manual_seed(seed)
    rows = torch.randn(2, tokens, KV_HEADS, HEAD_DIM, device="cuda", generator=generator)
    return (rows * spread_of).to(torch.bfloat16)


def encode_times(codec: Codec, tokens: int) -> dict[str, Any]:
    """Of all layers, one behind another, each with rows and pages of its own and all with the same plan."""
    rows = [rows_of(tokens, 2 + layer) for layer in range(LAYERS)]
    count = -(-tokens // codec.plan.window)
    pools = [torch.empty(count, codec.layout.page_bytes, device="cuda", dtype=torch.uint8) for _ in rows]
    status = torch.empty(2, tokens, device="cuda", dtype=torch.uint8)

    def work() -> None:
        for (keys, values), pool in zip(rows, pools):
            codec.encode(keys, values, pages=pool, status=status)

    taken = times(work)
    assert not status.any()
    values = 2 * LAYERS * tokens * KV_HEADS * HEAD_DIM
    return {**spread(taken), "values": values, "giga_values_per_s": round(values / statistics.median(taken) / 1e6, 1)}


def measure(tokens: int, codecs: dict[str, Codec]) -> list[dict[str, Any]]:
    products, attention = product_times(tokens), attention_times(tokens)
    fastest = min(of["median_ms"] for of in attention.values())
    layer = sum(of["median_ms"] for of in products.values()) + fastest
    operations = sum(2 * tokens * a * b for a, b in PRODUCTS.values())
    rate = operations / sum(of["median_ms"] for of in products.values()) / 1e9
    by_flops = 2 * PARAMETERS * tokens / rate / 1e9 + LAYERS * fastest
    rows = []
    for profile, codec in codecs.items():
        encode = encode_times(codec, tokens)
        rows.append(
            {
                "tokens": tokens,
                "profile": f"{profile} fitted",
                "encode_all_layers": encode,
                "products_of_a_layer": products,
                "attention_of_a_layer": attention,
                "products_tera_operations_per_s": round(rate, 1),
                "prefill_ms": round(LAYERS * layer, 3),
                "prefill_by_flops_ms": round(by_flops, 3),
                "share": round(encode["median_ms"] / (LAYERS * layer), 4),
                "share_by_flops": round(encode["median_ms"] / by_flops, 4),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    sample = rows_of(1024, 1).float().cpu().numpy()
    codecs = {profile: Codec(fit_plan(profile, *sample)) for profile in ("2.26", "2.26-t")}
    rows = [row for tokens in (8192, 32768) for row in measure(tokens, codecs)]
    if chosen.out:
        report = {
            "command": "python benchmarks/gpu/prefill.py --out benchmarks/results/gpu-prefill.json",
            **machine(),
            "model": "Qwen3-8B's shape, random weights and rows",
            "estimate": "prefill = 36 x (four BF16 products + causal attention, both measured); nothing else counted",
            "rows": rows,
        }
        chosen.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

"""Decode steps of a model in transformers on a GPU: its own cache, pages that are decoded, attention over pages.

    python benchmarks/engines/gpu.py [--json benchmarks/results/engines-transformers-gpu.json] [--only smollm2]

Models have the shapes of Llama-3-8B (eight of its layers) and of SmolLM2-135M and random weights, in bfloat16, and the
tokens before the first step are random keys and values given to the cache: what is timed does not depend on what they
say.  Then come single tokens, one a sequence and step, through the model's forward as a program would call it, without
graphs or compilation.  ``ms_per_step`` is the wall clock's time of ``steps`` steps over their number until the device
is done, the least of ``--repeats`` times; in 128 steps every sequence makes one page in every layer.  ``bytes`` are
those of all tensors that a cache keeps alive before the steps.  All layers share one plan, fitted to such keys and
values: that saves compiling and changes nothing of what is read.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from dquantcodec import fit_plan
from dquantcodec.bench.machine import versions
from dquantcodec.errors import DQuantError
from dquantcodec.integrations.transformers import ATTENTION, DQuantCache

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b, 8 layers": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000,
    },
    "smollm2": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152,
    },
}  # fmt: skip
#: Batch and tokens before the first step, by shape.
ROWS = {"llama-3-8b, 8 layers": ((32, 32768), (8, 32768), (1, 32768)), "smollm2": ((8, 8192), (1, 2048))}
PROFILE = "2.26"
#: Steps before those that are timed: kernels are loaded, and the batch of exact tokens is filled.
FIRST = 3
DECODING_STEPS = 8


def network(shape: dict[str, Any], most: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**shape, max_position_embeddings=most, bos_token_id=None, eos_token_id=None)
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def cache_bytes(cache: Any) -> int:
    if isinstance(cache, DQuantCache):
        return cache.nbytes
    return sum(x.untyped_storage().nbytes() for layer in cache.layers for x in (layer.keys, layer.values))


def states(config: Any, batch: int, tokens: int, layer: int) -> Any:
    """Keys and values ``[2, B, H, T, D]`` whose channels differ, as those of models do."""
    generator = torch.Generator("cuda").manual_seed(layer)
    shape = 2, batch, config.num_key_value_heads, tokens, config.head_dim
    found = torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(generator=generator)
    spread = torch.empty(2, 1, shape[2], 1, shape[4], device="cuda", dtype=torch.bfloat16)
    return found.mul_(spread.normal_(0, 0.6, generator=torch.Generator("cuda").manual_seed(0)).exp_())


@torch.inference_mode()
def filled(config: Any, cache: Any, batch: int, tokens: int) -> Any:
    for layer in range(config.num_hidden_layers):
        cache.update(*states(config, batch, tokens, layer), layer)
    torch.cuda.synchronize()
    return cache


@torch.inference_mode()
def stepped(model: Any, token: Any, cache: Any, steps: int) -> float:
    """Milliseconds of a step; each takes the token that the one before it chose."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        token = model(token, cache=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps * 1e3


def row(model: Any, batch: int, context: int, plan: Any, a: argparse.Namespace) -> list[dict[str, Any]]:
    """All caches, one after another, so that memory is that of one."""
    config = model.config
    plans = dict.fromkeys(range(config.num_hidden_layers), plan)
    makers: dict[str, tuple[str, Callable[[], Any]]] = {
        "DynamicCache": ("sdpa", lambda: DynamicCache(config=config)),
        "DQuantCache, attention over pages": (ATTENTION, lambda: DQuantCache(config, PROFILE, plans=plans)),
        "DQuantCache, decoding": ("sdpa", lambda: DQuantCache(config, PROFILE, plans=plans)),
    }
    token = torch.zeros(batch, 1, dtype=torch.long, device="cuda")
    found: dict[str, dict[str, Any]] = {}
    for name, (attention, make) in makers.items():
        result: dict[str, Any] = {"batch": batch, "context": context, "cache": name}
        try:
            model.set_attn_implementation(attention)
            cache = filled(config, make(), batch, context)
            result["bytes"] = cache_bytes(cache)
            stepped(model, token, cache, FIRST)
            # Decoding everything takes long, and making one page in 128 steps next to nothing of it.
            result["steps"] = min(a.steps, DECODING_STEPS) if name.endswith("decoding") else a.steps
            times = [stepped(model, token, cache, result["steps"]) for _ in range(a.repeats)]
            result["ms_per_step"] = round(min(times), 3)
            result["all_ms_per_step"] = [round(t, 3) for t in times]
            result["tokens_per_s"] = round(batch / min(times) * 1e3, 1)
            if isinstance(cache, DQuantCache):
                layer = cache.layers[0]
                result["store"] = type(layer.store).__name__
                result["pages_a_sequence"] = len(layer.rows[0].pages)
        except (RuntimeError, DQuantError, torch.OutOfMemoryError):
            result["failed"] = traceback.format_exc().splitlines()[-1]
            traceback.print_exc()
        cache = None
        torch.cuda.empty_cache()
        found[name] = result
        print(json.dumps(result), flush=True)
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=SHAPES)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further row after so many")
    arguments = parser.parse_args()
    begin = time.monotonic()
    result: dict[str, Any] = {
        "what": "decode steps in transformers on a GPU, random weights in bfloat16, no graphs, no compilation",
        "command": "python benchmarks/engines/gpu.py " + " ".join(sys.argv[1:]),
        "device": torch.cuda.get_device_name(),
        "versions": versions(("torch", "transformers", "cupy-cuda13x")),
        "transformers": transformers.__version__,
        "profile": PROFILE,
        "rows": [],
    }
    for name, shape in SHAPES.items():
        if arguments.only not in (None, name):
            continue
        most = max(context for _, context in ROWS[name]) + arguments.steps * arguments.repeats + 16
        model = network(shape, most)
        keys, values = (x[0].transpose(0, 1).cpu() for x in states(model.config, 1, 512, 0))
        plan = fit_plan(PROFILE, keys, values)
        for batch, context in ROWS[name]:
            if time.monotonic() - begin > arguments.seconds:
                print(f"no time left for {name}, {batch} x {context}", flush=True)
                continue
            result["rows"] += [{"model": name, **r} for r in row(model, batch, context, plan, arguments)]
            if arguments.json:
                arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""Decode steps of a model in transformers on a GPU: its own cache, pages that are decoded, attention over pages.

    python benchmarks/engines/gpu.py [--json benchmarks/results/engines-transformers-gpu.json] [--only smollm2]

Models have the shapes of SmolLM2-135M and of Llama-3-8B (eight of its layers) and random weights, in bfloat16: what is
timed does not depend on what they say.  Each cache reads a prompt once and then takes single tokens, one a sequence and
step, through the model's forward as a program would call it, without graphs or compilation.  ``ms_per_step`` is the
wall clock's time of ``--steps`` steps over their number, after the device is done, the least of ``--repeats`` times; in
128 steps every sequence makes one page in every layer.  ``bytes`` are those of all tensors that a cache keeps alive
after the prompt.  All layers share one plan, fitted to the first: that saves compiling and changes nothing of
what is read.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from dquantcodec.bench.machine import versions
from dquantcodec.errors import DQuantError
from dquantcodec.integrations.transformers import ATTENTION, DQuantCache

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152,
    },
    "llama-3-8b, 8 layers": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000,
    },
}  # fmt: skip
#: Batch and tokens of the prompt, by shape.
ROWS = {
    "smollm2": ((1, 2048), (1, 32768), (8, 8192)),
    "llama-3-8b, 8 layers": ((1, 32768), (8, 8192), (8, 32768)),
}
PROFILE = "2.26"
#: Steps before those that are timed: kernels are loaded, and the batch of exact tokens is filled.
FIRST = 3


def network(shape: dict[str, Any], most: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**shape, max_position_embeddings=most, bos_token_id=None, eos_token_id=None)
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def cache_bytes(cache: Any) -> int:
    if isinstance(cache, DQuantCache):
        return cache.nbytes
    return sum(x.untyped_storage().nbytes() for layer in cache.layers for x in (layer.keys, layer.values))


@torch.inference_mode()
def prompt_read(model: Any, tokens: Any, cache: Any) -> Any:
    model.set_attn_implementation("sdpa")
    return model(tokens, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]


@torch.inference_mode()
def stepped(model: Any, token: Any, cache: Any, attention: str, steps: int) -> tuple[float, Any]:
    """Milliseconds of a step, and the token behind the last."""
    model.set_attn_implementation(attention)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        token = model(token, cache=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps * 1e3, token


def row(model: Any, batch: int, context: int, plan: Any, a: argparse.Namespace) -> list[dict[str, Any]]:
    """All caches after the same prompt."""
    config = model.config
    plans = dict.fromkeys(range(config.num_hidden_layers), plan)
    makers: dict[str, tuple[str, Callable[[], Any]]] = {
        "DynamicCache": ("sdpa", lambda: DynamicCache(config=config)),
        "DQuantCache, decoding": ("sdpa", lambda: DQuantCache(config, PROFILE, plans=plans)),
        "DQuantCache, attention over pages": (ATTENTION, lambda: DQuantCache(config, PROFILE, plans=plans)),
    }
    tokens = torch.randint(0, config.vocab_size, (batch, context), device="cuda")
    found: dict[str, dict[str, Any]] = {}
    for name, (attention, make) in makers.items():
        # One cache at a time, so that memory is that of one.
        result: dict[str, Any] = {"batch": batch, "context": context, "cache": name}
        try:
            cache = make()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            token = prompt_read(model, tokens, cache).argmax(-1, keepdim=True)
            torch.cuda.synchronize()
            result["prompt_ms"] = round((time.perf_counter() - begin) * 1e3, 1)
            result["bytes"] = cache_bytes(cache)
            _, token = stepped(model, token, cache, attention, FIRST)
            times = []
            for _ in range(a.repeats):
                taken, token = stepped(model, token, cache, attention, a.steps)
                times.append(taken)
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
        cache = token = None
        torch.cuda.empty_cache()
        found[name] = result
        print(json.dumps(result), flush=True)
    return list(found.values())


def fitted(model: Any) -> Any:
    """The plan of the first layer."""
    cache = DQuantCache(model.config, PROFILE, exact_layers=range(1, model.config.num_hidden_layers))
    prompt_read(model, torch.randint(0, model.config.vocab_size, (1, 1024), device="cuda"), cache)
    return cache.plans[0]


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
        "device": torch.cuda.get_device_name(),
        "versions": versions(("torch", "transformers", "cupy-cuda13x")),
        "transformers": transformers.__version__,
        "profile": PROFILE,
        "steps": arguments.steps,
        "rows": [],
    }
    for name, shape in SHAPES.items():
        if arguments.only not in (None, name):
            continue
        most = max(context for _, context in ROWS[name]) + arguments.steps * arguments.repeats + 16
        model = network(shape, most)
        plan = fitted(model)
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

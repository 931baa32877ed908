"""Generation with a coded cache beside transformers' own caches, on a real model.

    python benchmarks/engines [--json benchmarks/results/engines-transformers.json]

SmolLM2-135M-Instruct in bfloat16 reads the first ``--context`` tokens of a document at once and the next ``--scored``
tokens in portions of 16 (teacher forced: perplexity); from a second cache of the context it writes ``--written``
tokens, the most probable one each time.  Bytes are those of all tensors and arrays that a cache keeps alive after the
context.  transformers' quantised caches run where their backends are installed (``optimum-quanto``, ``hqq``), with
their own settings: groups of 64, at least the newest 128 tokens of what is generated exact, the prompt coded at once.

Weights and document are fetched as ``benchmarks/quality`` does.  Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "quality"))

import models
import texts
import torch
import transformers
from packages import default_cache
from transformers import DynamicCache, QuantizedCache

import dquantcodec
from dquantcodec.integrations.transformers import ATTENTION, DQuantCache

#: Tokens read together while scoring.
PORTION = 16


def held(thing: Any, found: dict[int, int]) -> dict[int, int]:
    """Bytes of all tensors and arrays that ``thing`` keeps alive, by their address."""
    if isinstance(thing, torch.Tensor):
        if hasattr(thing, "__tensor_flatten__"):
            for name in thing.__tensor_flatten__()[0]:
                held(getattr(thing, name), found)
        else:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    elif isinstance(thing, np.ndarray):
        found[thing.ctypes.data] = thing.nbytes
    elif isinstance(thing, dict):
        for value in thing.values():
            held(value, found)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            held(value, found)
    return found


def cache_bytes(cache: Any) -> int:
    if isinstance(cache, DQuantCache):
        return cache.nbytes
    found: dict[int, int] = {}
    for layer in cache.layers:
        held(vars(layer), found)
    return sum(found.values())


@torch.inference_mode()
def read(network: Any, tokens: list[int], cache: Any) -> torch.Tensor:
    return network(torch.tensor([tokens]), cache=cache, use_cache=True).logits[0].float()


def measure(network: Any, tokens: list[int], make: Callable[[], Any], a: argparse.Namespace) -> dict[str, Any]:
    """One cache: perplexity of the scored tokens, bytes after the context, the text it writes."""
    cache = make()
    following = read(network, tokens[: a.context], cache)[-1:]
    size = cache_bytes(cache)
    nll = []
    for start in range(a.context, a.context + a.scored, PORTION):
        part = tokens[start : start + PORTION]
        logits = read(network, part, cache)
        predicted = torch.cat([following, logits[:-1]])
        nll += torch.nn.functional.cross_entropy(predicted.double(), torch.tensor(part), reduction="none").tolist()
        following = logits[-1:]
    cache, written = make(), []
    token = int(read(network, tokens[: a.context], cache)[-1].argmax())
    for _ in range(a.written):
        written.append(token)
        token = int(read(network, [token], cache)[-1].argmax())
    return {"bytes": size, "perplexity": math.exp(sum(nll) / len(nll)), "written": written}


def caches(config: Any, a: argparse.Namespace) -> dict[str, tuple[str, Callable[[], Any]]]:
    """By name: the attention implementation and what makes an empty cache."""
    found: dict[str, tuple[str, Callable[[], Any]]] = {"DynamicCache": ("sdpa", lambda: DynamicCache(config=config))}
    for profile in a.profiles.split(","):
        found[f"DQuantCache {profile}"] = ("sdpa", lambda p=profile: DQuantCache(config, p))
    first = a.profiles.split(",")[0]
    found[f"DQuantCache {first}, attention over pages"] = (ATTENTION, lambda: DQuantCache(config, first))
    for backend, axis in (("quanto", 0), ("hqq", 1)):
        for bits in (4, 2):
            found[f"QuantizedCache {backend}, {bits} bits"] = (
                "sdpa",
                lambda b=backend, n=bits, x=axis: QuantizedCache(b, config, nbits=n, axis_key=x, axis_value=x),
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--scored", type=int, default=256)
    parser.add_argument("--written", type=int, default=32)
    parser.add_argument("--document", default="novel")
    parser.add_argument("--profiles", default="2.26,3.0", help="profiles, joined by commas")
    parser.add_argument("--dtype", choices=models.DTYPES, default="bfloat16")
    parser.add_argument("--models", type=Path, default=default_cache(), metavar="FOLDER", help="cache of downloads")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model = models.load("smollm2", arguments.models, dtype=arguments.dtype)
    document = next(d for d in texts.passages(arguments.models) if d.name == arguments.document)
    tokens = model.tokens(document.text)[: arguments.context + arguments.scored]
    rows: list[dict[str, Any]] = []
    for name, (attention, make) in caches(model.network.config, arguments).items():
        model.network.set_attn_implementation(attention)
        try:
            row = {"cache": name, **measure(model.network, tokens, make, arguments)}
        except ImportError as error:
            rows.append({"cache": name, "not_run": str(error).split(".")[0]})
            continue
        stock = rows[0] if rows else row
        same = next((i for i, (x, y) in enumerate(zip(row["written"], stock["written"])) if x != y), arguments.written)
        rows.append({**row, "of_dynamic": row["bytes"] / stock["bytes"], "same_tokens": same,
                     "written": model.tokenizer.decode(row["written"])})  # fmt: skip
        print(f"{name:<42} {row['bytes']:>12,} bytes  {rows[-1]['of_dynamic']:.3f}  perplexity {row['perplexity']:.3f}"
              f"  {same} of {arguments.written} tokens as with DynamicCache", flush=True)  # fmt: skip
    if arguments.json:
        result = {
            "what": "a coded cache in transformers beside its own, one document",
            "model": "SmolLM2-135M-Instruct, Q4_1 weights read as " + arguments.dtype,
            "weights_sha256": model.sha256,
            "document": document.name,
            "document_sha256": document.sha256,
            "context": arguments.context,
            "scored": arguments.scored,
            "written": arguments.written,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "dquantcodec": dquantcodec.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "command": "python benchmarks/engines --json benchmarks/results/engines-transformers.json",
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

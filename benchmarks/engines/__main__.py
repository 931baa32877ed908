"""Generation with a coded cache beside transformers' own caches, on a real model.

    python benchmarks/engines [--json benchmarks/results/engines-transformers.json]

SmolLM2-135M-Instruct in float32 reads the first ``--context`` tokens of a document at once and the next ``--scored``
tokens in portions of 16 (teacher forced: perplexity); from a copy of the cache it writes ``--written`` tokens, the most
probable one each time.  Bytes are those of all tensors and arrays that a cache keeps alive after the context, float32
numbers counted as the 16 bits they take in a model of 16 bits.  transformers' quantised caches run where their backends
are installed (``optimum-quanto``, ``hqq``), with their own settings: groups of 64, and the prompt is quantised at once,
to its last token.

Then a generation is stopped halfway, the cache is saved, and another process opens the file and writes the other half;
the text is compared with that of a run that was not interrupted (``resumed``; alone with ``--only-resumed``).

Weights and document are fetched as ``benchmarks/quality`` does.  Nothing is timed.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import subprocess
import sys
import tempfile
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
from dquantcodec.integrations.transformers_layer import DQuantLayer

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
            found[storage.data_ptr()] = storage.nbytes() // (2 if thing.dtype == torch.float32 else 1)
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
    found: dict[int, int] = {}
    for layer in cache.layers:
        held(list(layer.held()) if isinstance(layer, DQuantLayer) else vars(layer), found)
    return sum(found.values())


@torch.inference_mode()
def read(network: Any, tokens: list[int], cache: Any) -> torch.Tensor:
    return network(torch.tensor([tokens]), cache=cache, use_cache=True).logits[0].float()


def measure(network: Any, tokens: list[int], make: Callable[[], Any], a: argparse.Namespace) -> dict[str, Any]:
    """One cache: perplexity of the scored tokens, bytes after the context, the text it writes."""
    cache = make()
    following = read(network, tokens[: a.context], cache)[-1:]
    size = cache_bytes(cache)
    second, token, written = copy.deepcopy(cache), int(following.argmax()), []
    nll = []
    for start in range(a.context, a.context + a.scored, PORTION):
        part = tokens[start : start + PORTION]
        logits = read(network, part, cache)
        predicted = torch.cat([following, logits[:-1]])
        nll += torch.nn.functional.cross_entropy(predicted.double(), torch.tensor(part), reduction="none").tolist()
        following = logits[-1:]
    for _ in range(a.written):
        written.append(token)
        token = int(read(network, [token], second)[-1].argmax())
    return {"bytes": size, "perplexity": math.exp(sum(nll) / len(nll)), "written": written}


def greedy(network: Any, token: int, cache: Any, count: int) -> list[int]:
    """``token`` and what follows it, ``count`` tokens in all."""
    written = []
    for _ in range(count):
        written.append(token)
        token = int(read(network, [token], cache)[-1].argmax())
    return [*written, token]


def resumed(network: Any, tokens: list[int], a: argparse.Namespace) -> list[dict[str, Any]]:
    """With both attentions: a generation that is stopped halfway and goes on in another process."""
    rows = []
    for attention in ("sdpa", ATTENTION):
        network.set_attn_implementation(attention)
        # Few exact tokens, so that pages are loaded and others made afterwards.
        cache = DQuantCache(network.config, a.profiles.split(",")[0], recent=64)
        first = int(read(network, tokens[: a.context], cache)[-1].argmax())
        whole = copy.deepcopy(cache)
        expected = greedy(network, first, whole, a.resume)
        half = greedy(network, first, cache, a.resume // 2)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cache.dqkv"
            cache.save(path, model="SmolLM2-135M-Instruct", metadata={"next": half[-1]})
            size = path.stat().st_size
            command = [sys.executable, str(Path(__file__).parent), "--go-on", str(path), "--attention", attention]
            command += ["--models", str(a.models), "--dtype", a.dtype, "--resume", str(a.resume)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        written = half[:-1] + json.loads(done.stdout.splitlines()[-1])
        same = next((i for i, (x, y) in enumerate(zip(written, expected)) if x != y), len(expected))
        pages = [len(layer.rows[0].pages) for c in (cache, whole) for layer in list(c.coded_layers.values())[:1]]
        rows.append(
            {
                "attention": attention, "file_bytes": size, "pages_in_file": pages[0], "pages_at_the_end": pages[1],
                "stopped_after": a.resume // 2, "tokens": len(expected), "same_tokens": same,
            }
        )  # fmt: skip
        print(f"stopped and resumed, {attention}: {same} of {len(expected)} tokens the same", flush=True)
    return rows


def go_on(a: argparse.Namespace) -> None:
    """The other process: opens the file and writes what is left."""
    model = models.load("smollm2", a.models, dtype=a.dtype)
    model.network.set_attn_implementation(a.attention)
    cache = DQuantCache.load(a.go_on, model.network.config, model="SmolLM2-135M-Instruct")
    with dquantcodec.open(a.go_on) as file:
        token = int(file.metadata["next"])
    print(json.dumps(greedy(model.network, token, cache, a.resume - a.resume // 2)))


def caches(config: Any, a: argparse.Namespace) -> dict[str, tuple[str, Callable[[], Any]]]:
    """By name: the attention implementation and what makes an empty cache."""
    found: dict[str, tuple[str, Callable[[], Any]]] = {"DynamicCache": ("sdpa", lambda: DynamicCache(config=config))}
    for profile in a.profiles.split(","):
        found[f"DQuantCache {profile}"] = ("sdpa", lambda p=profile: DQuantCache(config, p))
    first = a.profiles.split(",")[0]
    found[f"DQuantCache {first}, attention over pages"] = (ATTENTION, lambda: DQuantCache(config, first))
    for backend, axis in (("hqq", 1), ("quanto", 0)):
        for bits in (4, 2):
            found[f"QuantizedCache {backend}, {bits} bits"] = (
                "sdpa",
                lambda b=backend, n=bits, x=axis: QuantizedCache(b, config, nbits=n, axis_key=x, axis_value=x),
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=896)
    parser.add_argument("--scored", type=int, default=64)
    parser.add_argument("--written", type=int, default=16)
    parser.add_argument("--document", default="novel")
    parser.add_argument("--profiles", default="2.26", help="profiles, joined by commas")
    parser.add_argument("--dtype", choices=models.DTYPES, default="float32")
    parser.add_argument("--models", type=Path, default=default_cache(), metavar="FOLDER", help="cache of downloads")
    parser.add_argument("--resume", type=int, default=96, help="tokens of the generation that is stopped halfway")
    parser.add_argument("--only-resumed", action="store_true", help="measure that alone and keep the rest of --json")
    parser.add_argument("--go-on", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--attention", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.go_on:
        go_on(arguments)
        return
    model = models.load("smollm2", arguments.models, dtype=arguments.dtype)
    document = next(d for d in texts.passages(arguments.models) if d.name == arguments.document)
    tokens = model.tokens(document.text)[: arguments.context + arguments.scored]
    result: dict[str, Any] = {
        "what": "a coded cache in transformers beside its own, one document",
        "model": f"SmolLM2-135M-Instruct, Q4_1 weights read as {arguments.dtype}",
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
        "rows": [],
    }
    if arguments.only_resumed:
        kept = json.loads(arguments.json.read_text(encoding="utf-8"))
        for name in ("weights_sha256", "document_sha256", "context", "transformers", "torch"):
            if kept[name] != result[name]:
                raise SystemExit(f"{arguments.json} is of another {name}: {kept[name]}, now {result[name]}")
        result = {**kept, "resumed": resumed(model.network, tokens, arguments)}
        arguments.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return
    stock: dict[str, Any] = {}
    for name, (attention, make) in caches(model.network.config, arguments).items():
        model.network.set_attn_implementation(attention)
        try:
            row = measure(model.network, tokens, make, arguments)
        except (ImportError, RuntimeError) as error:  # not installed, or its extension cannot be built
            result["rows"].append({"cache": name, "not_run": str(error).split(".")[0]})
            continue
        stock = stock or row
        pairs = zip(row["written"], stock["written"])
        same = next((i for i, (x, y) in enumerate(pairs) if x != y), arguments.written)
        ratio = row["bytes"] / stock["bytes"]
        text = model.tokenizer.decode(row["written"])
        result["rows"].append({"cache": name, **row, "of_dynamic": ratio, "same_tokens": same, "written": text})
        print(f"{name:<44} {row['bytes']:>11,} bytes {ratio:6.3f}  perplexity {row['perplexity']:8.3f}", end="")
        print(f"  {same} of {arguments.written} tokens as with DynamicCache", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    result["resumed"] = resumed(model.network, tokens, arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

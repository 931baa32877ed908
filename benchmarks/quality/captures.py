"""Captured keys, values and queries of a model, and the facts a result is recorded with.

A capture is a safetensors file with ``layers.{i}.key`` and ``layers.{i}.value`` ``[1, H, T, D]`` (keys after RoPE), and
``layers.{i}.query`` ``[1, Q, L, D]`` of the last ``L`` positions in the same file or in ``NAME.queries.safetensors``
beside it.  Without a file the sample bundled with dquantcodec is read.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

Floats = NDArray[np.float32]

#: The paper removes means and stores pages by windows of this many tokens.
WINDOW = 128


@dataclass(frozen=True, eq=False)
class CapturedLayer:
    """``keys`` and ``values`` float32 ``[T, H, D]``; ``queries`` ``[Q, L, D]`` of the last positions, or none."""

    number: int
    keys: Floats
    values: Floats
    queries: Floats | None = None


@dataclass(frozen=True, eq=False)
class Capture:
    """Layers of one text.  ``first_position`` is the position of token 0 in the model, which RoPE was applied with."""

    name: str
    sha256: dict[str, str]
    layers: tuple[CapturedLayer, ...]
    first_position: int

    @property
    def tokens(self) -> int:
        return len(self.layers[0].keys)

    @property
    def stream_values(self) -> int:
        """``n``: values of one token's keys."""
        return int(self.layers[0].keys[0].size)

    def facts(self) -> dict[str, Any]:
        """What a reader needs to know to tell this input from another."""
        return {
            "capture": self.name,
            "sha256": self.sha256,
            "layers": [layer.number for layer in self.layers],
            "tokens": self.tokens,
            "first_position": self.first_position,
            "kv_heads": self.layers[0].keys.shape[1],
            "head_dim": self.layers[0].keys.shape[2],
        }


def bundled_sample() -> Path:
    return Path(str(files("dquantcodec"))) / "data" / "sample.safetensors"


def read_capture(path: Path | None = None) -> Capture:
    """The capture at ``path``, or the bundled sample; raises ``ValueError`` if it holds no keys."""
    path = path or bundled_sample()
    companion = path.with_name(f"{path.stem}.queries.safetensors")
    paths = [path, companion] if companion.exists() else [path]
    tensors: dict[str, Floats] = {}
    metadata: dict[str, str] = {}
    for part in paths:
        with safe_open(part, "np") as file:
            metadata = metadata or file.metadata() or {}
            tensors |= {name: file.get_tensor(name)[0].astype(np.float32) for name in file.keys()}  # noqa: SIM118
    numbers = sorted(int(found[1]) for name in tensors if (found := re.fullmatch(r"layers\.(\d+)\.key", name)))
    if not numbers:
        raise ValueError(f"{path.name} holds no tensors called layers.N.key")
    layers = tuple(
        CapturedLayer(
            number,
            np.ascontiguousarray(tensors[f"layers.{number}.key"].transpose(1, 0, 2)),
            np.ascontiguousarray(tensors[f"layers.{number}.value"].transpose(1, 0, 2)),
            tensors.get(f"layers.{number}.query"),
        )
        for number in numbers
    )
    hashes = {part.name: hashlib.sha256(part.read_bytes()).hexdigest() for part in paths}
    return Capture(path.name, hashes, layers, _first_position(metadata))


def _first_position(metadata: dict[str, str]) -> int:
    """The sample says "512 to 1023 (counted from 0) ..."; a capture that says nothing of the kind begins at 0."""
    found = re.match(r"(\d+) to \d+ \(counted from 0\)", metadata.get("tokens", ""))
    return int(found[1]) if found else 0


def centred(x: Floats, window: int = WINDOW) -> NDArray[np.float64]:
    """``x`` ``[T, H, D]`` without every channel's mean over its window."""
    exact = x.astype(np.float64)
    return np.concatenate(
        [part - part.mean(axis=0, keepdims=True) for part in np.split(exact, range(window, len(x), window))]
    )


def normal_tokens(tokens: int, heads: int = 8, head_dim: int = 128, seed: int = 20) -> tuple[Floats, Floats]:
    """Keys and values ``[tokens, heads, head_dim]`` of independent standard normal numbers."""
    keys, values = np.random.default_rng(seed).standard_normal((2, tokens, heads, head_dim), dtype=np.float32)
    return keys, values


def command_parser(description: str | None) -> argparse.ArgumentParser:
    """The options every command here has: ``--capture`` and ``--json``."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--capture", type=Path, metavar="FILE", help="captured keys and values (the bundled sample)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    return parser


def write_result(path: Path | None, command: str, argv: list[str], result: dict[str, Any]) -> None:
    """``result`` as JSON with versions and command, if a ``path`` was asked for."""
    if path is None:
        return
    plain = [Path(word).name if "/" in word else word for word in argv]
    document = {"command": " ".join(["python benchmarks/quality", command, *plain]), "versions": versions(), **result}
    path.write_text(json.dumps(rounded(document), indent=1) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("dquantcodec", "numpy", "numba", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def rounded(value: Any) -> Any:
    """``value`` with every float to six significant digits: what is stable between machines, and readable."""
    if isinstance(value, dict):
        return {str(key): rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    if isinstance(value, (float, np.floating)):
        return float(f"{float(value):.6g}")
    return int(value) if isinstance(value, np.integer) else value

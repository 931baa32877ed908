"""The shape of a model's KV cache, from its configuration: what has to be known to say how large it gets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import InputError, UnsupportedError

#: Kinds of layers that keep keys and values of every token, or of a sliding window of them.
FULL, SLIDING = ("full_attention", "global"), ("sliding_attention", "local", "chunked_attention")


@dataclass(frozen=True)
class LayerShape:
    """KV heads and values a head of one layer; ``sliding`` is how many tokens it keeps at most, None for all."""

    number: int
    kv_heads: int
    head_dim: int
    sliding: int | None = None

    def tokens(self, context: int) -> int:
        """Tokens the layer holds of a context."""
        return context if self.sliding is None else min(context, self.sliding)


@dataclass(frozen=True)
class ModelShape:
    """The layers of a model that have a KV cache."""

    name: str
    layers: tuple[LayerShape, ...]

    @staticmethod
    def load(path: str | Path) -> ModelShape:
        """Of a Hugging Face ``config.json``, or of the folder it lies in."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise InputError(f"is no JSON: {error}", code="config-json", path=str(path)) from None
        if not isinstance(config, dict):
            raise InputError("holds no JSON object", code="config-json", path=str(path))
        return ModelShape.from_config(config, str(path))

    @staticmethod
    def from_config(config: Mapping[str, Any], path: str = "") -> ModelShape:
        """Of the content of a ``config.json``; models with images or sound keep the text model's in ``text_config``.

        >>> llama = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
        >>> ModelShape.from_config(llama).layers[0]
        LayerShape(number=0, kv_heads=8, head_dim=128, sliding=None)
        """
        name = str(config.get("_name_or_path") or config.get("model_type") or "")
        inner = config.get("text_config")
        text: Mapping[str, Any] = inner if isinstance(inner, dict) else config
        if text.get("kv_lora_rank"):
            raise UnsupportedError(
                "the model keeps one latent vector a token (MLA) in place of keys and values; its size is not planned",
                code="config-latent",
                path=path,
            )
        count = _positive(text, "num_hidden_layers", path)
        queries = _positive(text, "num_attention_heads", path)
        head_dim = text.get("head_dim") or _positive(text, "hidden_size", path) // queries
        heads = text.get("num_key_value_heads") or queries
        by_layer = heads if isinstance(heads, list) else [heads] * count
        kinds = text.get("layer_types") or _kinds(text, count)
        if len(by_layer) != count or len(kinds) != count:
            raise InputError(f"lists by layer are not {count} long", code="config-layers", path=path)
        window = text.get("sliding_window") or text.get("attention_chunk_size")
        layers = []
        for number, (kv_heads, kind) in enumerate(zip(by_layer, kinds)):
            if kind in FULL or kind in SLIDING:
                sliding = int(window) if kind in SLIDING and window else None
                layers.append(LayerShape(number, int(kv_heads), int(head_dim), sliding))
        if not layers:
            raise InputError("no layer has a KV cache", code="config-layers", path=path)
        return ModelShape(name, tuple(layers))


def _kinds(text: Mapping[str, Any], count: int) -> list[str]:
    """Kinds of the layers of configurations that do not list them."""
    pattern = text.get("sliding_window_pattern")
    if isinstance(pattern, int) and pattern > 1:
        return ["full_attention" if number % pattern == pattern - 1 else SLIDING[0] for number in range(count)]
    # Configurations of Qwen2 and its kin name a window and switch it off.
    slides = text.get("sliding_window") and text.get("use_sliding_window", True)
    return [SLIDING[0] if slides else FULL[0]] * count


def _positive(text: Mapping[str, Any], field: str, path: str) -> int:
    number = text.get(field)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise InputError(f"{field} is {number!r}, not a positive number", code="config-field", path=path)
    return number

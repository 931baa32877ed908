"""Containers by layer as a small JSON file: what ``dqkv plan`` writes and ``dqkv compress --profile`` takes.

    {"dqkv-profile": 1, "profile": "2.26",
     "layers": {"0": {"kv_heads": 8, "head_dim": 128, "key_words": 41, "value_words": 29}, ...}}

``profile`` names the profile that everything else comes from; words are those of one sub-stream's container.  Layers
that are not listed take the profile as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import InputError
from .plan import Plan
from .profile import PROFILES

VERSION_FIELD, VERSION = "dqkv-profile", 1
MAX_WORDS = 32767


@dataclass(frozen=True)
class LayerWords:
    """Words of a sub-stream's containers, for one geometry."""

    kv_heads: int
    head_dim: int
    key_words: int
    value_words: int

    def __post_init__(self) -> None:
        for field, number in asdict(self).items():
            if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MAX_WORDS:
                raise InputError(f"{field} is {number!r}, not a number from 1 to {MAX_WORDS}", code="profile-file")

    @property
    def words(self) -> tuple[int, int]:
        return self.key_words, self.value_words


@dataclass(frozen=True)
class LayerBudgets:
    """A named profile and the containers of some layers, by layer number."""

    profile: str
    layers: Mapping[int, LayerWords]

    @staticmethod
    def of(profile: str, plans: Mapping[int, Plan]) -> LayerBudgets:
        """Those of plans that were allocated (:func:`dquantcodec.allocate.allocate`)."""
        return LayerBudgets(
            profile,
            {
                number: LayerWords(plan.kv_heads, plan.head_dim, plan.key.words, plan.value.words)
                for number, plan in plans.items()
            },
        )

    @staticmethod
    def load(path: str | Path) -> LayerBudgets:
        """Read and check a file; :class:`InputError` names it and says what is wrong."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            return _checked(content)
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise InputError(f"is no JSON: {error}", code="profile-file", path=str(path)) from None
        except InputError as error:
            error.where["path"] = str(path)
            raise

    def save(self, path: str | Path) -> None:
        """Write it, a line a layer."""
        lines = (f'    "{number}": {json.dumps(asdict(words))}' for number, words in sorted(self.layers.items()))
        head = f'{{\n  "{VERSION_FIELD}": {VERSION},\n  "profile": "{self.profile}",\n  "layers": {{\n'
        Path(path).write_text(head + ",\n".join(lines) + "\n  }\n}\n", encoding="utf-8")

    def words(self, number: int, kv_heads: int, head_dim: int) -> tuple[int, int] | None:
        """Words of keys and of values of layer ``number``, None for the profile's; the geometry must be the file's."""
        found = self.layers.get(number)
        if found is None:
            return None
        if (found.kv_heads, found.head_dim) != (kv_heads, head_dim):
            raise InputError(
                f"the profile file is for {found.kv_heads} KV heads of {found.head_dim}, the layer has {kv_heads} of "
                f"{head_dim}; plan again with these tensors",
                code="profile-geometry",
                layer=number,
            )
        return found.words


def _checked(content: Any) -> LayerBudgets:
    if not isinstance(content, dict) or content.get(VERSION_FIELD) != VERSION:
        raise InputError(
            f'is no profile file of this version: it has no "{VERSION_FIELD}": {VERSION}', code="profile-file"
        )
    name, layers = content.get("profile"), content.get("layers")
    if not isinstance(name, str) or name not in PROFILES:
        raise InputError(f"no profile is called {name!r}; there are {', '.join(PROFILES)}", code="profile-unknown")
    if not isinstance(layers, dict):
        raise InputError("layers is no object", code="profile-file")
    budgets = {}
    for number, entry in layers.items():
        if not number.isdecimal() or not isinstance(entry, dict) or set(entry) != set(LayerWords.__annotations__):
            raise InputError(
                f"layer {number!r} does not consist of {', '.join(LayerWords.__annotations__)}", code="profile-file"
            )
        budgets[int(number)] = LayerWords(**entry)
    return LayerBudgets(name, budgets)

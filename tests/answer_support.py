"""Checking a JSON document against what the reference says of it."""

from __future__ import annotations

from typing import Any

TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "list": (list,),
    "object": (dict,),
}


def check(document: Any, shape: dict[str, Any], path: str = "") -> None:
    """Exactly the keys of ``shape``, each of its type."""
    assert isinstance(document, dict), path
    assert set(document) == {key.removesuffix("?") for key in shape}, path
    for key, inner in shape.items():
        found, place = document[key.removesuffix("?")], f"{path}.{key}"
        if found is None:
            assert key.endswith("?"), f"{place} is null"
        elif isinstance(inner, dict):
            check(found, inner, place)
        elif isinstance(inner, list):
            for one in found:
                check(one, inner[0], place)
        else:
            wanted = tuple(kind for name in inner.partition(":")[0].split(" or ") for kind in TYPES[name])
            assert isinstance(found, wanted), place
            assert bool in wanted or not isinstance(found, bool), place

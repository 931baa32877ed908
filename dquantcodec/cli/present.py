"""The layers that a ``.dqkv`` file stores, and the profiles they use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import InputError


def present_layers(reader: Any, wanted: Sequence[int] | None = None) -> dict[int, int]:
    """Layer numbers (of the model) and their places in the file, absent layers left out; ``wanted`` must be there."""
    from ..tensors import format_numbers

    there = {
        layer.index if layer.spec.number is None else layer.spec.number: layer.index
        for layer in reader.contents
        if layer.spec.storage != "absent"
    }
    missing = [number for number in wanted or () if number not in there]
    if missing:
        raise InputError(
            f"there is no layer {format_numbers(missing)}; the layers are {format_numbers(there)}", code="layer-missing"
        )
    return {number: place for number, place in there.items() if wanted is None or number in wanted}


def profile_names(reader: Any) -> list[str]:
    """Names of the profiles that coded layers use, ``"exact"`` if there are none."""
    names = {plan.profile_name for layer in reader.contents for plan in layer.plans}
    return sorted(names) or ["exact"]

"""What a ``.dqkv`` file remembers of the tensors it was made from: their names and layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LAYOUTS = ("BHTD", "HTD", "THD", "BTHD")


def recorded_source(metadata: Mapping[str, Any]) -> dict[str, str] | None:
    """What :meth:`.KVSource.record` put into a file's ``metadata["source"]``; ``None`` if nothing of the kind is."""
    record = metadata.get("source")
    if not isinstance(record, Mapping) or not all(isinstance(record.get(part), str) for part in ("key", "value")):
        return None
    if record.get("layout") not in LAYOUTS:
        return None
    return {part: record[part] for part in ("key", "value", "layout")}

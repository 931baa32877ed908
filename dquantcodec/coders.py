"""The letter coders by the name a plan gives them: modules with ``encode``, ``decode`` and ``decode_levels`` alike."""

from __future__ import annotations

from typing import Any

from . import prefix, rans

CODERS: dict[str, Any] = {"rans": rans, "prefix": prefix}

"""The codec on NVIDIA GPUs: the same bytes as the CPU's.

Importing this needs neither CuPy nor a GPU; making a codec does, and says in one line what is missing.  The device code
itself is in ``gpu/include/dquant``: headers that other programs can include without this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import Cache
    from .codec import Codec

_HOMES = {"Cache": "cache", "Codec": "codec"}

__all__ = ["Cache", "Codec"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])

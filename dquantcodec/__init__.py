"""D-Quant: the KV cache of language models at about 2.26 bits per value, in fixed-size containers per token.

Names are imported on first use, so opening a file or asking for help does not load Numba.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .codec import Codec, Pages
    from .errors import DeviceError, DQuantError
    from .file import Layer, append, create, open, repack
    from .fit import fit_plan
    from .profile import PROFILES, Profile, StreamProfile

_HOMES = {
    "Codec": "codec",
    "DQuantError": "errors",
    "DeviceError": "errors",
    "Layer": "file",
    "PROFILES": "profile",
    "Pages": "codec",
    "Profile": "profile",
    "StreamProfile": "profile",
    "append": "file",
    "create": "file",
    "fit_plan": "fit",
    "open": "file",
    "repack": "file",
}

__all__ = [
    "PROFILES",
    "Codec",
    "DQuantError",
    "DeviceError",
    "Layer",
    "Pages",
    "Profile",
    "StreamProfile",
    "append",
    "create",
    "fit_plan",
    "open",
    "repack",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])

"""D-Quant: the KV cache of language models at about 2.26 bits per value, in fixed-size containers per token.

Names are imported on first use, so opening a file or asking for help does not load Numba.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy import on_first_use

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .codec import Codec, Pages
    from .errors import DeviceError, DQuantError
    from .file import Layer, append, create, open, repack, reshard
    from .fit import fit_plan
    from .profile import PROFILES, Profile, StreamProfile

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
    "reshard",
]

__getattr__, __dir__ = on_first_use(
    __name__,
    {
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
        "reshard": "file",
    },
)

"""The ``.dqkv`` file: appending writer, mapped reader, checks (specification: ``formats/dqkv.md``).

Names are loaded on first use, so that importing the package costs nothing and looking into a file needs no Numba.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .appending import append
    from .creating import create
    from .layer import Layer
    from .reader import open
    from .repacking import repack

__all__ = ["Layer", "append", "create", "open", "repack"]

_HOMES = {"Layer": "layer", "append": "appending", "create": "creating", "open": "reader", "repack": "repacking"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

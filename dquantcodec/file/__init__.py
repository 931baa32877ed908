"""The ``.dqkv`` file: appending writer, mapped reader, checks (specification: ``formats/dqkv.md``).

Names are loaded on first use, so that importing the package costs nothing and looking into a file needs no Numba.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import on_first_use

if TYPE_CHECKING:
    from .appending import append
    from .creating import create
    from .layer import Layer
    from .reader import open
    from .repacking import repack
    from .resharding import reshard

__all__ = ["Layer", "append", "create", "open", "repack", "reshard"]

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        "Layer": "layer",
        "append": "appending",
        "create": "creating",
        "open": "reader",
        "repack": "repacking",
        "reshard": "resharding",
    },
)

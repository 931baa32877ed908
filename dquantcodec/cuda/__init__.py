"""The codec on NVIDIA GPUs: the same bytes as the CPU's.

Importing this needs neither CuPy nor a GPU; making a codec does, and says in one line what is missing.  The device code
itself is in ``gpu/include/dquant``: headers that other programs can include without this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import on_first_use

if TYPE_CHECKING:
    from .cache import Cache
    from .codec import Codec

__all__ = ["Cache", "Codec"]

__getattr__, __dir__ = on_first_use(__name__, {"Cache": "cache", "Codec": "codec"})

"""Reading saved keys and values from safetensors and ``.npz`` files, and writing them back.

Knows nothing of the codec or of ``.dqkv``: an input is recognised (:func:`open_source`), read by token range
(:meth:`KVSource.read`) and written by token range (:class:`SafetensorsWriter`).

Names are loaded on first use: looking into a ``.dqkv`` file needs no reader of archives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import on_first_use

if TYPE_CHECKING:
    from .dtypes import numpy_dtype
    from .finite import find_nonfinite, replace_nonfinite
    from .layouts import Geometry
    from .names import spell
    from .numbers import format_numbers
    from .queries import QuerySource, open_queries
    from .record import LAYOUTS, recorded_source
    from .source import KVLayer, KVSource, open_source
    from .write import OutputTensor, SafetensorsWriter

__all__ = [
    "LAYOUTS",
    "Geometry",
    "KVLayer",
    "KVSource",
    "OutputTensor",
    "QuerySource",
    "SafetensorsWriter",
    "find_nonfinite",
    "format_numbers",
    "numpy_dtype",
    "open_queries",
    "open_source",
    "recorded_source",
    "replace_nonfinite",
    "spell",
]

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        "LAYOUTS": "record",
        "Geometry": "layouts",
        "KVLayer": "source",
        "KVSource": "source",
        "OutputTensor": "write",
        "QuerySource": "queries",
        "SafetensorsWriter": "write",
        "find_nonfinite": "finite",
        "format_numbers": "numbers",
        "numpy_dtype": "dtypes",
        "open_queries": "queries",
        "open_source": "source",
        "recorded_source": "record",
        "replace_nonfinite": "finite",
        "spell": "names",
    },
)

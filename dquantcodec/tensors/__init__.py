"""Reading saved keys and values from safetensors and ``.npz`` files, and writing them back.

Knows nothing of the codec or of ``.dqkv``: an input is recognised (:func:`open_source`), read by token range
(:meth:`KVSource.read`) and written by token range (:class:`SafetensorsWriter`).
"""

from .dtypes import numpy_dtype
from .finite import find_nonfinite, replace_nonfinite
from .layouts import LAYOUTS, Geometry
from .names import format_numbers, spell
from .queries import QuerySource, open_queries
from .source import KVLayer, KVSource, open_source, recorded_source
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

"""Proving an encoder or decoder of this format: strategies, plain-Python oracles, properties, checks.

Write a function with the signature of :func:`check_decoder`, :func:`check_encoder`, :func:`check_page_decoder` or
:func:`check_page_encoder`, hand it over, and read the vector file of the least case it fails; :func:`replay` runs that
case again.  ``docs/fuzzing.md`` works one through.  The parts:

- :mod:`~dquantcodec.testing.strategies`: Hypothesis strategies of plans, containers, tensors and pages;
- :mod:`~dquantcodec.testing.containers`, :mod:`~dquantcodec.testing.coders`, :mod:`~dquantcodec.testing.groups`,
  :mod:`~dquantcodec.testing.trellises`, :mod:`~dquantcodec.testing.pages`: the format in plain Python, and exact rates;
- :mod:`~dquantcodec.testing.properties`, :mod:`~dquantcodec.testing.drifting`: what must hold, a function each;
- :mod:`~dquantcodec.testing.plans`: plans of a few values;
- :mod:`~dquantcodec.testing.files`: small files, mutations of files, and a model of writer and reader;
- :mod:`~dquantcodec.testing.lives`: a model of a file that is appended to, rewound, repacked and resharded;
- :mod:`~dquantcodec.testing.fuzz`: coverage-guided fuzzing, ``python -m dquantcodec.testing.fuzz``.
"""

from __future__ import annotations

try:
    import hypothesis  # noqa: F401
except ImportError:
    raise ImportError("dquantcodec.testing needs Hypothesis: pip install 'dquantcodec[testing]'") from None

from .check import (
    CheckFailed,
    check_decoder,
    check_encoder,
    check_page_decoder,
    check_page_encoder,
    replay,
)
from .containers import ContainerPlan, library_decode, library_encode, plain_decode, plain_encode

__all__ = [
    "CheckFailed",
    "ContainerPlan",
    "check_decoder",
    "check_encoder",
    "check_page_decoder",
    "check_page_encoder",
    "library_decode",
    "library_encode",
    "plain_decode",
    "plain_encode",
    "replay",
]

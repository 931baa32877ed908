"""What can be wrong with pages that were read: statuses of streams, and fields that no encoder writes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from .encode import LEAST_EXPONENT, MOST_EXPONENT
from .letters import by_token
from .page import KindFields


def wrong(status: NDArray[np.uint8], tokens: slice) -> bool:
    """Whether ``status`` uint8 ``[tiles, S, 32]`` has another than 0 for one of ``tokens``."""
    return bool(status.any() and by_token(status)[tokens].any())


def fit(exponents: NDArray[np.int16], fields: KindFields, tokens: slice) -> bool:
    """Whether :func:`unfit_fields` finds nothing in any of several pages."""
    inside = (exponents >= LEAST_EXPONENT) & (exponents <= MOST_EXPONENT)
    means = fields.scale is None or np.isfinite(fields.scale).all()
    return bool(inside.all() and means and np.isfinite(fields.affine[tokens]).all())


def unfit_fields(fields: KindFields, tokens: slice) -> Iterator[tuple[int, str]]:
    """Reason codes of fields that no encoder writes, each with a token counted from the first of ``tokens``."""
    if not LEAST_EXPONENT <= fields.exponent <= MOST_EXPONENT:
        yield 0, "page-exponent"
    if fields.scale is not None and not np.isfinite(fields.scale).all():
        yield 0, "page-affine"
    finite = np.isfinite(fields.affine[tokens]).all(axis=1)
    yield from ((int(token), "page-affine") for token in np.flatnonzero(~finite))


def unused_bytes(fields: KindFields, tokens: int) -> bool:
    """Whether tiles hold anything for tokens from ``tokens`` on, which do not exist."""
    by_token = fields.words.transpose(0, 3, 1, 2).reshape(len(fields.affine), -1)
    return bool(by_token[tokens:].any() or fields.affine[tokens:].view(np.uint16).any())

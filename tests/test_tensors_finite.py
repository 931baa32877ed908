"""NaN and infinity in the input."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dquantcodec.tensors import find_nonfinite, replace_nonfinite

DTYPES = [np.float16, np.float32, ml_dtypes.bfloat16]


def block(dtype: Any) -> Any:
    return np.random.default_rng(0).standard_normal((6, 2, 4)).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_blocks_pass_untouched(dtype: Any) -> None:
    array = block(dtype)
    array[0, 0, :2] = np.finfo(np.float16).max if dtype == np.float16 else 3e38, -0.0
    assert find_nonfinite(array) is None
    same, count = replace_nonfinite(array, "clamp")
    assert same is array
    assert count == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bad", "what"), [(np.nan, "NaN"), (np.inf, "infinity"), (-np.inf, "infinity")])
def test_the_first_one_is_named(dtype: Any, bad: float, what: str) -> None:
    array = block(dtype)
    array[3, 1, 2] = array[4, 0, 0] = array[3, 1, 3] = bad
    place = find_nonfinite(array)
    assert place is not None
    assert (place.token, place.head, place.channel, place.what) == (3, 1, 2, what)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero(dtype: Any) -> None:
    array = block(dtype)
    array[1, 0, 0], array[1, 1, 3], array[5, 0, 1] = np.nan, np.inf, -np.inf
    fixed, count = replace_nonfinite(array, "zero")
    assert count == 3
    assert fixed.dtype == array.dtype
    assert fixed[1, 0, 0] == fixed[1, 1, 3] == fixed[5, 0, 1] == 0
    good = np.isfinite(array.astype(np.float32))
    assert (fixed[good] == array[good]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_clamp_takes_the_tokens_own_largest(dtype: Any) -> None:
    array = block(dtype)
    array[1, 0, 0], array[1, 0, 1], array[1, 1, 3], array[2, 1, 1] = np.nan, np.inf, -np.inf, -9
    array[3] = np.inf
    array[3, 0, 0] = np.nan
    fixed, count = replace_nonfinite(array, "clamp")
    assert count == 3 + 8
    rest = np.abs(array[1].astype(np.float32))
    largest = rest[np.isfinite(rest)].max()
    assert fixed[1, 0, 0] == 0
    assert fixed[1, 0, 1] == largest
    assert fixed[1, 1, 3] == -largest
    assert not fixed[3].any()
    again, _ = replace_nonfinite(array[1:2], "clamp")
    assert (again == fixed[1:2]).all()

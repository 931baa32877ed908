"""Decoding into memory of the caller."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from dquantcodec import Codec
from dquantcodec.codec import Pages
from dquantcodec.errors import InputError

CODEC = Codec("2.26", 2, 64)


@pytest.fixture(scope="module")
def pages() -> Pages:
    x = np.random.default_rng(0).standard_normal((2, 300, 2, 64)).astype(np.float16)
    return CODEC.encode(*x)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("heads_first", [False, True])
def test_rows_go_where_the_caller_wants_them(pages: Pages, dtype: type, heads_first: bool) -> None:
    for kind, start, stop in (("key", 0, 300), ("value", 33, 290), ("value", 7, 7)):
        want = CODEC.decode_kind(pages, kind, start, stop, dtype=dtype)
        tokens = stop - start
        memory = np.full((2, tokens + 2, 64) if heads_first else (tokens + 2, 2, 64), 9, dtype)
        out = memory[:, 1:-1].transpose(1, 0, 2) if heads_first else memory[1:-1]
        # The dtype of the memory decides.
        assert CODEC.decode_kind(pages, kind, start, stop, dtype=np.float32, out=out) is out
        assert out.tobytes() == want.tobytes()
        rows = memory.transpose(1, 0, 2) if heads_first else memory
        assert (rows[[0, -1]] == 9).all()


def test_memory_that_cannot_take_rows_is_refused(pages: Pages) -> None:
    frozen = np.zeros((300, 2, 64), np.float16)
    frozen.flags.writeable = False
    for out in (np.zeros((299, 2, 64), np.float16), frozen, [0.0]):
        with pytest.raises(InputError) as caught:
            CODEC.decode_kind(pages, "key", out=out)  # type: ignore[arg-type]
        assert caught.value.code == "input-out"
    with pytest.raises(InputError) as caught:
        CODEC.decode_kind(pages, "key", out=np.zeros((300, 2, 64), np.int16))
    assert caught.value.code == "input-dtype"

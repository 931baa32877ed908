"""Without a compiler (``NUMBA_DISABLE_JIT=1``) kernels run as Python: the same pages, numbers and attention."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dquantcodec import plain_steps
from dquantcodec.codec import Codec
from dquantcodec.plan import Plan, make_plan
from dquantcodec.profile import Profile, StreamProfile
from dquantcodec.testing.plans import drifting_plan, rans_plan, rotated_plan, small_plan
from dquantcodec.testing.tensors import hostile

#: What a process without compiler is asked to do with the plans of :func:`plans`, by the number of each.
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[2])
import numpy as np
import test_without_jit as here
from dquantcodec import kernels
assert not kernels.COMPILED
np.savez(sys.argv[1], **{f"{i}-{name}": x for i in map(int, sys.argv[3:]) for name, x in here.coded(i).items()})
"""


def plans() -> list[Plan]:
    """Both coders, both grids, groups, a trellis, every form of the rotation's steps."""
    wide = Profile(StreamProfile(6, 560, "rans", mean=True), StreamProfile(5, 480, letter=2), window=32, substreams=2)
    rotated = [make_plan(wide, 2, 12), make_plan(wide, 1, 80), rotated_plan()]
    return [*rotated, small_plan(), small_plan(4), drifting_plan(), drifting_plan(4), rans_plan()]


def coded(number: int) -> dict[str, np.ndarray]:
    plan = plans()[number]
    keys, values = (
        np.concatenate([hostile(kind, 9, plan.kv_heads, plan.head_dim, number + i, plan.signs)
                        for kind in ("normal", "outlier", "sparse", "mixed")]) for i in (0, 1)
    )  # fmt: skip
    codec = Codec(plan)
    pages = codec.encode(keys, values)
    query = np.random.default_rng(number).standard_normal((plan.kv_heads, plan.head_dim)).astype(np.float32)
    output, lse = codec.attend(query, codec.encode(keys[:9], values[:9]))
    decoded, half = codec.decode(pages), codec.decode_kind(pages, "key", dtype=np.float16)
    return {"pages": pages.data, "keys": decoded[0], "values": decoded[1], "half": half, "out": output, "lse": lse}


@pytest.mark.parametrize("numbers", [(0, 1, 2, 7), (3, 4, 5, 6)], ids=["rotated", "grouped"])
def test_kernels_as_python_give_the_same_bytes(numbers: tuple[int, ...], tmp_path: Path) -> None:
    """CI runs this with ``NUMBA_BOUNDSCHECK=1``, too: then compiled kernels check every index."""
    out = tmp_path / "coded.npz"
    command = [sys.executable, "-c", SCRIPT, str(out), str(Path(__file__).parent), *map(str, numbers)]
    subprocess.run(command, check=True, env={**os.environ, "NUMBA_DISABLE_JIT": "1"})
    with np.load(out) as found:
        for i in numbers:
            for name, x in coded(i).items():
                other = found[f"{i}-{name}"]
                if name in ("out", "lse"):
                    # Attention may fuse products and sums; no page depends on it.
                    np.testing.assert_allclose(other, x, rtol=1e-4, atol=1e-5)
                else:
                    assert other.tobytes() == x.tobytes(), (i, name)


def test_steps_stay_within_their_arrays() -> None:
    """Without this a kernel's wrong index would go unnoticed, or take another lane's numbers."""
    rows, out = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    plain_steps.turn_words(rows, 0, 8, out, 0, 8)
    assert out.reshape(8, 8).tolist() == rows.reshape(8, 8).T.tolist()
    for at, to in ((1, 0), (0, 1), (-1, 0), (0, -1)):
        with pytest.raises((TypeError, ValueError)):
            plain_steps.turn_words(rows, at, 8, out, to, 8)
    for at in (-1, 33):
        with pytest.raises(IndexError):
            plain_steps.copy_row(rows, at, out, 0)
        with pytest.raises(IndexError):
            plain_steps.pair_rows(rows, at, out, 0)
    columns = np.zeros(256, np.float32)
    for at in (-1, 1):
        with pytest.raises((TypeError, ValueError)):
            plain_steps.butterfly8(columns, at, 32)


def taken(stream: np.ndarray, window: np.ndarray, *, end: int = 0, base: int = 0) -> list[int]:
    """One letter of eight lanes that begin at bit ``end``, and where they end."""
    ends, entries = np.full(8, end, np.uint64), np.zeros(32, np.uint16)
    plain_steps.take_one(stream, ends, window, base, 1, entries, 0)
    return [*entries[:8].tolist(), *ends.tolist()]


def test_letters_are_looked_up_again_in_another_table() -> None:
    stream = np.arange(16, dtype=np.uint8)
    one, other = np.array([1 << 4 | 1, 2 << 4 | 2], np.uint16), np.array([3 << 4 | 3, 4 << 4 | 4], np.uint16)
    for _ in range(2):
        assert taken(stream, one) == [17] * 8 + [1] * 8
        assert taken(stream, other) == [51] * 8 + [3] * 8
        assert taken(stream, one, end=8) == [34] * 8 + [10] * 8
    stream[0] = 1
    assert taken(stream, one) == [34] * 8 + [2] * 8
    for window, end, base in ((one, 72, 0), (one, 0, 1)):
        with pytest.raises(IndexError):
            taken(stream, window, end=end, base=base)

"""Without a compiler (``NUMBA_DISABLE_JIT=1``) kernels run as Python: the same pages, numbers and attention."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dquantcodec.codec import Codec
from dquantcodec.plan import Plan, make_plan
from dquantcodec.profile import Profile, StreamProfile
from dquantcodec.testing.files import drifting_plan, rotated_plan, small_plan
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
    return [*rotated, small_plan(), small_plan(4), drifting_plan(), drifting_plan(4)]


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


@pytest.mark.parametrize("numbers", [(0, 1, 2), (3, 4, 5, 6)], ids=["rotated", "grouped"])
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

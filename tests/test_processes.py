"""The codec in several threads that all use it first, and then in processes that were forked or spawned."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

import dquantcodec

SCRIPT = """
import multiprocessing
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import dquantcodec as dq

codec = dq.Codec("2.26", 2, 64, threads=2)


def pages(seed):
    x = np.random.default_rng(seed).standard_normal((300, 2, 64)).astype(np.float16)
    coded = codec.encode(x, x)
    codec.decode(coded)
    return coded.data.tobytes()


if __name__ == "__main__":
    with ThreadPoolExecutor(3) as pool:
        first = list(pool.map(pages, [0, 1, 0]))
    assert first[0] == first[2] != first[1]
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        assert pool.map(pages, [0, 1]) == first[:2]
    print("equal")
"""


def beside_the_source() -> set[Path]:
    return {path for path in Path(dquantcodec.__file__).parent.rglob("*") if path.suffix != ".pyc"}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_threads_and_processes_give_the_same_pages(method: str, tmp_path: Path) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system cannot {method}")
    script = tmp_path / "work.py"
    script.write_text(SCRIPT, encoding="utf-8")
    before = beside_the_source()
    done = subprocess.run([sys.executable, str(script), method], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr
    assert {path for path in beside_the_source() - before if path.name != "__pycache__"} == set(), (
        "an installation may be read-only"
    )

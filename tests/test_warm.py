"""Kernels compiled ahead are those the commands use, in their own cache, and a broken cache only costs time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dquantcodec import warm

USE = """
import numpy as np
from dquantcodec import Codec, fit_plan
x = np.random.default_rng(0).standard_normal((40, 2, 64)).astype(np.float16)
codec = Codec(fit_plan("2.26", x, x)) if {profile!r} == "fitted" else Codec({profile!r}, 2, 64)
codec.decode(codec.encode(x, x), dtype=np.float16)
"""


def run(code: str, cache: Path) -> None:
    environment = {**os.environ, "DQUANTCODEC_CACHE_DIR": str(cache)}
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env=environment)


def compiled(cache: Path) -> set[str]:
    return {path.name for path in cache.rglob("*.nbc")}


PARTS = (*warm.ENCODE, *warm.DECODE)


@pytest.mark.parametrize(("profile", "path"), [("paper-2.26", "rans"), ("fitted", "grouped")])
def test_what_was_compiled_ahead_is_all_that_encoding_and_decoding_need(
    tmp_path: Path, profile: str, path: str
) -> None:
    run(f"from dquantcodec import warm; warm.compile_parts({PARTS!r}, {path!r})", tmp_path)
    ahead = compiled(tmp_path)
    assert ahead
    run(USE.format(profile=profile), tmp_path)
    assert compiled(tmp_path) == ahead
    run(f"from dquantcodec import warm; assert warm.missing({PARTS!r}, {path!r}) == []", tmp_path)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    # Numba's own fallback, beside the source, misses changes in other files.
    before = compiled(Path(warm.__file__).parent)
    run("from dquantcodec import warm; assert warm.missing(warm.ENCODE, 'prefix') == []", blocked)
    run(
        "import numpy as np; from dquantcodec import means; means.window_means(np.ones((3, 2, 8), np.float32))", blocked
    )
    assert compiled(Path(warm.__file__).parent) == before


def test_two_processes_may_fill_one_cache_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "DQUANTCODEC_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-m", "dquantcodec.warm", "prefix", "prepare"]
    processes = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    ahead = compiled(tmp_path)
    assert ahead
    subprocess.run(command, check=True, env=environment)
    assert compiled(tmp_path) == ahead


def test_another_source_has_another_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = "from dquantcodec.kernels import cache_directory; print(cache_directory())"
    package = Path(warm.__file__).parent
    copy = tmp_path / "dquantcodec"
    copy.mkdir()
    for source in package.glob("*.py"):
        (copy / source.name).write_bytes(source.read_bytes())
    (copy / "grid.py").write_bytes((package / "grid.py").read_bytes() + b"\n# changed\n")

    def directory(path: Path) -> str:
        # `-c` looks into the working directory first.
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=path)
        return done.stdout

    assert directory(tmp_path) != directory(package.parent)

"""The C++ reader against the Python one on every vector of the format: the same FP32 bits, the same reason codes."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dquantcodec as dq
from dquantcodec.file.structs import crc32c

ROOT = Path(__file__).parents[1]
VECTORS = ROOT / "formats" / "vectors"
COMPILER = shutil.which("g++") or shutil.which("clang++")

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
    pytest.mark.skipif(not (VECTORS / "manifest.json").exists(), reason="this checkout has no vectors of the format"),
]


@lru_cache(maxsize=1)
def has_zstd() -> bool:
    """Whether libzstd can be compiled against; then it must work."""
    asked = [str(COMPILER), "-E", "-x", "c++", "-include", "zstd.h", "/dev/null"]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    """What the example program prints for every vector, word by word."""
    program = tmp_path_factory.mktemp("cpp") / "read"
    command = [str(COMPILER), "-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    source = [f"-I{ROOT / 'gpu' / 'include'}", str(ROOT / "gpu" / "examples" / "read.cpp"), "-o", str(program)]
    # Without libzstd the reader refuses compressed rows, and the tests let it.
    with_zstd = ["-DDQUANT_ZSTD", *source, "-lzstd"] if has_zstd() else source
    subprocess.run([*command, *with_zstd], check=True)
    paths = sorted(VECTORS.glob("*/*.dqkv"))
    output = subprocess.run([program, *paths], capture_output=True, text=True, check=False).stdout
    found: dict[str, list[list[str]]] = {}
    for line in output.splitlines():
        words = line.split(" ")
        if words[0] in ("file", "refused", "failed"):
            name = f"{Path(words[1]).parent.name}/{Path(words[1]).stem}"
            found[name] = []
        found[name].append(words)
    return found


MANIFEST: dict[str, Any] = (
    json.loads((VECTORS / "manifest.json").read_text(encoding="utf-8")) if (VECTORS / "manifest.json").exists() else {}
)


@pytest.mark.parametrize("name", MANIFEST.get("valid", {}))
def test_every_valid_file_reads_as_in_python(name: str, lines: dict[str, list[list[str]]]) -> None:
    head, *rest = lines[f"valid/{name}"]
    with dq.open(VECTORS / "valid" / f"{name}.dqkv") as file:
        assert head[0] == "file"
        assert head[head.index("torn") + 1] == str(int(file.torn))
        expected = {}
        for s, sequence in enumerate(file.sequences):
            for i, layer in enumerate(sequence.layers):
                for kind in ("key", "value"):
                    if layer.spec.storage != "absent" and sequence.tokens:
                        rows = getattr(layer, kind).read(dtype=np.float32)
                        expected[f"{s}/{i}/{kind}"] = f"{crc32c(np.ascontiguousarray(rows).view(np.uint8)):08x}"
        findings = {finding.code for finding in file.verify()}
    unread = {words[1]: words[2] for words in rest if words[0] == "unread"}
    assert set(unread.values()) <= (set() if has_zstd() else {"rows-zstd"})
    found = {words[1]: words[5] for words in rest if words[0] == "values"}
    assert found == {place: crc for place, crc in expected.items() if place not in unread}
    assert set(rest[-1][1:]) - (set() if has_zstd() else {"rows-zstd"}) == findings


@pytest.mark.parametrize("name", MANIFEST.get("invalid", {}))
def test_every_invalid_file_is_refused_for_the_same_reason(name: str, lines: dict[str, list[list[str]]]) -> None:
    wanted = MANIFEST["invalid"][name]
    head, *rest = lines[f"invalid/{name}"]
    if wanted["at"] == "open":
        assert head[0] == "refused"
        assert head[2] == wanted["code"]
    else:
        assert head[0] == "file"
        found = set(rest[-1][1:])
        if not has_zstd() and "rows-zstd" in found:
            found -= {"rows-zstd"}
            assert found == set(wanted["findings"]) or wanted["code"].startswith("rows-")
        else:
            assert found == set(wanted["findings"])

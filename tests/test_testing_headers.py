"""The C++ reader on the corpus, under AddressSanitizer and UndefinedBehaviorSanitizer: it refuses what Python does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dquantcodec.errors import DQuantError
from dquantcodec.file.header import parse_header
from dquantcodec.testing import plain_decode, targets
from dquantcodec.testing.files import reader_of
from dquantcodec.testing.fuzz import corpus_of

GPU = Path(__file__).parents[1] / "gpu"
CORPUS = Path(__file__).parent / "corpus"
SANITIZE = ("-std=c++17", "-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
COMPILER = shutil.which("clang++") or shutil.which("g++")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux" or COMPILER is None, reason="sanitizers of g++ or clang on Linux"),
    pytest.mark.skipif(not (GPU / "fuzz").is_dir(), reason="gpu/fuzz is not beside the tests"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("headers")
    for name, data in targets.bases().items():
        (folder / f"{name}.dqkv").write_bytes(data)
    command = [str(COMPILER), *SANITIZE, f"-I{GPU / 'include'}", str(GPU / "fuzz" / "main.cpp")]
    built = subprocess.run([*command, "-o", str(folder / "replay")], capture_output=True, text=True)
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    return folder / "replay"


def code_of(target: str, data: bytes) -> str:
    """What Python refuses an input for, or ``ok``."""
    if target == "container":
        plans = targets.container_plans()
        plan = plans[data[0] % len(plans)] if data else plans[0]
        return plain_decode(plan, data[1:][: plan.bytes].ljust(plan.bytes, b"\0"))[1] or "ok"
    made = targets.FILES[target](data)
    try:
        if target == "header":
            parse_header(memoryview(made))
        else:
            reader_of(made)
    except DQuantError as error:
        return error.code
    return "ok"


@pytest.mark.parametrize("target", ["header", "records", "index", "container", "file"])
def test_the_reader_refuses_what_python_refuses(target: str, program: Path, tmp_path: Path) -> None:
    inputs = corpus_of(target, CORPUS / target)
    paths = []
    for number, data in enumerate(inputs):
        paths.append(tmp_path / f"{number}.bin")
        paths[-1].write_bytes(data)
    run = subprocess.run(
        [str(program), *map(str, paths)], capture_output=True, text=True,
        env={**os.environ, "DQ_TARGET": target, "DQ_BASES": str(program.parent)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    codes = run.stdout.split()
    assert codes == [code_of(target, data) for data in inputs]
    assert "ok" in codes and (target == "index" or len(set(codes)) > 1)

"""The C++ example of attention: built without CUDA, its kernels by NVRTC, and run on a driver that is none."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from file_support import load_source
from gpu_support import HOST, cupy_with_device, needs_nvrtc

import dquantcodec as dq
from dquantcodec.cuda import sources
from dquantcodec.cuda.attend_launch import attend_launch

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "gpu" / "examples"
COMPILER = shutil.which("g++")
CODED, RESULTS = (str(EXAMPLES / name) for name in ("attend.dqkv", "attend.bin"))

pytestmark = [
    pytest.mark.skipif(COMPILER is None or os.name != "posix", reason="no host C++ compiler: g++ is missing"),
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the examples are not beside the tests"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("example") / "attend"
    command = [str(COMPILER), "-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", f"-I{sources.root() / 'include'}"]
    subprocess.run([*command, str(EXAMPLES / "attend.cpp"), "-ldl", "-o", str(built)], check=True)
    return built


def run(program: Path, *arguments: str, results: str = RESULTS) -> subprocess.CompletedProcess[str]:
    needs_nvrtc()
    nvrtc = Path(import_module("cuda.pathfinder").load_nvidia_dynamic_lib("nvrtc").abs_path).parent
    environment = {**os.environ, "LD_LIBRARY_PATH": str(nvrtc)}
    command = [str(program), CODED, results, "--headers", str(sources.root() / "include"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_its_kernels_compile(program: Path) -> None:
    done = run(program, "--compile", "sm_80")
    assert done.returncode == 0, done.stderr
    assert "bytes of machine code for sm_80" in done.stdout


def test_its_host_part_on_a_driver_that_is_none(program: Path, tmp_path: Path) -> None:
    """Pages, tables, block table, exact tokens and parameters are the program's own; kernels run on the CPU."""
    if not HOST.is_dir():
        pytest.skip("gpu/host is not beside the tests")
    with dq.open(CODED) as file:
        plan = file.layers[0].plan
    assert plan is not None
    driver = tmp_path / "driver.so"
    launch = attend_launch(plan, 3, dtype="float32", warps=1, many=True)
    defined = [option for option in launch.options if option.startswith("-D")]
    command = [str(COMPILER), "-std=c++17", "-O1", "-shared", "-fPIC", "-U_FORTIFY_SOURCE", "-fcf-protection=none"]
    command += [*defined, f"-I{sources.root() / 'include'}", f"-I{HOST}", str(HOST / "driver.cpp")]
    subprocess.run([*command, "-o", str(driver)], check=True)
    done = run(program, "--driver", str(driver))
    assert done.returncode == 0 and "good" in done.stdout, done.stdout + done.stderr
    # What is compared can differ: one output of the stored ones.
    words = np.fromfile(RESULTS, "<f4")
    words[3 + 9 * 64 + 5] += 1
    words.tofile(tmp_path / "wrong.bin")
    done = run(program, "--driver", str(driver), results=str(tmp_path / "wrong.bin"))
    assert done.returncode == 1 and "WRONG" in done.stdout


@pytest.mark.gpu
def test_on_a_gpu(program: Path) -> None:
    cupy_with_device()
    done = run(program)
    assert done.returncode == 0 and "good" in done.stdout, done.stdout + done.stderr


def test_the_stored_results_are_what_the_script_makes(tmp_path: Path) -> None:
    script = ROOT / "tools" / "attend_example.py"
    if not script.is_file():
        pytest.skip("the tools are not beside the tests")
    load_source("attend_example", script).main(tmp_path)
    with dq.open(tmp_path / "attend.dqkv") as made, dq.open(CODED) as stored:
        assert (made.layers[0].pages().data == stored.layers[0].pages().data).all()
        assert [rows.tobytes() for rows in made.layers[0].exact_rows()] == [
            rows.tobytes() for rows in stored.layers[0].exact_rows()
        ]
    want, got = (np.fromfile(folder / "attend.bin", "<f4", offset=12) for folder in (EXAMPLES, tmp_path))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)

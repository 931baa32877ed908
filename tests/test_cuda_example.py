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
from dquantcodec.cuda.group_attend import is_grouped

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "gpu" / "examples"
COMPILER = shutil.which("g++")
#: A plan that rotates, and one with variance classes.
NAMES = ("attend", "attend_fitted")

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


def run(program: Path, name: str, *arguments: str, results: Path | None = None) -> subprocess.CompletedProcess[str]:
    needs_nvrtc()
    nvrtc = Path(import_module("cuda.pathfinder").load_nvidia_dynamic_lib("nvrtc").abs_path).parent
    environment = {**os.environ, "LD_LIBRARY_PATH": str(nvrtc)}
    files = [EXAMPLES / f"{name}.dqkv", results or EXAMPLES / f"{name}.bin"]
    command = [program, *files, "--headers", sources.root() / "include", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("name", "architecture"), [("attend", "sm_80"), ("attend_fitted", "sm_80"), ("attend_fitted", "sm_90")]
)
def test_its_kernels_compile(program: Path, name: str, architecture: str) -> None:
    done = run(program, name, "--compile", architecture)
    assert done.returncode == 0, done.stderr
    assert f"bytes of machine code for {architecture}" in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_its_host_part_on_a_driver_that_is_none(program: Path, name: str, tmp_path: Path) -> None:
    """Pages, tables, block table, exact tokens and parameters are the program's own; kernels run on the CPU."""
    if not HOST.is_dir():
        pytest.skip("gpu/host is not beside the tests")
    with dq.open(EXAMPLES / f"{name}.dqkv") as file:
        plan = file.layers[0].plan
    assert plan is not None and is_grouped(plan) == (name == "attend_fitted")
    driver = tmp_path / "driver.so"
    launch = attend_launch(plan, 3, dtype="float32", warps=1, many=True)
    defined = [option for option in launch.options if option.startswith("-D")]
    command = [str(COMPILER), "-std=c++17", "-O1", "-shared", "-fPIC", "-U_FORTIFY_SOURCE", "-fcf-protection=none"]
    command += [*defined, f'-DDQ_KERNELS="{launch.name}.cpp"', f"-I{sources.root() / 'include'}", f"-I{HOST}"]
    subprocess.run([*command, str(HOST / "driver.cpp"), "-o", str(driver)], check=True)
    done = run(program, name, "--driver", str(driver))
    assert done.returncode == 0 and "good" in done.stdout, done.stdout + done.stderr
    # What is compared can differ: one output of the stored ones.
    words = np.fromfile(EXAMPLES / f"{name}.bin", "<f4")
    words[3 + 9 * 64 + 5] += 1
    words.tofile(tmp_path / "wrong.bin")
    done = run(program, name, "--driver", str(driver), results=tmp_path / "wrong.bin")
    assert done.returncode == 1 and "WRONG" in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(program: Path, name: str) -> None:
    cupy_with_device()
    done = run(program, name)
    assert done.returncode == 0 and "good" in done.stdout, done.stdout + done.stderr


def test_the_stored_results_are_what_the_script_makes(tmp_path: Path) -> None:
    script = ROOT / "tools" / "attend_example.py"
    if not script.is_file():
        pytest.skip("the tools are not beside the tests")
    example = load_source("attend_example", script)
    for name in NAMES:
        with dq.open(EXAMPLES / f"{name}.dqkv") as stored:
            plan = stored.layers[0].plan
        # By the plan on record: other machines may fit another one.
        assert (plan.key.grouping is not None) == (name == "attend_fitted")
        example.write(tmp_path / name, plan, *example.sample())
        with dq.open(tmp_path / f"{name}.dqkv") as made, dq.open(EXAMPLES / f"{name}.dqkv") as stored:
            assert (made.layers[0].pages().data == stored.layers[0].pages().data).all()
            assert [rows.tobytes() for rows in made.layers[0].exact_rows()] == [
                rows.tobytes() for rows in stored.layers[0].exact_rows()
            ]
        want, got = (np.fromfile(folder / f"{name}.bin", "<f4", offset=12) for folder in (EXAMPLES, tmp_path))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)

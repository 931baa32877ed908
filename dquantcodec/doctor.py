"""What an installation is like: one fact after another, with what to do about those that are wrong."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: States of a fact: as it should be; there to be had; works, but worse than it could; does not work.
GOOD, ABSENT, POOR, BAD = "good", "absent", "poor", "bad"

CORE = ("numpy", "numba", "llvmlite", "zstandard", "safetensors", "ml_dtypes", "google-crc32c", "tqdm")


@dataclass(frozen=True)
class Fact:
    """``name`` and ``found`` in a few words; ``remedy`` what to do unless it is good."""

    name: str
    found: str
    state: str = GOOD
    remedy: str = ""


def examine() -> Iterator[Fact]:
    """All facts in order; one check's failure is a fact like others and stops none."""
    for name, check in CHECKS.items():
        try:
            yield from check()
        except Exception as error:  # any failure is what is looked for
            kind = type(error).__name__
            yield Fact(name, f"{kind}: {error}", BAD, "report this with the output of dqkv doctor --json")


def _versions() -> Iterator[Fact]:
    from . import __version__

    bits = "free-threaded " if not getattr(sys, "_is_gil_enabled", lambda: True)() else ""
    yield Fact("dquantcodec", f"{__version__} in {Path(__file__).parent}")
    yield Fact("python", f"{bits}{platform.python_version()}, {platform.system()} {platform.machine()}")
    for package in CORE:
        try:
            yield Fact(package, version(package))
        except PackageNotFoundError:
            yield Fact(package, "not installed", BAD, f"pip install {package}")


def _processor() -> Iterator[Fact]:
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    found = [name for name in ("avx2", "avx512f", "f16c", "neon", "asimd") if features.get(name)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    vector = bool(found) or platform.machine().lower() in ("arm64", "aarch64")
    yield Fact(
        "processor",
        f"{cores} core{'s' if cores > 1 else ''} to use, {llvm.get_host_cpu_name()}, {' '.join(found) or 'no vectors'}",
        GOOD if vector else POOR,
        "" if vector else "kernels are written for AVX2 or NEON and run several times slower without",
    )


def _checksums() -> Iterator[Fact]:
    from .file.structs import crc32c

    found = str(getattr(import_module("google_crc32c"), "implementation", "unknown"))
    fast = found == "c"
    yield Fact(
        "CRC32C",
        f"{found} implementation",
        GOOD if fast else POOR,
        "" if fast else "files are read slowly: pip install --force-reinstall google-crc32c on a system with wheels",
    )
    if crc32c(b"123456789") != 0xE3069283:
        yield Fact("CRC32C", "wrong checksum of 123456789", BAD, "pip install --force-reinstall google-crc32c")


def _cache() -> Iterator[Fact]:
    from .kernels import cache_directory, cache_is_writable

    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        yield Fact("compiler", "switched off (NUMBA_DISABLE_JIT)", POOR, "unset it: kernels run as plain Python")
    folder = cache_directory()
    if not cache_is_writable():
        yield Fact(
            "kernel cache",
            f"{folder} cannot be written",
            POOR,
            "every process compiles anew: set DQUANTCODEC_CACHE_DIR to a folder that can",
        )
        return
    compiled = [path for path in folder.rglob("*.nbc") if path.is_file()]
    space = sum(path.stat().st_size for path in compiled) / 1e6
    yield Fact("kernel cache", f"{folder}, {len(compiled)} compiled ({space:.1f} MB)")


def _files() -> Iterator[Fact]:
    from .cuda import sources

    root = sources.root()
    yield Fact("device code", f"{len(sources.headers())} headers in {root}")
    package = Path(__file__).parent
    specification = [folder / "formats" / "dqkv.md" for folder in (package, package.parent)]
    found = next((path for path in specification if path.is_file()), None)
    yield Fact(
        "specification",
        str(found) if found else "missing",
        GOOD if found else BAD,
        "" if found else "the installation is not complete: install the wheel again",
    )


def _accelerator() -> Iterator[Fact]:
    from .cuda import nvrtc
    from .cuda.device import cupy, device
    from .errors import DeviceError

    try:
        major, minor = nvrtc.version()
        yield Fact("NVRTC", f"{major}.{minor}")
    except DeviceError as error:
        yield Fact("NVRTC", "not found", ABSENT, str(error))
    try:
        module = cupy()
    except DeviceError as error:
        yield Fact("GPU", "none to use", ABSENT, str(error))
        return
    runtime = module.cuda.runtime
    driver, built = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    fits = driver // 1000 >= built // 1000
    yield Fact(
        "CuPy",
        f"{module.__version__}, CUDA {_dotted(built)}, driver for CUDA {_dotted(driver)}",
        GOOD if fits else BAD,
        "" if fits else "the driver is older than CuPy's CUDA: update it, or install the CuPy built for it",
    )
    for number in range(runtime.getDeviceCount()):
        name = runtime.getDeviceProperties(number)["name"].decode()
        try:
            yield Fact("GPU", f"{number}: {name}, {device(number).architecture}")
        except DeviceError as error:
            yield Fact("GPU", f"{number}: {name}", POOR, str(error))


def _dotted(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _self_test() -> Iterator[Fact]:
    from .self_test import file_faults, wrong_checksums

    advice = "kernels compute wrongly: empty the kernel cache above; if it stays, report it with dqkv doctor --json"
    wrong = wrong_checksums()
    yield Fact(
        "golden pages",
        f"differ: {', '.join(wrong)}" if wrong else "as they must be",
        BAD if wrong else GOOD,
        advice if wrong else "",
    )
    faults = file_faults()
    yield Fact(
        "file there and back",
        "; ".join(faults[:3]) if faults else "sound",
        BAD if faults else GOOD,
        advice if faults else "",
    )


CHECKS: dict[str, Callable[[], Iterator[Fact]]] = {
    "versions": _versions,
    "processor": _processor,
    "CRC32C": _checksums,
    "kernel cache": _cache,
    "installation": _files,
    "accelerator": _accelerator,
    "self-test": _self_test,
}

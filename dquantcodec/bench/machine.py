"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def processor() -> str:
    """The name that the processor gives itself."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def simd() -> str:
    """Vector extensions of it that kernels are compiled for."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    return " ".join(name for name in ("avx2", "f16c", "bmi2", "avx512f", "neon") if features.get(name))


def usable_threads() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def description() -> dict[str, str | int | None]:
    return {"processor": processor(), "cores": os.cpu_count(), "simd": simd(), "system": platform.system()}


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Python's version, and those of ``packages`` that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found

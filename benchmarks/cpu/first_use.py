"""What the first command of a user waits for: compiling kernels into an empty cache; and the same with a full one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from dquantcodec.bench.timing import Row

CORES = 2


def rows() -> Iterator[Row]:
    """Seconds of ``dqkv demo`` as a process of its own on two cores, with an empty cache and with a full one."""
    everywhere = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if everywhere:
        os.sched_setaffinity(0, set(sorted(everywhere)[-CORES:]))
    try:
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "DQUANTCODEC_CACHE_DIR": folder}
            for name in ("nothing compiled", "kernels in the cache"):
                began = time.perf_counter()
                subprocess.run(
                    [sys.executable, "-m", "dquantcodec", "demo"],
                    env=environment, cwd=folder, check=True, capture_output=True,
                )  # fmt: skip
                seconds = time.perf_counter() - began
                cores = min(CORES, len(everywhere) or CORES)
                yield Row("first use", f"dqkv demo, {name}", cores, seconds, seconds, seconds, "s", note="one run")
    finally:
        if everywhere:
            os.sched_setaffinity(0, everywhere)

"""The one decorator every Numba kernel uses, with a compilation cache that cannot go stale.

Kernels are serial, release the GIL, raise nothing (callers validate, kernels return status codes) and never use
fast-math: the bytes of a page depend on the exact rounding of every operation.

Numba's own cache misses changes in functions imported from other files and freezes globals, so the cache directory
is keyed by a hash of the whole package's source: any edit, upgrade or downgrade starts an empty one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba
import numpy as np

#: Unset by ``NUMBA_DISABLE_JIT=1``: kernels then run as Python, see :mod:`dquantcodec.plain_steps`.
COMPILED = not getattr(numba.config, "DISABLE_JIT", False)


def _cache_root() -> Path:
    explicit = os.environ.get("DQUANTCODEC_CACHE_DIR") or os.environ.get("NUMBA_CACHE_DIR")
    if explicit:
        return Path(explicit)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "dquantcodec"


@lru_cache(maxsize=1)
def cache_directory() -> Path:
    """Where compiled kernels of exactly this source and Numba version are kept."""
    digest = hashlib.sha256(f"{numba.__version__} {sys.version_info[:2]}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return _cache_root() / f"kernels-{digest.hexdigest()[:16]}"


@lru_cache(maxsize=1)
def cache_is_writable() -> bool:
    """Asked once: Numba would fall back to a cache beside the source, which can go stale."""
    try:
        cache_directory().mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache_directory()).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _numba_cache_directory(path: Path) -> Iterator[None]:
    # The cache location is read once, while caching is enabled for a function; the setting is process-wide and is
    # put back at once so that the caller's own Numba code keeps its directory.
    config: Any = numba.config
    previous = config.CACHE_DIR
    config.CACHE_DIR = str(path)
    try:
        yield
    finally:
        config.CACHE_DIR = previous


#: Whether a kernel of this thread is running: those it calls need not ask again, which takes as long as a short kernel.
_silenced = threading.local()


def _silent(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` without NumPy's warnings: compiled code wraps around and divides by zero in silence."""

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        if getattr(_silenced, "by_caller", False):
            return function(*arguments)
        _silenced.by_caller = True
        try:
            with np.errstate(all="ignore"):
                return function(*arguments)
        finally:
            _silenced.by_caller = False

    return run


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` on first call; without a writable cache directory it is compiled in every process."""
    if not COMPILED:
        return _silent(function)
    compiled: Any = numba.njit(nogil=True, error_model="numpy")(function)
    if cache_is_writable():
        # RuntimeError is Numba's word for "no writable place found".
        with contextlib.suppress(RuntimeError, OSError), _numba_cache_directory(cache_directory()):
            compiled.enable_caching()
    return compiled  # type: ignore[no-any-return]


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """``array`` as one that is not to be written, for kernels that take pages of files, which are not either.

    To Numba these are a type of their own: without this a kernel would be compiled for both.
    """
    view = array.view()
    view.flags.writeable = False
    return view


#: For the small functions kernels are made of: always inlined by LLVM, compiled as part of their caller.
inlined = numba.njit(nogil=True, error_model="numpy", inline="never")

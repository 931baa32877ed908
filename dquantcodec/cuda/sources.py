"""Device sources as text: ``gpu/`` beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=1)
def root() -> Path:
    """The folder that holds ``include/dquant`` and ``kernels``."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "gpu", package.parent / "gpu"):
        if (folder / "include" / "dquant" / "platform.cuh").is_file():
            return folder
    raise FileNotFoundError(f"the device sources are missing: no gpu/include/dquant in {package} or beside it")


@lru_cache(maxsize=1)
def headers() -> dict[str, str]:
    """All headers by the name they are included by."""
    found = {f"dquant/{path.name}": path.read_text() for path in sorted((root() / "include" / "dquant").glob("*.cuh"))}
    return found | {path.name: path.read_text() for path in sorted((root() / "kernels").glob("*.cuh"))}


@lru_cache(maxsize=16)
def kernel_source(name: str) -> str:
    """The source of ``gpu/kernels/NAME.cu``."""
    return (root() / "kernels" / f"{name}.cu").read_text()

"""Hypothesis profiles and real data for all tests."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray
from safetensors import safe_open

# No deadline anywhere: the first example pays for compiling the kernels.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("default", max_examples=60, **_COMMON)
settings.register_profile("ci", max_examples=120, derandomize=True, print_blob=True, **_COMMON)
settings.register_profile("nightly", max_examples=3000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))


def _tensors(path: Path) -> dict[str, NDArray[np.float16]]:
    with safe_open(path, "np") as f:
        return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (safe_open is no mapping)


@pytest.fixture(scope="session")
def real_layers() -> list[tuple[NDArray[np.float16], NDArray[np.float16]]]:
    """Real keys and values ``[T, H, D]``: the bundled sample, or every layer of the captures in ``DQUANTCODEC_KV``."""
    folder = os.environ.get("DQUANTCODEC_KV")
    bundled = Path(str(files("dquantcodec"))) / "data" / "sample.safetensors"
    paths = sorted(p for p in Path(folder).glob("*.safetensors") if "queries" not in p.name) if folder else [bundled]
    layers = []
    for path in paths:
        tensors = _tensors(path)
        for name in sorted(n for n in tensors if n.endswith(".key")):
            key, value = tensors[name], tensors[name.replace(".key", ".value")]
            layers.append((key[0].transpose(1, 0, 2), value[0].transpose(1, 0, 2)))
    assert layers
    return layers

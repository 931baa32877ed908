"""Every kernel compiles for every supported architecture, without a GPU."""

from __future__ import annotations

import gpu_support
import numpy as np
import pytest

from dquantcodec.cuda import launches, nvrtc, sources
from dquantcodec.cuda.group_tables import group_encode_arrays
from dquantcodec.cuda.trellis_tables import trellis_encode_arrays
from dquantcodec.errors import DeviceError
from dquantcodec.fit import fit_plan
from dquantcodec.plan import make_plan
from dquantcodec.profile import PROFILES, Profile

SPREAD = np.geomspace(0.1, 3, 128).astype(np.float32)
GEOMETRIES = [(8, 64), (8, 80), (8, 96), (8, 112), (8, 128), (4, 192), (4, 256)]


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    gpu_support.needs_nvrtc()


@pytest.mark.parametrize("architecture", sorted(launches.SHARED_BYTES))
@pytest.mark.parametrize("name", sorted(PROFILES))
def test_every_profile(name: str, architecture: str) -> None:
    shared = launches.SHARED_BYTES[architecture]
    # A geometry and element type each, so that all of them are met once for every architecture and coder.
    turn = sorted(PROFILES).index(name) + sorted(launches.SHARED_BYTES).index(architecture)
    for i, kind in enumerate(("key", "value")):
        heads, head_dim = GEOMETRIES[(2 * turn + i) % len(GEOMETRIES)]
        plan = make_plan(PROFILES[name], heads, head_dim)
        element = sorted(launches.ELEMENTS)[(turn + i) % 3]
        decode = launches.decode_launch(plan, kind, element, shared)
        encode = launches.encode_launches(plan, kind, element, shared).tiles
        for launch in (decode, encode):
            assert launch.residents * (launch.shared_bytes + 1024) <= shared
            assert launch.warps * launch.residents <= 32
        # One kernel of a kind here and the other for the next architecture: all are met, each for one or two.
        launch = (decode, encode)[(turn + i) % 2]
        assert nvrtc.compile_kernel(launch.name, launch.options, architecture)[:4] == b"\x7fELF"


@pytest.mark.parametrize(("heads", "head_dim"), GEOMETRIES)
def test_every_geometry_of_the_default_profile(heads: int, head_dim: int) -> None:
    plan = make_plan(Profile.named("2.26"), heads, head_dim)
    for launch in (
        launches.decode_launch(plan, "key", "bfloat16"),
        launches.encode_launches(plan, "key", "bfloat16").tiles,
    ):
        nvrtc.compile_kernel(launch.name, launch.options, "sm_90")


def test_streams_of_every_length_have_a_launch() -> None:
    for name in ("2.26", "paper-2.26"):
        for heads, head_dim in ((1, 4), (64, 128), (128, 512), (1, 1024), (1024, 64), (4, 576)):
            plan = make_plan(Profile.named(name), heads, head_dim)
            for architecture, shared in launches.SHARED_BYTES.items():
                for kind in ("key", "value"):
                    encode = launches.encode_launches(plan, kind, "float16", shared)
                    decode = launches.decode_launch(plan, kind, "float16", shared)
                    for launch in (encode.tiles, decode):
                        assert launch.shared_bytes + 1024 <= shared, (name, heads, head_dim, architecture, kind)
                    assert bool(encode.scratch_bytes) == (encode.tiles.shared_bytes == 0)


@pytest.mark.parametrize(
    ("architecture", "name", "kind", "element"),
    [
        ("sm_80", "2.26", "key", "float16"),
        ("sm_89", "2.26-t", "key", "float32"),
        ("sm_90", "2.26", "value", "bfloat16"),
    ],
)
def test_streams_with_classes(architecture: str, name: str, kind: str, element: str) -> None:
    plan = fit_plan(name, *np.random.default_rng(0).standard_normal((2, 256, 8, 128)).astype(np.float32) * SPREAD)
    stream = getattr(plan, kind)
    shared = launches.SHARED_BYTES[architecture]
    make = trellis_encode_arrays if name == "2.26-t" else group_encode_arrays
    launch = launches.group_launches(plan, kind, element, make(stream), shared).tokens
    assert launch.shared_bytes + 1024 <= shared and launch.warps >= 4
    assert nvrtc.compile_kernel(launch.name, launch.options, architecture)[:4] == b"\x7fELF"


def test_append_compiles() -> None:
    launch = launches.append_launch()
    nvrtc.compile_kernel(launch.name, launch.options, "sm_80")


def test_a_fault_is_reported_with_the_compilers_words() -> None:
    with pytest.raises(DeviceError, match="no_such_type") as failed:
        nvrtc.compile_kernel("append", ("-Dextern=no_such_type",), "sm_90")
    assert failed.value.code == "device-compile"


def test_the_cache_depends_on_included_headers(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DQUANTCODEC_CACHE_DIR", str(tmp_path))
    from dquantcodec.kernels import cache_directory

    cache_directory.cache_clear()
    try:
        first = nvrtc.cached_kernel("append", (), "sm_90")
        assert first.parent == tmp_path and first == nvrtc.cached_kernel("append", (), "sm_90")
        headers = dict(sources.headers())
        headers["dquant/append.cuh"] += "// changed\n"
        monkeypatch.setattr(sources, "headers", lambda: headers)
        assert nvrtc.cached_kernel("append", (), "sm_90") != first
    finally:
        cache_directory.cache_clear()

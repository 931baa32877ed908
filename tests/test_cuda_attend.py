"""Attention over pages on a GPU against float64 attention over what the CPU decodes; compiling needs no GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attend_support import (
    MIN_MAX,
    Batch,
    Geometry,
    as_float,
    channel_spread,
    check,
    device_array,
    launch_on_the_host,
)
from gpu_support import cupy_with_device, needs_nvrtc
from numpy.typing import NDArray

from dquantcodec import Profile, StreamProfile
from dquantcodec.cuda import attend as device_attend
from dquantcodec.cuda import attend_launch, nvrtc
from dquantcodec.errors import InputError, UnsupportedError
from dquantcodec.letters import letter_table
from dquantcodec.page_layout import PageLayout
from dquantcodec.plan import make_plan
from dquantcodec.prefix import prefix_table
from dquantcodec.rotate import rotate

Array = NDArray[Any]


GEOMETRIES = {
    "default": Geometry(),
    "bfloat16": Geometry(dtype="bfloat16"),
    "float32 peaked": Geometry(dtype="float32", spread=5.0),
    "flat": Geometry(spread=0.02),
    "8 warps": Geometry(warps=8),
    "4 warps": Geometry(warps=4),
    "one query a head": Geometry(group=1),
    "group of 8": Geometry(group=8),
    "group of 16": Geometry(group=16, kv_heads=4),
    "head size 64": Geometry(head_dim=64, group=3),
    "head size 96": Geometry(head_dim=96, kv_heads=4, group=2),
    "head size 192": Geometry(head_dim=192, kv_heads=2),
    "head size 256": Geometry(head_dim=256, kv_heads=2),
    "one head": Geometry(kv_heads=1, group=7),
    "three heads": Geometry(kv_heads=3, head_dim=64, group=3),
    "four positions": Geometry(kv_heads=4, group=2, positions=4),
    "eight positions": Geometry(kv_heads=2, group=4, positions=8),
    "window of 100": Geometry(kv_heads=2, sliding_window=100),
    "window of 700, three positions": Geometry(kv_heads=2, group=1, positions=3, sliding_window=700),
    "window of 50, three positions": Geometry(kv_heads=2, group=1, positions=3, sliding_window=50, dtype="float32"),
    "soft cap": Geometry(kv_heads=2, soft_cap=20.0, spread=4.0),
    "1.96": Geometry(profile="1.96", kv_heads=4),
    "3.0": Geometry(profile="3.0", kv_heads=4),
    "paper-2.26": Geometry(profile="paper-2.26", kv_heads=4, dtype="float32"),
    "min-max grids": Geometry(profile=MIN_MAX, kv_heads=4, dtype="float32"),
    "classes": Geometry(classes="both"),
    "classes, peaked": Geometry(classes="both", kv_heads=4, dtype="float32", spread=2.0),
    "classes, 8 warps": Geometry(classes="both", kv_heads=2, warps=8),
    "classes, 14 warps": Geometry(classes="both", kv_heads=2, warps=14),
    "classes, group of 16": Geometry(classes="both", kv_heads=2, group=16, head_dim=64),
    "classes, head size 96": Geometry(classes="both", kv_heads=2, group=3, head_dim=96, positions=2),
    "classes, head size 256": Geometry(classes="both", kv_heads=2, group=1, head_dim=256),
    "classes, one head": Geometry(classes="both", kv_heads=1, group=7, head_dim=64),
    "classes, window of 100": Geometry(classes="both", kv_heads=2, sliding_window=100, soft_cap=20.0),
    "classes, 3.0": Geometry(classes="both", profile="3.0", kv_heads=2),
    "classes, trellis": Geometry(classes="both", profile="2.26-t", kv_heads=2),
    "classes, rotated keys": Geometry(classes="value", kv_heads=2),
    "rings, paper-2.26": Geometry(profile="paper-2.26", dtype="float32"),
    "rings, 3.0": Geometry(profile="3.0", kv_heads=4, group=2, ringed=True),
    "rings, classes": Geometry(classes="both", kv_heads=2, ringed=True, dtype="float32"),
    "rings, trellis": Geometry(classes="both", profile="2.26-t", kv_heads=4, ringed=True),
    "rings, one head": Geometry(profile="paper-2.26", kv_heads=1, group=7, ringed=True),
    "classes, rotated values": Geometry(classes="key", kv_heads=2, head_dim=96, dtype="float32"),
}


COMPILED = [
    *(("default", architecture) for architecture in ("sm_80", "sm_89", "sm_90")),
    ("group of 16", "sm_89"),
    *((name, "sm_90") for name in ("head size 96", "head size 256", "one head", "four positions", "soft cap", "3.0")),
    ("min-max grids", "sm_80"),
    ("paper-2.26", "sm_90"),
    ("classes", "sm_90"),
    ("classes, window of 100", "sm_80"),
    ("classes, trellis", "sm_90"),
    ("rings, paper-2.26", "sm_90"),
    ("rings, classes", "sm_80"),
    ("rings, trellis", "sm_90"),
]


@pytest.mark.parametrize(("name", "architecture"), COMPILED)
def test_compiles_and_agrees_on_shared_memory(name: str, architecture: str) -> None:
    needs_nvrtc()
    launch = GEOMETRIES[name].launch(attend_launch.BLOCK_SHARED_BYTES[architecture])
    assert launch.shape.shared_bytes <= attend_launch.BLOCK_SHARED_BYTES[architecture]
    # The kernel asserts that sizes of page and shared memory are what the options say.
    assert len(nvrtc.compile_kernel(launch.name, launch.options, architecture)) > 1000


def test_the_default_fills_a_multiprocessor() -> None:
    for name in ("default", "classes", "rings, paper-2.26", "rings, trellis"):
        assert GEOMETRIES[name].launch(attend_launch.BLOCK_SHARED_BYTES["sm_90"]).shape.warps == 16
    assert GEOMETRIES["default"].launch(attend_launch.BLOCK_SHARED_BYTES["sm_90"]).shape.rings == (0, 0)
    assert GEOMETRIES["rings, paper-2.26"].launch(attend_launch.BLOCK_SHARED_BYTES["sm_90"]).shape.rings == (64, 64)


@pytest.mark.parametrize("profile", ["2.26", "1.96", "3.0"])
def test_device_tables_hold_lengths_and_fields(profile: str) -> None:
    plan = make_plan(Profile.named(profile), 8, 128)
    for stream in (plan.key, plan.value):
        table = attend_launch.device_table(stream, plan.head_dim).astype(int)
        crowded = attend_launch.crowded(stream)
        window = prefix_table(stream).window
        mask = 15 if crowded else 31
        assert np.array_equal(table & mask, window & 15)
        assert np.array_equal(table >> (4 if crowded else 6), window >> 4)
        if not crowded:
            # Positions are sums of entries whose bit 5 says that a word has ended.
            assert not (table & 0x30).any()
        assert letter_table(stream, plan.head_dim).field_bits * stream.letter <= (12 if crowded else 10)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_rotation_by_matrix(head_dim: int) -> None:
    plan = make_plan(Profile.named("2.26"), 2, head_dim)
    x = np.random.default_rng(0).standard_normal((5, 2, head_dim)).astype(np.float32)
    factors = attend_launch.rotation_factors(plan)
    matrix = attend_launch.rotation_matrix(head_dim).astype(np.float64)
    assert np.abs(matrix).max() == 1
    assert np.allclose((x * factors) @ matrix, rotate(x, plan.signs), atol=1e-5)
    # Its transpose undoes it, block by block.
    assert np.allclose(((x * factors) @ matrix) @ matrix.T * factors, x, atol=1e-5)


def test_plans_that_kernels_do_not_take() -> None:
    with pytest.raises(UnsupportedError, match="frequencies below 1024"):
        attend_launch.attend_launch(make_plan(Profile.named("paper-1.96"), 8, 128), 4)
    with pytest.raises(UnsupportedError, match="multiples of 32"):
        attend_launch.attend_launch(make_plan(Profile.named("2.26"), 8, 80), 4)
    means = Profile(key=StreamProfile(9, 330, precision=13), value=StreamProfile(7, 240, mean=True))
    with pytest.raises(UnsupportedError, match="means"):
        attend_launch.attend_launch(make_plan(means, 8, 128), 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attend")


HOST_LENGTHS = [161, 0, 32, 1]


@pytest.mark.parametrize(
    "name",
    [
        "float32 peaked", "flat", "one query a head", "group of 16", "head size 96", "head size 256", "one head",
        "three heads", "eight positions", "window of 100", "window of 50, three positions",
        "soft cap", "3.0", "paper-2.26", "min-max grids",
        "classes, peaked", "classes, head size 96", "classes, window of 100", "classes, trellis",
        "classes, rotated keys",
    ],
)  # fmt: skip
def test_agrees_with_float64_on_the_host(folder: Path, name: str) -> None:
    geometry = replace(GEOMETRIES[name], kv_heads=min(4, GEOMETRIES[name].kv_heads))
    positions = geometry.positions > 1
    batch = Batch(geometry, HOST_LENGTHS, tails=[9, 8, 0 if not positions else 8, 11], sinks=[0, 1, 2, 0])
    want = batch.reference(1 / math.sqrt(geometry.head_dim))
    for blocks in (1, 5):
        check(batch, batch.run_on_host(folder, blocks, backwards=blocks == 1), want)


def uneven(geometry: Geometry, lengths: list[int]) -> Batch:
    """Tokens that need more bits in their first heads than in the others, beside tokens that do not."""
    shape = (2, max(lengths), geometry.kv_heads, geometry.head_dim)
    keys, values = np.random.default_rng(4).standard_normal(shape).astype(np.float32)
    if geometry.classes:
        keys, values = (keys, values) * channel_spread(geometry.kv_heads, geometry.head_dim)
    keys[::3, : max(1, geometry.kv_heads // 4)] *= 6
    values[1::3, : max(1, geometry.kv_heads // 4)] *= 6
    return Batch(geometry, lengths, real=(keys, values))


#: Shorter than any chunk of letters leaves room for: words of lanes that are apart come straight from the pages.
SHORT_RINGS = {"rans": 32, "prefix": 8, "trellis": 4}
RINGED = [name for name in GEOMETRIES if name.startswith("rings")]


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("name", RINGED)
def test_rings_of_words_on_the_host(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, short: bool) -> None:
    if short:
        monkeypatch.setattr(attend_launch, "RING_ROWS", SHORT_RINGS)
    geometry = replace(GEOMETRIES[name], kv_heads=min(4, GEOMETRIES[name].kv_heads), ringed=True)
    batch = uneven(geometry, [200, 0, 65])
    check(batch, batch.run_on_host(folder, 2), batch.reference(1 / math.sqrt(128)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", RINGED)
def test_short_rings(monkeypatch: pytest.MonkeyPatch, cupy: Any, name: str) -> None:
    monkeypatch.setattr(attend_launch, "RING_ROWS", SHORT_RINGS)
    batch = uneven(replace(GEOMETRIES[name], ringed=True), [1500, 0, 65, 700])
    check(batch, batch.run(cupy), batch.reference(1 / math.sqrt(128)))


def test_many_exact_tokens_on_the_host(folder: Path) -> None:
    batch = Batch(Geometry(kv_heads=2, dtype="float32"), [0, 40], tails=[600, 259], sinks=[5, 0])
    check(batch, batch.run_on_host(folder), batch.reference(1 / math.sqrt(128)))


def test_arbitrary_words_stay_inside(folder: Path) -> None:
    """Streams that run on beyond their container are read, but never outside shared memory; others do not notice."""
    batch = Batch(Geometry(kv_heads=2, dtype="float32"), [64, 96])
    want = batch.reference(1 / math.sqrt(128))
    broken = batch.table[0, 0]
    layout = batch.codec.layout
    rng = np.random.default_rng(0)
    batch.pool[broken, layout.head_bytes :] = rng.integers(0, 256, batch.pool.shape[1] - layout.head_bytes)
    # Every key as long as codes get: the last of a canonical code are all ones.
    batch.pool[broken, layout.head_bytes : layout.head_bytes + layout.key.affine_at] = 0xFF
    out, lse = batch.run_on_host(folder)
    out[0], lse[0] = want[0][0], want[1][0]
    check(batch, (out, lse), want)


def test_launcher_hands_over_what_the_kernels_need(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The object on a stand-in for CuPy, its two launches on the host."""
    launches = launch_on_the_host(monkeypatch, folder)
    batch = Batch(Geometry(kv_heads=2, dtype="float32", warps=1), [100, 3], tails=[4, 0], sinks=[0, 2])
    attention = device_attend.PageAttention(batch.geometry.plan, 2, 8, dtype="float32", warps=1)
    options = {name: tuple(device_array(x) for x in of) for name, of in batch.exact_arrays().items()}
    call = [device_array(x) for x in (batch.device_query(), batch.pool, batch.table)]
    call.append(device_array(batch.lengths, np.int32))
    # Rows of real device memory begin at multiples of 16 bytes; NumPy's do as well where arrays are large.
    assert call[1].ctypes.data % 16 == 0
    out, lse = attention(*call, **options)
    check(batch, (as_float(np.asarray(out), "float32"), np.asarray(lse, np.float64)), batch.reference(128**-0.5))
    assert launches == [
        ("attend_pages", 3, 32, attention.launch.shape.shared_bytes),
        ("attend_finish", 4, attend_launch.FINISH_THREADS[0], 0),
    ]
    for wrong, message in ((call[0][:, :, :4], "query is"), (call[0].astype(np.float16), "query is float16")):
        with pytest.raises(InputError, match=message):
            attention(wrong, *call[1:])
    with pytest.raises(InputError, match="pages must be"):
        attention(call[0], call[1][:, :-1], *call[2:])
    with pytest.raises(InputError, match="sliding"):
        attention(*call, sliding_window=5)
    with pytest.raises(InputError, match="tail values"):
        attention(*call, tail=(options["tail"][0], options["tail"][1][:, :2], options["tail"][2]))


@pytest.fixture(scope="module")
def cupy() -> Any:
    return cupy_with_device()


LENGTHS = [1500, 0, 131, 1, 777, 128, 129, 31]


@pytest.mark.gpu
@pytest.mark.parametrize("name", GEOMETRIES)
def test_agrees_with_float64(cupy: Any, name: str) -> None:
    batch = Batch(GEOMETRIES[name], LENGTHS, tails=[9, 8, 130, 20, 8, 0 if "pos" not in name else 8, 12, 33])
    check(batch, batch.run(cupy), batch.reference(1 / math.sqrt(batch.geometry.head_dim)))


@pytest.mark.gpu
def test_sinks_sink_logits_scale_and_base(cupy: Any) -> None:
    batch = Batch(Geometry(kv_heads=2), [700, 3, 0], tails=[5, 0, 0], sinks=[4, 1, 0], seed=3)
    sink_logits = np.random.default_rng(1).standard_normal(8).astype(np.float32)
    out, lse = batch.run(cupy, scale=0.2, sink_logits=cupy.asarray(sink_logits), lse_base="2")
    want = batch.reference(0.2, sink_logits)
    # Without a token the sinks' logits are all there is.
    assert (out[2] == 0).all() and np.isfinite(want[1][2]).all()
    out[2], want[0][2] = 1, 1
    check(batch, (out, lse * math.log(2)), want)


@pytest.mark.gpu
def test_tokens_the_mask_lets_no_position_see(cupy: Any) -> None:
    """Positions whose own tokens lie in the pages: the causal mask then cuts the last page."""
    batch = Batch(Geometry(kv_heads=2, group=2, positions=4), [300, 4, 513])
    check(batch, batch.run(cupy), batch.reference(1 / math.sqrt(128)))
    check(batch, batch.run(cupy, causal=False), batch.reference(1 / math.sqrt(128), causal=False))


@pytest.mark.gpu
def test_real_keys_and_values_and_the_cpu(cupy: Any, real_layers: list[tuple[Array, Array]]) -> None:
    for layer, (keys, values) in enumerate(real_layers[:3]):
        _, heads, dim = keys.shape
        batch = Batch(
            Geometry(kv_heads=heads, head_dim=dim, group=3, dtype="float32", spread=3.0), [len(keys), 200], seed=layer,
            real=(keys.astype(np.float32), values.astype(np.float32)),
        )  # fmt: skip
        got = batch.run(cupy)
        check(batch, got, batch.reference(1 / math.sqrt(dim)))
        pages = batch.codec.encode(*(x[:200].astype(np.float32) for x in (keys, values)))
        out, lse = batch.codec.attend(batch.query[1, 0], pages)
        assert np.linalg.norm(got[0][1, 0] - out) < 2e-3 * np.linalg.norm(out)
        assert np.abs(got[1][1, 0] - lse).max() < 1e-2


@pytest.mark.gpu
def test_large_and_small_numbers(cupy: Any) -> None:
    """Pages with exponents, and one token far larger than the others of its tile."""
    batch = Batch(Geometry(kv_heads=2, dtype="float32"), [256])
    rng = np.random.default_rng(5)
    keys, values = rng.standard_normal((2, 256, 2, 128)).astype(np.float32)
    keys *= 1e-3
    values[:128] *= 3e4
    values[130] *= 1e3
    batch = Batch(Geometry(kv_heads=2, dtype="float32"), [256], real=(keys, values))
    check(batch, batch.run(cupy), batch.reference(1 / math.sqrt(128)))


@pytest.mark.gpu
def test_many_short_sequences(cupy: Any) -> None:
    batch = Batch(Geometry(kv_heads=2), [int(x) for x in np.random.default_rng(0).integers(0, 400, 150)])
    check(batch, batch.run(cupy), batch.reference(1 / math.sqrt(128)))


@pytest.mark.gpu
def test_graph_replays_with_other_lengths(cupy: Any) -> None:
    geometry = Geometry(kv_heads=2)
    batches = [Batch(geometry, lengths, seed=i) for i, lengths in enumerate(([900, 40, 300], [20, 1200, 0]))]
    pages = max(len(b.pool) for b in batches)
    windows = max(b.table.shape[1] for b in batches)
    pool = cupy.zeros((pages, batches[0].pool.shape[1]), np.uint8)
    table, lengths = cupy.zeros((3, windows), np.int32), cupy.zeros(3, np.int32)
    query = cupy.zeros(batches[0].query.shape, np.float16)
    attention = device_attend.PageAttention(geometry.plan, 3, 8, dtype="float16")
    stream = cupy.cuda.Stream(non_blocking=True)
    graph = None
    for batch in batches:
        pool[: len(batch.pool)] = cupy.asarray(batch.pool)
        table.fill(-1)
        table[:, : batch.table.shape[1]] = cupy.asarray(batch.table)
        lengths[:] = cupy.asarray(np.array(batch.lengths, np.int32))
        query[:] = cupy.asarray(batch.query.astype(np.float16))
        cupy.cuda.Device().synchronize()
        with stream:
            if graph is None:
                stream.begin_capture()
                attention(query, pool, table, lengths)
                graph = stream.end_capture()
            graph.launch(stream)
        stream.synchronize()
        got = as_float(attention.out.get(), "float16"), attention.lse.get().astype(np.float64)
        check(batch, got, batch.reference(1 / math.sqrt(128)))


@pytest.mark.gpu
def test_arguments_that_do_not_fit(cupy: Any) -> None:
    plan = make_plan(Profile.named("2.26"), 2, 128)
    with pytest.raises(InputError, match="multiple"):
        device_attend.PageAttention(plan, 1, 7)
    attention = device_attend.PageAttention(plan, 1, 8, dtype="float16")
    arrays = (
        cupy.zeros((1, 1, 8, 128), np.float16), cupy.zeros((1, PageLayout.of(plan).page_bytes), np.uint8),
        cupy.zeros((1, 1), np.int32), cupy.zeros(1, np.int32),
    )  # fmt: skip
    with pytest.raises(InputError, match="sliding"):
        attention(*arrays, sliding_window=5)
    with pytest.raises(InputError, match="query is float16"):
        attention(arrays[0][:, :, :4], *arrays[1:])
    with pytest.raises(InputError, match="query is float32"):
        attention(arrays[0].astype(np.float32), *arrays[1:])
    with pytest.raises(InputError, match="contiguous"):
        attention(cupy.zeros((1, 1, 8, 256), np.float16)[..., ::2], *arrays[1:])
    with pytest.raises(InputError, match="pages must be"):
        attention(arrays[0], arrays[1][:, :-1], *arrays[2:])

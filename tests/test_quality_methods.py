"""Compared methods: bytes by hand, errors by theory, odd shapes and inputs, and independent references."""

from __future__ import annotations

import json
import math
import struct
import sys
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

FOLDER = Path(__file__).parents[1] / "benchmarks" / "quality"
if not FOLDER.is_dir():
    pytest.skip("the benchmarks are not part of this distribution", allow_module_level=True)
sys.path.insert(0, str(FOLDER))

import methods as compared  # noqa: E402
import ours  # noqa: E402
from peers import affine, fixed_width, ggml, turbo_attn, turboquant  # noqa: E402

from dquantcodec import Codec, Profile, fit_plan  # noqa: E402
from dquantcodec.file.groupings import plan_bytes  # noqa: E402
from dquantcodec.plan import make_plan  # noqa: E402
from dquantcodec.tables import half_range  # noqa: E402

#: Those that plan all layers together code a single one as their profile does.
METHODS = {method.name: method for method in compared.methods() if not method.together}
#: The search for levels takes a moment for every geometry and rate, so most shapes see the ends of our families only.
FEWER = [name for name in METHODS if not name.startswith("dquantcodec") or name.endswith(("1.50", "2.26", "5.00"))]
SAMPLE = Path(str(files("dquantcodec"))) / "data" / "sample.safetensors"


@cache
def normal(tokens, heads, dim, seed=0):
    return np.random.default_rng(seed).standard_normal((2, tokens, heads, dim)).astype(np.float32)


def nmse(original, restored):
    error = original.astype(np.float64) - restored
    return float(np.square(error).sum() / np.square(original.astype(np.float64)).sum())


# 100 tokens of 3 heads of 64: 19200 values, 192 channels, 300 heads; windows of 128, groups of 32 need 4.
BYTES = {
    "KIVI 2 bits, groups of 32": (4800 + 4 * 192 * 4, 4800 + 300 * 2 * 4),
    "KIVI 4 bits, groups of 128": (9600 + 1 * 192 * 4, 9600 + 300 * 4),
    "QuaRot 3 bits": (7200 + 300 * 4, 7200 + 300 * 4),
    "TurboQuant 2 bits": (4800 + 300 * 2, 4800 + 300 * 2),
    "TurboQuant 4 bits": (9600 + 300 * 2, 9600 + 300 * 2),
    "OScaR 2 bits, groups of 32": (4800 + 4 * 192 * 4 + 100 * 2, 4800 + 300 * 2 * 4),
    "OScaR 2 bits, groups of 128": (4800 + 1 * 192 * 4 + 100 * 2, 4800 + 300 * 4),
    "q8_0": (600 * 34, 600 * 34),
    "q4_0": (600 * 18, 600 * 18),
    "q4_0 rotated": (600 * 18, 600 * 18),
    "q4_1": (600 * 20, 600 * 20),
    "FP8 e4m3": (19200 + 4, 19200 + 4),
    "fixed width 8/4 levels": (19200 * 3 / 8 + 100 * 4 + 192 + 3 * 2, 19200 * 2 / 8 + 100 * 4),
    "turbo-attn 3 bits": (300 * (24 + 2), 300 * (24 + 2)),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_those_of_a_hand_computation(name):
    if name not in METHODS:
        pytest.skip(f"{name} cannot run here")
    coded = METHODS[name].code(*normal(100, 3, 64))
    assert (coded.key_bytes, coded.value_bytes) == pytest.approx(BYTES[name], abs=1e-6)
    assert coded.bits_per_value == pytest.approx(8 * sum(BYTES[name]) / 38400)


def test_rows_that_do_not_divide_into_blocks_pay_for_the_last_block():
    coded = METHODS["q4_0"].code(*normal(10, 3, 80))
    assert coded.key_bytes == 10 * 8 * 18  # 240 values are seven and a half blocks


def test_bytes_of_ours_are_those_of_the_pages():
    keys, values = normal(301, 8, 128)
    coded = METHODS["dquantcodec 2.26"].code(keys, values)
    tile = 32 * (2 * 164 + 2 + 2 * 116 + 2)
    head = 1088  # 4 + 8 * 2 + 1024 bytes, padded to a multiple of 64
    exact = 2 * 1024  # the first token
    codec = Codec(fit_plan("2.26", keys[1:], values[1:]))
    plan = plan_bytes(codec.plan)
    assert coded.key_bytes + coded.value_bytes == 3 * head + (4 + 4 + 2) * tile + 2 * exact + plan
    assert coded.value_bytes == 10 * 32 * (232 + 2) + 3 * 2 + exact + plan / 2
    assert (coded.keys[0] == keys[0]).all() and (coded.values[0] == values[0]).all()
    last = codec.encode(keys[1:], values[1:]).data[-1]
    assert last[: head + 2 * tile].any() and not last[head + 2 * tile :].any()


@pytest.mark.parametrize("coder", ours.SUBSTREAMS)
@pytest.mark.parametrize("bits", ours.RATES)
def test_rates_of_ours_are_near_their_names(coder, bits):
    # Containers are whole words: up to 4 bytes of keys and 4 of values either way.
    codec = Codec(ours.rate_profile(bits, coder, 8, 128), 8, 128)
    assert 8 * sum(ours.stored_bytes(codec, 1280)) / (1280 * 2048) == pytest.approx(bits, abs=0.035)


@pytest.mark.parametrize("bits", ours.CLASS_RATES)
def test_rates_of_classes_are_near_their_names(bits):
    keys, values = (normal(128, 8, 128)[i] * np.geomspace(0.3, 3, 128, dtype=np.float32) for i in (0, 1))
    profile = ours.class_profile(bits)
    codec = Codec(fit_plan(profile, keys, values))
    assert codec.plan.key.grouping is not None and codec.plan.value.grouping is not None
    assert 8 * sum(ours.stored_bytes(codec, 1280)) / (1280 * 2048) == pytest.approx(bits, abs=0.035)


def test_containers_share_as_the_paper_does():
    assert ours.containers((331 + 231 + 16.5) * 8 / 2048) == pytest.approx((331, 231))
    assert ours.containers(1.5)[0] / ours.containers(1.5)[1] == pytest.approx(331 / 231)
    key, value = ours.containers(4.0)
    assert key - value == pytest.approx(100)


@pytest.mark.parametrize(("heads", "dim", "bits"), [(8, 128, 2.25), (8, 128, 3.5), (3, 64, 1.5), (3, 64, 5.0)])
@pytest.mark.parametrize("coder", ours.SUBSTREAMS)
def test_computed_error_is_the_measured_one_and_its_choice_is_good(heads, dim, bits, coder):
    container = ours.containers(bits)[0]
    x = normal(256, heads, dim)[0]

    def measured(stream):
        codec = Codec(Profile(stream, stream, substreams=ours.SUBSTREAMS[coder]), heads, dim)
        return nmse(x, codec.decode_kind(codec.encode(x, x), "value")), codec.plan.value

    chosen = ours.best_stream(container, coder, heads, dim)
    error, plan = measured(chosen)
    assert ours.gaussian_error(plan, heads, dim) == pytest.approx(error, rel=0.15)
    others = []
    for levels in range(max(2, chosen.levels - 3), min(64, chosen.levels + 3) + 1):
        # A wide step away from the choice may not fit at all.
        if math.isfinite(ours._error(container, coder, levels, chosen.alpha, heads, dim)):
            others.append(measured(ours._candidate(container, coder, levels, chosen.alpha))[0])
    assert error <= 1.15 * min(others)


def test_computed_error_of_a_roomy_container_is_that_of_uniform_steps():
    stream = ours._candidate(1024, "rans", 64, 1.0)
    plan = make_plan(Profile(stream, stream, substreams=1), 8, 128).value
    step = 2 * half_range(1024) / 63
    assert ours.gaussian_error(plan, 8, 128) == pytest.approx(step**2 / 12, rel=0.05)


# Max, "Quantizing for minimum distortion" (1960), table I.
LLOYD_MAX = {2: 0.1175, 3: 0.03454, 4: 0.009497}


@pytest.mark.parametrize("bits", LLOYD_MAX)
@pytest.mark.parametrize("family", ["TurboQuant", "turbo-attn"])
def test_lloyd_max_error(bits, family):
    name = f"{family} {bits} bits"
    if name not in METHODS:
        pytest.skip(f"{name} cannot run here")
    keys, values = normal(200, 4, 256)
    coded = METHODS[name].code(keys, values)
    assert nmse(values, coded.values) == pytest.approx(LLOYD_MAX[bits], rel=0.03)
    # turbo-attn restores the length of keys at the cost of squared error.
    assert nmse(keys, coded.keys) == pytest.approx(LLOYD_MAX[bits], rel=0.15 if family == "turbo-attn" else 0.03)


def test_codebook_tends_to_that_of_the_normal_distribution():
    levels = turboquant.codebook(2, 4096) * 64
    assert levels == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], rel=0.002)
    # On the sphere of three dimensions a coordinate is uniform.
    assert turboquant.codebook(2, 3) == pytest.approx([-0.75, -0.25, 0.25, 0.75], rel=0.001)


def test_random_rotation_is_orthogonal():
    matrix = turboquant.random_rotation(80).astype(np.float64)
    assert matrix @ matrix.T == pytest.approx(np.eye(80), abs=1e-5)


def test_fixed_width_error_is_that_of_uniform_steps():
    keys, values = normal(256, 8, 128)
    coded = METHODS["fixed width 28/16 levels"].code(keys, values)
    for original, restored, levels in ((keys, coded.keys, 28), (values, coded.values, 16)):
        step = 2 * half_range(1024) / (levels - 1)
        assert nmse(original, restored) == pytest.approx(step**2 / 12, rel=0.06)


def test_fixed_width_error_of_two_levels_is_that_of_the_sign():
    values = normal(256, 8, 128)[1]
    error = nmse(values, METHODS["fixed width 3/2 levels"].code(values, values).values)
    # The best threshold is at zero; between a stream's extremes it lies a little beside it.
    assert 1 - 2 / math.pi < error < 1.06 * (1 - 2 / math.pi)


def test_fixed_width_levels_of_the_papers_containers():
    assert (fixed_width.most_levels(331), fixed_width.most_levels(231)) == (6, 3)
    assert "fixed width 6/3 levels" in METHODS


@pytest.mark.parametrize("name", ["KIVI 4 bits, groups of 128", "OScaR 4 bits, groups of 128"])
def test_group_error_is_that_of_uniform_steps(name):
    keys, values = normal(256, 2, 128)
    coded = METHODS[name].code(keys, values)
    step = 2 * half_range(128) / 15
    for original, restored in ((keys, coded.keys), (values, coded.values)):
        # The mean square of the range is a few percent above the square of its mean.
        assert nmse(original, restored) == pytest.approx(1.03 * step**2 / 12, rel=0.05)


def test_fp8_error_is_that_of_three_mantissa_bits():
    keys, values = normal(256, 2, 128)
    # Steps of 1/8 of the leading bit: 1/768 over the mean square of a mantissa, which lies well inside 1 to 4.
    assert 1 / 768 / 2.6 < nmse(keys, METHODS["FP8 e4m3"].code(keys, values).keys) < 1 / 768 / 1.6


#: Families that are no line of a plot: their members are of about the same size, or have two coders.
OF_ONE_SIZE = tuple(f"dquantcodec {kind}" for kind in ("profiles", "paper profiles", "rotated", "trellis"))


def test_error_falls_with_rate_inside_every_family():
    keys, values = normal(128, 8, 128)
    families: dict[str, list[tuple[float, float]]] = {}
    for method in METHODS.values():
        coded = method.code(keys, values)
        point = coded.bits_per_value, nmse(keys, coded.keys) + nmse(values, coded.values)
        families.setdefault(method.family, []).append(point)
    for family in OF_ONE_SIZE:
        families.pop(family)
    for name, points in families.items():
        errors = [error for _, error in sorted(points)]
        assert errors == sorted(errors, reverse=True), name
        assert len(set(points)) == len(points), name
    assert len(families["dquantcodec prefix"]) == len(ours.RATES) and len(families["fixed width"]) > 10


@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_a_size_that_divides_nothing(name):
    check_round_trip(name, normal(37, 3, 80))


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 3, 64), (130, 8, 128), (33, 1, 256)])
@pytest.mark.parametrize("name", FEWER)
def test_every_family_takes_other_sizes(name, tokens, heads, dim):
    check_round_trip(name, normal(tokens, heads, dim))


def check_round_trip(name, inputs):
    keys, values = (x.copy() for x in inputs)
    coded = METHODS[name].code(keys, values)
    assert (keys == inputs[0]).all() and (values == inputs[1]).all()
    for original, restored in ((keys, coded.keys), (values, coded.values)):
        assert restored.shape == original.shape and restored.dtype == np.float32
        assert nmse(original, restored) < 0.75
    assert min(coded.key_bytes, coded.value_bytes) > 0


@pytest.mark.parametrize("name", FEWER)
def test_zero_comes_back_and_constants_stay_finite(name):
    zero = np.zeros((40, 3, 64), np.float32)
    coded = METHODS[name].code(zero, zero)
    # turbo-attn keeps norms from being zero and leaves 1e-10.
    assert max(np.abs(coded.keys).max(), np.abs(coded.values).max()) <= (1e-9 if name.startswith("turbo-attn") else 0)
    for constant in (3.5, -1e-3, 1e-9):
        x = np.full((40, 3, 64), constant, np.float32)
        coded = METHODS[name].code(x, x)
        # A constant head becomes a single coordinate, which Lloyd-Max cuts; turbo-attn then restores its length.
        assert max(nmse(x, coded.keys), nmse(x, coded.values)) <= (1.5 if name.startswith("turbo-attn") else 1.0)


def slow_block(kind, block):
    """One block as ggml's reference quantisers make it, a value at a time."""
    f32 = np.float32
    if kind == "q8_0":
        scale = f32(max(abs(v) for v in block)) / f32(127)
        inverse = f32(1) / scale if scale else f32(0)
        codes = []
        for v in block:
            exact = float(f32(v * inverse))
            codes.append(int(math.copysign(math.floor(abs(exact) + 0.5), exact)))
        return struct.pack("<e", scale) + struct.pack("32b", *codes)
    if kind == "q4_0":
        largest = f32(0)
        for v in block:
            if abs(v) > abs(largest):
                largest = v
        low, scale, shift = None, largest / f32(-8), f32(8.5)
    else:
        low, scale, shift = min(block), (max(block) - min(block)) / f32(15), f32(0.5)
    inverse = f32(1) / scale if scale else f32(0)
    codes = [min(15, int(f32((v if low is None else f32(v - low)) * inverse) + shift)) for v in block]
    head = struct.pack("<e", scale) + (b"" if low is None else struct.pack("<e", low))
    return head + bytes(codes[i] | codes[i + 16] << 4 for i in range(16))


# Integers make ties.  Of zeros there is one: which sign a minimum of both has is nobody's promise.
BLOCKS = arrays(
    np.float32, (2, 32), elements=st.one_of(st.integers(-6, 6).map(float), st.floats(-1000, 1000, width=32))
).map(lambda x: np.where(np.abs(x) > 1e-30, x, np.float32(0)))


@pytest.mark.parametrize("kind", ggml.TYPES)
@given(blocks=BLOCKS)
def test_blocks_are_those_of_a_slow_reference(kind, blocks):
    data = ggml.TYPES[kind][0](blocks)
    assert [row.tobytes() for row in data] == [slow_block(kind, block) for block in blocks]


def test_halves_go_away_from_zero_in_q8_0():
    block = np.zeros((1, 32), np.float32)
    block[0, :7] = 127, 0.5, -0.5, 1.5, 2.5, -2.5, np.nextafter(np.float32(0.5), np.float32(0))
    assert ggml.pack_q8_0(block)[0, 2:9].view(np.int8).tolist() == [127, 1, -1, 2, 3, -3, 0]


@pytest.mark.parametrize("kind", ggml.TYPES)
def test_blocks_are_those_of_the_gguf_package(kind):
    quants = pytest.importorskip("gguf.quants")
    kinds = pytest.importorskip("gguf").GGMLQuantizationType
    x = normal(64, 2, 128)[0].reshape(-1, 32)
    data = ggml.TYPES[kind][0](x)
    assert (data == quants.quantize(x, getattr(kinds, kind.upper()))).all()
    assert (ggml.TYPES[kind][1](data) == quants.dequantize(data, getattr(kinds, kind.upper()))).all()


@given(
    x=arrays(np.float32, (2, 7), elements=st.floats(-100, 100, width=16)),
    group=st.integers(1, 9),
    bits=st.integers(1, 5),
    clip=st.sampled_from([1.0, 0.95]),
)
def test_groups_are_those_of_a_slow_reference(x, group, bits, clip):
    restored, stored = affine.code_groups(x, group, bits, clip)
    groups = 0
    for row, back in zip(x, restored):
        for first in range(0, 7, group):
            part = row[first : first + group]
            low, high = part.min() * np.float32(clip), part.max() * np.float32(clip)
            zero = np.float32(np.float16(low))
            scale = np.float32(np.float16((high - low) / np.float32(2**bits - 1)))
            groups += 1
            for value, other in zip(part, back[first : first + group]):
                steps = min(2**bits - 1, max(0, round(float((value - zero) / scale)))) if scale else 0
                assert other == zero + scale * np.float32(steps)
    assert stored == 14 * bits / 8 + 4 * groups


def test_oscar_does_not_see_the_norms_of_tokens():
    keys, values = (x.copy() for x in normal(64, 2, 64))
    # Powers of two, so that the norms' rounding to FP16 is the same.
    factors = np.float32(2) ** (np.arange(64, dtype=np.float32).reshape(-1, 1, 1) % 5)
    method = METHODS["OScaR 2 bits, groups of 32"]
    plain, scaled = method.code(keys, values), method.code(keys * factors, values)
    assert (scaled.keys == plain.keys * factors).all()
    # The norm is that of all heads together: where one head is louder, the other is lost among its neighbours.
    louder = keys.copy()
    louder[::2, 1] *= 64
    assert nmse(keys[::2, 0], method.code(louder, values).keys[::2, 0]) > 4 * nmse(keys[::2, 0], plain.keys[::2, 0])
    other = METHODS["KIVI 2 bits, groups of 32"]
    assert nmse(keys * factors, scaled.keys) < 0.8 * nmse(keys * factors, other.code(keys * factors, values).keys)


def test_kivi_keys_do_not_see_the_offsets_of_channels():
    keys, values = normal(64, 2, 64)
    offset = np.arange(128, dtype=np.float32).reshape(2, 64)
    error = nmse(keys, METHODS["KIVI 4 bits, groups of 32"].code(keys + offset, values).keys - offset)
    assert error == pytest.approx(nmse(keys, METHODS["KIVI 4 bits, groups of 32"].code(keys, values).keys), rel=0.1)


def test_turbo_attn_is_skipped_with_a_message(monkeypatch, capsys):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(turbo_attn, "import_module", missing)
    assert turbo_attn.methods() == []
    assert "turbo-attn is skipped: No module named 'torch'" in capsys.readouterr().out


def test_methods_are_distinct_and_say_where_they_come_from():
    every = compared.methods()
    assert len({method.name for method in every}) == len(every) > 50
    assert all(method.source and method.family for method in every)
    assert len({method.family for method in every if method.name.startswith("dquantcodec")}) == 8


def test_attention_error_is_that_of_softmax():
    layer = compared.Layer(*normal(20, 2, 8), np.random.default_rng(5).standard_normal((4, 3, 8)).astype(np.float32))
    coded = METHODS["q4_0"].code(layer.keys, layer.values)
    difference, energy = 0.0, 0.0
    for head in range(4):
        for place in range(3):
            outputs = []
            for keys, values in ((layer.keys, layer.values), (coded.keys, coded.values)):
                seen = 20 - 3 + place + 1
                logits = keys[:seen, head // 2].astype(float) @ layer.queries[head, place] / math.sqrt(8)
                weights = np.exp(logits - logits.max())
                outputs.append(weights / weights.sum() @ values[:seen, head // 2].astype(float))
            difference += np.square(outputs[1] - outputs[0]).sum()
            energy += np.square(outputs[0]).sum()
    assert compared.attention_error(layer, coded) == pytest.approx(math.sqrt(difference / energy), rel=1e-4)
    assert compared.attention_error(compared.Layer(layer.keys, layer.values), coded) is None


def test_command_prints_a_table_and_writes_json(tmp_path, capsys):
    out = tmp_path / "rows.json"
    assert compared.main(["--capture", str(SAMPLE), "--only", "q4_0", "FP8", "--json", str(out)]) == 0
    table = capsys.readouterr().out
    result = json.loads(out.read_text(encoding="utf-8"))
    rows = {row["method"]: row for row in result["rows"]}
    assert list(rows) == ["q4_0", "q4_0 rotated", "FP8 e4m3"]
    assert all(name in table for name in rows)
    plain = rows["q4_0"]
    # The README's table of the same sample.
    assert plain["bits_per_value"] == 4.5
    assert plain["key_centred_nmse"] == pytest.approx(0.057, abs=0.001)
    assert plain["value_nmse"] == pytest.approx(0.010, abs=0.001)
    assert plain["attention_error"] == pytest.approx(0.17, abs=0.01)
    assert plain["key_nmse"] < plain["key_centred_nmse"]
    assert rows["q4_0 rotated"]["key_nmse"] < plain["key_nmse"]

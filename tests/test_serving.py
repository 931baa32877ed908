"""The serving benchmark on the CPU: a tiny model, the CPU's codec in place of the GPU's, a card that is none."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu" / "serving"
if not FOLDER.is_dir():
    pytest.skip("the benchmarks are not part of this distribution", allow_module_level=True)
torch = pytest.importorskip("torch")
sys.path.insert(0, str(FOLDER))

import capacity  # noqa: E402
import decoder_model  # noqa: E402
import fused_steps  # noqa: E402
import kv_caches  # noqa: E402
import run as serving_run  # noqa: E402
from serving_support import HostAttention, HostCache, HostCard, HostCodec  # noqa: E402

from dquantcodec import fit_plan  # noqa: E402
from dquantcodec.cuda import attend as cuda_attend  # noqa: E402
from dquantcodec.cuda import cache as cuda_cache  # noqa: E402
from dquantcodec.cuda import codec as cuda_codec  # noqa: E402
from dquantcodec.plan import make_plan  # noqa: E402
from dquantcodec.profile import Profile  # noqa: E402

TINY = decoder_model.DecoderShape(layers=2, hidden=48, query_heads=4, kv_heads=2, head_dim=64, mlp=96, vocabulary=101)
HOST = kv_caches.Backend(HostCodec, HostCache, HostAttention)


def coded(name: str = "2.26:classes", shape: Any = TINY) -> kv_caches.Coded:
    profile, _, rule = name.partition(":")
    plan = make_plan(Profile.named(profile), shape.kv_heads, shape.head_dim)
    if rule:
        plan = fit_plan(profile, *decoder_model.random_rows(shape, 512, 1).numpy())
    return kv_caches.Coded(name, plan, Profile.named(profile).sinks, HOST, "cpu")


@pytest.fixture(scope="module")
def model() -> Any:
    return decoder_model.Decoder(TINY, 1200, "cpu")


@pytest.mark.parametrize(
    ("real", "stand_in", "method"),
    [
        (cuda_codec.Codec, HostCodec, "__init__"),
        (cuda_codec.Codec, HostCodec, "encode"),
        (cuda_codec.Codec, HostCodec, "decode"),
        (cuda_cache.Cache, HostCache, "__init__"),
        (cuda_cache.Cache, HostCache, "append"),
        (cuda_attend.PageAttention, HostAttention, "__init__"),
        (cuda_attend.PageAttention, HostAttention, "__call__"),
    ],
)
def test_stand_ins_take_what_the_library_takes(real: type, stand_in: type, method: str) -> None:
    wanted, taken = (dict(inspect.signature(getattr(of, method)).parameters) for of in (real, stand_in))
    for (name, parameter), first in zip(taken.items(), wanted):
        assert parameter.kind in (wanted[name].kind, parameter.POSITIONAL_OR_KEYWORD)
        assert parameter.kind == parameter.KEYWORD_ONLY or name == first


def sample(tokens: int = 256) -> Any:
    return decoder_model.random_rows(TINY, tokens, 3).to(torch.bfloat16)


def test_the_shape_is_that_of_the_8b_model() -> None:
    # 8,190,735,360 is what the published weights of Qwen3-8B hold.
    assert decoder_model.DecoderShape().parameters == 8_190_735_360
    weights = decoder_model.Decoder(TINY, 4, "cpu")
    held = [
        weights.embedding,
        weights.head,
        weights.norm,
        *(x for layer in weights.layers for x in vars(layer).values()),
    ]
    assert sum(tensor.numel() for tensor in held) == TINY.parameters


def test_rows_are_distributed_as_the_models_own() -> None:
    shape = decoder_model.DecoderShape(
        layers=1, hidden=512, query_heads=2, kv_heads=2, head_dim=64, mlp=8, vocabulary=9
    )
    weights = decoder_model.LayerWeights(shape, "cpu")
    tokens = 600
    x = torch.randn(tokens, shape.hidden, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    x = fused_steps.add_norm(x, torch.zeros_like(x), weights.norm)
    heads = torch.nn.functional.linear(x, weights.qkv).view(tokens, -1, shape.head_dim)
    positions = torch.arange(tokens, dtype=torch.int32)
    rotations = decoder_model.rotations(shape, tokens, "cpu")
    fused_steps.norm_rope(heads, 2, 2, weights.query_norm, weights.key_norm, rotations, positions)
    wanted = decoder_model.random_rows(shape, tokens, 1)
    for got, want in zip(heads[:, 2:].float().chunk(2, dim=1), wanted):
        ratio = got.square().mean(0).sqrt() / want.square().mean(0).sqrt()
        # Weights are random too: a value channel's magnitude is that of a sum over a row of 512.
        assert float((ratio - 1).abs().max()) < 0.25


def reference_logits(model: Any, tokens: list[int]) -> Any:
    """The whole sequence at once in float32: no cache, a causal mask, float weights."""
    shape, count = model.shape, len(tokens)

    def norm(x: Any, weight: Any) -> Any:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.float()

    half = shape.head_dim // 2
    angles = torch.arange(count)[:, None] * 1e6 ** (-torch.arange(half).double() / half)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rope(x: Any) -> Any:
        turned = torch.complex(*x.double().chunk(2, dim=-1)) * turn
        return torch.cat((turned.real, turned.imag), dim=-1).float()

    x = model.embedding.float()[tokens]
    for weights in model.layers:
        heads = (norm(x, weights.norm) @ weights.qkv.float().T).view(count, -1, shape.head_dim)
        query, keys, values = heads.split((shape.query_heads, shape.kv_heads, shape.kv_heads), dim=1)
        query, keys = rope(norm(query, weights.query_norm)), rope(norm(keys, weights.key_norm))
        group = shape.query_heads // shape.kv_heads
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) / shape.head_dim**0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).reshape(count, -1)
        x = x + attended @ weights.output.float().T
        gate, up = (norm(x, weights.mlp_norm) @ weights.gate_up.float().T).chunk(2, dim=-1)
        x = x + (torch.nn.functional.silu(gate) * up) @ weights.down.float().T
    return norm(x[-1], model.norm) @ model.head.float().T


def test_decoding_token_by_token_is_the_model(model: Any) -> None:
    """Pages that are never filled: the tail holds everything, and the leading place nothing."""
    of = kv_caches.Coded("exact", coded().plan, 0, HOST, "cpu")
    cache = kv_caches.PageCache(TINY, of, torch.zeros(1, dtype=torch.int32), 100)
    tokens = [int(x) for x in torch.randint(101, (40,), generator=torch.Generator().manual_seed(1))]
    for token in tokens:
        got = model.logits(torch.tensor([token]), cache)
    want = reference_logits(model, tokens)
    # BF16 after every operator, through two layers.
    assert float((got[0].float() - want).norm() / want.norm()) < 0.03


@pytest.mark.parametrize("name", ["2.26:classes", "2.26", "paper-2.26"])
def test_pages_and_the_rows_they_stand_for_give_the_same_logits(model: Any, name: str) -> None:
    of, card = coded(name), HostCard()
    run = serving_run.Run(card, TINY, {}, prompt=300, sample=256, positions=600, repeats=1, back_ends=(None, None))
    row = run.check(of, of.pages(run.sample), 301)
    # Both round to BF16 after every operator; other rows give errors of the logits' own size.
    assert row["relative_error"] < 0.03 and row["tokens"] == 301 and row["back_ends_error"] == 0


def test_a_full_tail_becomes_a_page_within_a_step(model: Any) -> None:
    of = coded()
    # One token before a page is full, and far from it.
    lengths = torch.tensor([of.sinks + 255, of.sinks + 200], dtype=torch.int32)
    cache = kv_caches.PageCache(TINY, of, lengths, 300)
    cache.fill(sample(), of.pages(sample()))
    before = [pool.clone() for pool in cache.pools]
    rows = cache.exact_rows(1, 0)
    model.step(torch.tensor([1, 2]), cache)
    for pool, old, cached in zip(cache.pools, before, cache.caches):
        changed = (pool != old).any(dim=1).nonzero().flatten().tolist()
        assert changed == [int(cache.table[0, 1])] and cached.lengths.tolist() == [256, 201]
    after = cache.exact_rows(1, 0)
    assert after.shape[1] == rows.shape[1] + 1 and torch.equal(after[:, :129], rows[:, :129])
    # The tail's tokens are coded now.
    error = (after[:, 129:-1].float() - rows[:, 129:].float()).norm() / rows[:, 129:].float().norm()
    assert 0.05 < float(error) < 0.5
    cache.restart()
    assert cache.positions().tolist() == lengths.tolist() and not cache.full()


def test_lengths_are_evenly_far_from_the_next_page() -> None:
    for batch in (1, 3, 16, 64, 128, 300):
        steps = max(16, 128 // batch)
        lengths = kv_caches.spread_lengths(batch, 8192, 128, steps)
        grown = lengths[:, None] + torch.arange(1, steps + 1)
        filled = int((grown % 128 == 0).sum())
        assert abs(filled - batch * steps / 128) < 1
        assert abs(float(grown.float().mean()) - 8192) <= 1
        # Room for the steps and for the three replays before them.
        assert int(grown.max()) + 3 <= 8192 + 127


def test_bytes_by_layout_are_those_of_the_arrays() -> None:
    of = coded()
    for tokens in (200, 1000):
        exact = kv_caches.ExactCache(TINY, 3, tokens, "cpu")
        assert sum(rows.nbytes for rows in exact.rows) == 3 * capacity.exact_bytes(TINY, tokens)
        cache = kv_caches.PageCache(TINY, of, torch.full((3,), tokens, dtype=torch.int32), tokens)
        held = [*cache.pools, *cache.leading, *(x for c in cache.caches for x in (c.keys, c.values))]
        assert sum(x.nbytes for x in held) == 3 * capacity.paged_bytes(TINY, of.plan, of.sinks, tokens)


def test_the_largest_batch_is_searched_downwards() -> None:
    def fits(batch: int) -> str:
        if batch > 700:
            raise torch.OutOfMemoryError("no")
        if batch > 690:
            raise RuntimeError("CUDA error: out of memory")
        return "row"

    batch, row, failed = capacity.largest(710, fits)
    assert (batch, row, failed) == (690, "row", [710, 705, 700, 695])
    assert capacity.largest(3, lambda batch: fits(1000)) == (0, None, [3, 2, 1])
    with pytest.raises(RuntimeError, match="else"):
        capacity.largest(3, lambda batch: (_ for _ in ()).throw(RuntimeError("something else")))


def test_a_run_measures_every_case_and_goes_on_after_failures(tmp_path: Path) -> None:
    # Room for five sequences of BF16 rows.
    total = 5 * capacity.exact_bytes(TINY, 300) + 1000
    card, out = HostCard(total), tmp_path / "serving.json"
    run = serving_run.Run(
        card, TINY, {"card": "none"}, prompt=300, sample=256, positions=1200, repeats=3, out=out, back_ends=(None,)
    )
    broken = kv_caches.Coded("broken", coded().plan, 1, kv_caches.Backend(None, None, None), "cpu")
    serving_run.ACTIVATIONS, kept = 0, serving_run.ACTIVATIONS
    try:
        serving_run.measure(run, [coded(), broken], (1, 4, 40), (300, 600))
    finally:
        serving_run.ACTIVATIONS = kept
    result = json.loads(out.read_text())
    rows = [(row["cache"], row["batch"]) for row in result["batches"]]
    ours = next(row["batch"] for row in result["largest"] if row["cache"] == "2.26:classes")
    assert ours == total // capacity.paged_bytes(TINY, coded().plan, 1, 300 + 127) == 8
    assert rows == [
        ("none", 1), ("none", 4), ("none", 40), ("bf16", 1), ("bf16", 4), ("bf16", 5), ("none", 5),
        ("2.26:classes", 1), ("2.26:classes", 4), ("2.26:classes", 5), ("2.26:classes", ours), ("none", ours),
    ]  # fmt: skip
    assert [(row["cache"], row["tokens"]) for row in result["growth"]] == [
        ("2.26:classes", 300), ("2.26:classes", 600), ("bf16", 300), ("bf16", 600),
    ]  # fmt: skip
    assert [row["what"] for row in result["left_out"]] == ["2.26:classes, 40 x 300", "broken, pages"]
    assert [row["cache"] for row in result["checks"]] == ["2.26:classes"]
    row = next(row for row in result["batches"] if (row["cache"], row["batch"]) == ("2.26:classes", 4))
    assert row["steps"] == 32 and row["median_ms"] == 3.0 and row["tokens_per_s"] == round(4000 / 3, 1)
    assert ("PageCache", 4, 32, 3) in card.cases and ("PageCache", 1, 128, 2) in card.cases


def test_time_that_is_up_is_written_down() -> None:
    run = serving_run.Run(HostCard(), TINY, {}, prompt=300, sample=256, positions=400, repeats=1, seconds=-1)
    serving_run.measure(run, [coded()], (1,), (300,))
    assert {row["why"] for row in run.result["left_out"]} == {"time"} and not run.result["batches"]


def test_a_model_that_does_not_run_ends_the_run() -> None:
    run = serving_run.Run(HostCard(), TINY, {}, prompt=300, sample=256, positions=400, repeats=1, back_ends=(None,))
    run.model = None
    serving_run.measure(run, [coded()], (1, 4), (300,))
    assert [row["what"] for row in run.result["left_out"]] == ["none x 1"] and not run.result["growth"]


INTERPRETED = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import fused_steps
if fused_steps.triton is None:
    sys.exit(77)
torch.manual_seed(0)

def both(work):
    found = []
    for fused in (True, False):
        fused_steps._fused = lambda x: fused
        found.append(work())
    for one, other in zip(*found):
        wrong = (one.double() - other.double()).abs().max() / other.double().abs().max()
        assert wrong < 0.01 and one.shape == other.shape, (wrong, one.shape)

x = torch.randn(3, 96).to(torch.bfloat16)
weight = torch.rand(96).to(torch.bfloat16)
def norm():
    residual = torch.ones(3, 96).to(torch.bfloat16)
    return fused_steps.add_norm(x, residual, weight), residual
both(norm)

given = torch.randn(3, 8, 64).to(torch.bfloat16)
norms = torch.rand(2, 64).to(torch.bfloat16)
turns = torch.randn(9, 2, 32)
def rope():
    heads = given.clone()
    queries = fused_steps.norm_rope(heads, 4, 2, norms[0], norms[1], turns, torch.tensor([8, 0, 3], dtype=torch.int32))
    assert torch.equal(heads[:, :4], given[:, :4]) and torch.equal(heads[:, 6:], given[:, 6:])
    return queries, heads
both(rope)

wide = 3 * torch.randn(2, 2 * 1500).to(torch.bfloat16)
both(lambda: (fused_steps.silu_product(wide),))
"""


def test_launches_compute_what_the_operators_do() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, str(FOLDER)], env=environment, capture_output=True, text=True
    )
    if done.returncode == 77:
        pytest.skip("no Triton")
    assert done.returncode == 0, done.stderr


COMPILED = """
import sys
sys.path.insert(0, sys.argv[1])
import fused_steps
if fused_steps.triton is None:
    sys.exit(77)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

rows, number = "*bf16", "i32"
norm = dict(x=rows, residual=rows, weight=rows, out=rows, width=number, epsilon="fp32", block="constexpr")
rope = dict(heads=rows, queries=rows, query_norm=rows, key_norm=rows, rotations="*fp32", positions="*i32",
            query_heads=number, stride=number, half=number, epsilon="fp32", block="constexpr")
product = dict(gate_up=rows, out=rows, width=number, block="constexpr")
for function, signature, block, warps in (
    (fused_steps._add_norm, norm, 4096, 8),
    (fused_steps._norm_rope, rope, 64, 1),
    (fused_steps._silu_product, product, fused_steps.BLOCK, 4),
):
    source = ASTSource(fn=function, signature=signature, constexprs={"block": block})
    made = fused_steps.triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert made.asm["cubin"], function
"""


def test_launches_compile_without_a_gpu(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", COMPILED, str(FOLDER)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("no Triton")
    assert done.returncode == 0, done.stderr


def test_plans_are_fitted_once(tmp_path: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(FOLDER), "--keep", str(tmp_path), "--profiles", "2.26:classes,paper-2.26"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "nothing is measured" in done.stdout, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "serving-2.26-classes.pickle", "serving-paper-2.26.pickle",
    ]  # fmt: skip

"""Requests that share a prefix: what comes out is attention over prefix and rest, as for one sequence."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attend_support import Array, Batch, Geometry, as_float, device_array, launch_on_the_host
from gpu_support import cupy_with_device

from dquantcodec.cuda.attend import PageAttention
from dquantcodec.cuda.shared_prefix import SharedPrefixAttention
from dquantcodec.errors import InputError

GEOMETRIES = {
    "rotated": Geometry(kv_heads=2, dtype="float32"),
    "classes": Geometry(kv_heads=2, dtype="float32", classes="both"),
    "bfloat16, one head": Geometry(kv_heads=1, group=7, head_dim=64, dtype="bfloat16"),
    "soft cap": Geometry(kv_heads=2, soft_cap=20.0, spread=4.0, dtype="float32"),
}


def batches(geometry: Geometry, requests: int) -> tuple[Batch, Batch]:
    """Two prefixes, and ``requests`` continuations of each; no prefix at all and nothing but a prefix among them."""
    prefixes = Batch(replace(geometry, positions=requests), [200, 0], sinks=[1, 0])
    rests = [length for of_prefix in ([130, 0, 1, 64, 0], [5, 33, 0, 128, 7]) for length in of_prefix[:requests]]
    tails = [length for of_prefix in ([3, 0, 0, 9, 1], [0, 2, 1, 0, 0]) for length in of_prefix[:requests]]
    return prefixes, Batch(geometry, rests, tails=tails, seed=1)


def reference(prefixes: Batch, rests: Batch, requests: int, sink_logits: Array | None = None) -> tuple[Array, Array]:
    """One after another, the decoded tokens of every request."""
    together = [
        tuple(np.concatenate([a, b]) for a, b in zip(prefixes.decoded[number // requests], own))
        for number, own in enumerate(rests.decoded)
    ]
    whole = replace_decoded(rests, together)
    return whole.reference(1 / math.sqrt(rests.geometry.head_dim), sink_logits)


def replace_decoded(batch: Batch, decoded: list[Any]) -> Batch:
    changed = object.__new__(Batch)
    changed.__dict__.update(batch.__dict__, decoded=decoded)
    return changed


def run(asarray: Any, prefixes: Batch, rests: Batch, requests: int, **options: Any) -> tuple[Array, Array]:
    geometry = rests.geometry
    attention = SharedPrefixAttention(
        geometry.plan, 2, requests, geometry.kv_heads * geometry.group, dtype=geometry.dtype,
        soft_cap=geometry.soft_cap > 0,
    )  # fmt: skip
    # One pool: the pages of the rests stand behind those of the prefixes.
    first = len(prefixes.pool)
    table = np.where(rests.table >= 0, rests.table + first, -1).astype(np.int32)
    out, lse = attention(
        asarray(rests.device_query()), asarray(np.concatenate([prefixes.pool, rests.pool])), asarray(prefixes.table),
        asarray(np.array(prefixes.lengths, np.int32)), asarray(table), asarray(np.array(rests.lengths, np.int32)),
        sinks=tuple(map(asarray, prefixes.exact_arrays()["sinks"])),
        tail=tuple(map(asarray, rests.exact_arrays()["tail"])), soft_cap=geometry.soft_cap, **options,
    )  # fmt: skip
    out, lse = (x.get() if hasattr(x, "get") else np.asarray(x) for x in (out, lse))
    return as_float(out, geometry.dtype), lse.astype(np.float64)


def check(got: tuple[Array, Array], want: tuple[Array, Array], dtype: str) -> None:
    for out, lse, wanted, wanted_lse in zip(*got, *want):
        if not np.isfinite(wanted_lse).any():
            assert (out == 0).all() and (lse == -np.inf).all()
            continue
        assert np.abs(lse - wanted_lse).max() < 1e-2
        error = np.linalg.norm(out - wanted) / max(np.linalg.norm(wanted), 1e-30)
        # Rounding the output to bfloat16 alone is an error of 1.7e-3.
        assert error < (3e-3 if dtype == "bfloat16" else 2e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


def one_warp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one warp, which the host can run."""
    made = PageAttention.__init__

    def init(self: PageAttention, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **(options | {"warps": 1}))

    monkeypatch.setattr(PageAttention, "__init__", init)


@pytest.mark.parametrize("name", ["rotated", "classes"])
def test_agrees_with_float64_on_the_host(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str) -> None:
    launches = launch_on_the_host(monkeypatch, folder)
    one_warp(monkeypatch)
    prefixes, rests = batches(GEOMETRIES[name], 3)
    sink_logits = np.random.default_rng(2).standard_normal(8).astype(np.float32)
    for logits in (None, sink_logits):
        options = {} if logits is None else {"sink_logits": device_array(logits)}
        got = run(device_array, prefixes, rests, 3, **options)
        check(got, reference(prefixes, rests, 3, logits), rests.geometry.dtype)
    # Three requests of four rows each fit into one block of sixteen: the prefixes' pages are decoded once.
    assert [launch[0] for launch in launches[:4]] == ["attend_pages", "attend_finish"] * 2
    assert launches[0][1] == launches[2][1] and launches[1][1] == 2 * 4 * 2


def test_refuses_queries_of_other_shapes(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    launch_on_the_host(monkeypatch, folder)
    one_warp(monkeypatch)
    attention = SharedPrefixAttention(GEOMETRIES["rotated"].plan, 2, 3, 8, dtype="float32")
    for shape in ((6, 8, 128), (5, 1, 8, 128), (6, 2, 8, 128)):
        with pytest.raises(InputError, match="query must be"):
            attention(device_array(np.zeros(shape, np.float32)), None, None, None, None, None)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("requests", [1, 2, 5])
def test_agrees_with_float64(name: str, requests: int) -> None:
    cupy = cupy_with_device()
    prefixes, rests = batches(GEOMETRIES[name], requests)
    check(run(cupy.asarray, prefixes, rests, requests), reference(prefixes, rests, requests), rests.geometry.dtype)

"""transformers' caches with pages on a GPU: see ``paged_support.py`` for what is checked."""

# ruff: noqa: E402

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import paged_support as paged
import pytest
from gpu_support import cupy_with_device

pytestmark = pytest.mark.gpu

cupy_with_device()
torch = pytest.importorskip("torch")

from transformers import DynamicCache

from dquantcodec.integrations.transformers import ATTENTION
from dquantcodec.integrations.transformers_device import DeviceStore


@contextmanager
def on_host() -> Iterator[None]:
    yield  # keys on the CPU have their pages there anyway


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_steps_agree_with_float64_over_what_is_decoded(dtype: str) -> None:
    paged.check_steps("cuda", dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_masks_of_ones_own(dtype: str) -> None:
    paged.check_masks_of_ones_own("cuda", dtype)


def test_what_kernels_do_not_take_is_decoded() -> None:
    paged.check_what_kernels_do_not_take("cuda")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_operations_leave_what_they_leave_on_the_cpu(dtype: str, seed: int) -> None:
    paged.check_operations("cuda", on_host, seed, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_text_is_that_of_decoding(dtype: str) -> None:
    paged.check_text("cuda", dtype, batch=4)


def test_numbers_that_are_not_finite() -> None:
    paged.check_numbers_that_are_not_finite("cuda")


def test_a_loaded_cache_moves_to_the_keys_and_goes_on(tmp_path: Path) -> None:
    paged.check_resumed("cuda", tmp_path / "cache.dqkv")


def test_beams_and_speculation() -> None:
    paged.check_beams_and_speculation("cuda")


def waits(model: Any, cache: Any, steps: int) -> list[int]:
    """How often PyTorch waits for the device in each of some steps."""
    tokens = paged.prompt(120, 2, "cuda")
    mask = torch.ones_like(tokens)
    paged.read(model, tokens, cache, mask)
    counts = []
    for _ in range(steps):
        token = paged.prompt(1, 2, "cuda")
        mask = torch.cat([mask, torch.ones_like(token)], dim=1)
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                paged.read(model, token, cache, mask)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("called a synchronizing" in str(w.message) for w in caught))
    return counts


def test_a_step_waits_no_more_often_than_with_transformers_own_cache() -> None:
    model = paged.llama("cuda", "bfloat16", layers=4)
    stock = waits(model, DynamicCache(config=model.config), 20)
    model.set_attn_implementation(ATTENTION)
    cache = paged.cache_of(model)
    ours = waits(model, cache, 20)
    pages = len(cache.layers[0].rows[0].pages)
    assert pages == 3 and isinstance(cache.layers[0].store, DeviceStore)
    # The mask is looked at once, whatever the number of layers, as transformers looks at it; making pages, which is in
    # the first step and 32 steps later, waits to learn that numbers are finite.
    print("waits a step:", stock, ours)
    assert max(ours[1:]) <= max(stock), (stock, ours)


def test_the_models_own_stream_is_followed() -> None:
    """Nothing may run before what that stream already holds."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        paged.check_steps("cuda", "bfloat16", (1, 3, 8))
    stream.synchronize()

"""Pages on a device behind transformers' caches, with a stand-in for the device; on a GPU the same is in
``test_transformers_device.py``."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import paged_support as paged
import pytest
from paged_support import kernel_folder, stand_in, torch

from dquantcodec.errors import DeviceError
from dquantcodec.integrations import transformers_device, transformers_store
from dquantcodec.integrations.transformers_device import DeviceStore

__all__ = ["kernel_folder", "stand_in"]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    @contextmanager
    def on_host() -> Iterator[None]:
        with monkeypatch.context() as context:
            context.setattr(transformers_store, "on_gpu", lambda device: False)
            yield

    return on_host


@pytest.mark.parametrize(
    ("dtype", "lengths"),
    [("bfloat16", (1, 1, 3, 8, 1, 5, 8, 8, 2, 1)), ("float16", (1, 3, 1)), ("float32", (1, 3, *[1] * 12, 3))],
)
def test_steps_agree_with_float64_over_what_is_decoded(stand_in: Any, dtype: str, lengths: tuple[int, ...]) -> None:
    paged.check_steps("cpu", dtype, lengths)
    assert stand_in.called == [(paged.STEPS[n], dtype == "bfloat16") for n in lengths]
    # Kernels are made for a batch and a number of tokens, not for a step.
    assert stand_in.made <= 2 * len({paged.STEPS[n] for n in lengths})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_masks_of_ones_own(stand_in: Any, dtype: str) -> None:
    paged.check_masks_of_ones_own("cpu", dtype)
    assert stand_in.called and not any(fused for _, fused in stand_in.called)


def test_what_kernels_do_not_take_is_decoded(stand_in: Any) -> None:
    paged.check_what_kernels_do_not_take("cpu")
    assert not stand_in.called


@pytest.mark.parametrize("seed", range(3))
def test_operations_leave_what_they_leave_on_the_cpu(stand_in: Any, host: Any, seed: int) -> None:
    paged.check_operations("cpu", host, seed)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_text_is_that_of_decoding(stand_in: Any, dtype: str) -> None:
    # A page is made on the way.
    paged.check_text("cpu", dtype, batch=4, steps=24)
    assert stand_in.called == [(1, dtype == "bfloat16")] * 48


def test_numbers_that_are_not_finite(stand_in: Any) -> None:
    paged.check_numbers_that_are_not_finite("cpu")


def test_a_loaded_cache_goes_on(stand_in: Any, tmp_path: Path) -> None:
    paged.check_resumed("cpu", tmp_path / "cache.dqkv")


def test_pages_move_to_where_keys_are(stand_in: Any, host: Any) -> None:
    padding = [0, 5]
    first, new = paged.states(2, 125, "bfloat16", "cpu"), paged.states(4, 1, "bfloat16", "cpu", 1)
    with host():
        here = paged.layer(padding)
        here.update(*first)
        here.batch_repeat_interleave(2)
    there = copy.deepcopy(here)
    assert there.store
    there.store.device = torch.device("meta")  # as if keys had been elsewhere
    there.update(*new)
    with host():
        here.update(*new)
    paged.same(there, here)
    assert isinstance(there.store, DeviceStore) and not isinstance(here.store, DeviceStore)
    # What beams shared they share there.
    assert len({int(n) for row in there.rows for n in row.pages}) == 6


def test_beams_and_speculation(stand_in: Any) -> None:
    paged.check_beams_and_speculation("cpu")
    assert {1, 4} <= {positions for positions, _ in stand_in.called}


def test_memory_is_that_of_the_pool_and_of_exact_tokens(stand_in: Any) -> None:
    model = paged.llama("cpu", "bfloat16")
    model.set_attn_implementation(paged.ATTENTION)
    cache = paged.cache_of(model, plans={0: paged.plan(), 1: paged.plan()})
    for tokens in (120, 1):
        paged.read(model, paged.prompt(tokens, 2, "cpu"), cache)
    expected = 0
    for layer in cache.layers:
        batch = layer.store._batch
        numbers = 2 * (3 + 3) * 4  # three counts and three pages of two rows
        assert batch.table.untyped_storage().nbytes() == numbers
        expected += layer.store._pool.nbytes + batch.keys.nbytes + batch.values.nbytes + numbers
        expected += sum(row.pages.nbytes for row in layer.rows)
    assert cache.nbytes == expected
    cache.reset()
    assert cache.nbytes == 0


def test_without_a_device_for_them_pages_stay_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(number: int) -> None:
        raise DeviceError("no CuPy here", code="device-cupy")

    monkeypatch.setattr(transformers_device, "cuda_device", missing)
    transformers_store._warn.cache_clear()
    device = torch.device("cuda", 0)
    with pytest.warns(UserWarning, match="stay in the CPU's memory.*no CuPy here"):
        store = transformers_store.store_at(device, paged.plan(), 1)
    assert isinstance(store, transformers_store.HostStore) and store.device == device
    transformers_store.store_at(device, paged.plan(), 1)  # said once

"""Arrays of other libraries: the same memory, any strides, BF16, and refusals that say what is wrong."""

# What is imported below needs torch, so it comes after the line that skips this file without it.
# ruff: noqa: E402

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import dquantcodec as dq
from dquantcodec.errors import DeviceError, InputError
from dquantcodec.foreign import to_numpy
from dquantcodec.integrations.tensors import DTYPES, as_torch


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_torch_tensors_share_memory_both_ways(dtype: Any) -> None:
    tensor = torch.randn(6, 2, 32, dtype=dtype, requires_grad=True)
    array = to_numpy(tensor, "keys")
    assert array.dtype == DTYPES[dtype]
    assert array.ctypes.data == tensor.data_ptr()
    np.testing.assert_array_equal(array.astype(np.float32), tensor.detach().float().numpy())
    back = as_torch(array)
    assert back.dtype == dtype and back.data_ptr() == tensor.data_ptr()
    view = to_numpy(tensor[1:5, :, ::2].permute(1, 0, 2), "keys")
    np.testing.assert_array_equal(view, array[1:5, :, ::2].transpose(1, 0, 2))
    assert np.shares_memory(view, array)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_paged_hnd_view_codes_like_its_copy(dtype: Any) -> None:
    # Blocks as engines keep them: [block, head, token, key and value], of which tokens are taken across blocks.
    blocks = torch.randn(3, 2, 64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    keys, values = (blocks[..., part].permute(0, 2, 1, 3)[1] for part in (slice(0, 32), slice(32, 64)))
    assert not keys.is_contiguous()
    codec = dq.Codec("2.26", kv_heads=2, head_dim=32)
    pages = codec.encode(keys, values)
    copies = [x.float().numpy().astype(DTYPES[dtype]) for x in (keys, values)]
    np.testing.assert_array_equal(pages.data, codec.encode(*copies).data)
    query = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = codec.attend(query, pages, exact=(keys, values))
    expected = codec.attend(query.float().numpy(), pages, exact=tuple(copies))
    np.testing.assert_array_equal(found[0], expected[0])


class Elsewhere:
    """An array that says it lies on a GPU."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 1

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("nobody may ask for memory that cannot be read")


class Bits:
    """A library whose BF16 NumPy's DLPack does not know, but whose arrays tell NumPy what they are, as JAX's do."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("bfloat16")

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.array


def test_other_libraries() -> None:
    array = np.ones((5, 1, 32), ml_dtypes.bfloat16)
    assert to_numpy(Bits(array), "keys") is array
    assert to_numpy(array, "keys") is array
    assert to_numpy([[1.0, 2.0]], "keys").shape == (1, 2)
    codec = dq.Codec("2.26", kv_heads=1, head_dim=32)
    with pytest.raises(DeviceError, match=r"keys lies on DLPack device \(2, 1\)"):
        codec.encode(Elsewhere(), Elsewhere())
    with pytest.raises(DeviceError, match="meta"):
        codec.encode(torch.empty(5, 1, 32, device="meta"), array)
    for wrong in (torch.zeros(5, 1, 32, dtype=torch.int32), torch.zeros(5, 1, 32, dtype=torch.float8_e4m3fn)):
        with pytest.raises(InputError, match=r"keys.* dtype torch.float8|keys have dtype int32") as caught:
            codec.encode(wrong, array)
        assert caught.value.code == "input-dtype"
    with pytest.raises(InputError, match="dense"):
        codec.encode(torch.zeros(5, 1, 32).to_sparse(), array)


def test_jax() -> None:
    jnp = pytest.importorskip("jax.numpy")
    array = np.random.default_rng(0).standard_normal((40, 2, 32)).astype(np.float32)
    codec = dq.Codec("2.26", kv_heads=2, head_dim=32)
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        given = jnp.asarray(array.astype(dtype))
        assert to_numpy(given, "keys").ctypes.data == given.unsafe_buffer_pointer()
        np.testing.assert_array_equal(
            codec.encode(given, given).data, codec.encode(array.astype(dtype), array.astype(dtype)).data
        )
    for wrong in (jnp.int32, jnp.float8_e4m3fn):
        with pytest.raises(InputError, match="keys have dtype"):
            codec.encode(jnp.zeros((5, 2, 32), wrong), array)

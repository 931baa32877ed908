"""Rotation against the dense matrix of its definition."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dquantcodec import rotate

MODEL_DIMS = (64, 80, 96, 112, 128, 192, 256, 512, 576)
ODD_DIMS = (1, 7, 65, 100)
DIMS = MODEL_DIMS + ODD_DIMS


def kernel_matrix(dim: int) -> NDArray[np.float32]:
    """The matrix that the kernel applies, column by column, without signs."""
    unit = np.eye(dim, dtype=np.float32).reshape(dim, 1, dim)
    return rotate.rotate(unit, np.ones((1, dim), np.int8))[:, 0].T


@pytest.mark.parametrize("dim", DIMS)
def test_the_kernel_applies_the_matrix_of_the_definition(dim: int) -> None:
    np.testing.assert_allclose(kernel_matrix(dim), oracles.rotation(dim), atol=1e-7)


@pytest.mark.parametrize("dim", DIMS)
def test_the_matrix_is_orthonormal(dim: int) -> None:
    matrix = kernel_matrix(dim).astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=1e-6)


@pytest.mark.parametrize("dim", MODEL_DIMS)
def test_heads_of_models_are_mixed_as_a_whole(dim: int) -> None:
    assert rotate.block_orders(dim) == (dim,)
    assert (kernel_matrix(dim) != 0).all()


def test_block_orders_are_the_greedy_choice_for_every_head_dim() -> None:
    for dim in range(1, 1025):
        assert list(rotate.block_orders(dim)) == oracles.blocks(dim), dim


@pytest.mark.parametrize("odd", sorted(oracles.PALEY_PRIMES))
def test_base_matrices_are_hadamard_matrices_with_entries_of_one(odd: int) -> None:
    matrix = rotate.paley_matrix(odd).astype(np.int64)
    assert matrix.shape == (4 * odd, 4 * odd)
    assert (np.abs(matrix) == 1).all()
    assert (matrix @ matrix.T == 4 * odd * np.eye(4 * odd)).all()
    assert matrix.tolist() == oracles.paley(odd)


@pytest.mark.parametrize("dim", DIMS)
def test_every_block_is_a_hadamard_matrix_with_entries_of_one(dim: int) -> None:
    matrix = kernel_matrix(dim)
    at = 0
    for order in rotate.block_orders(dim):
        block = matrix[at : at + order, at : at + order]
        scale = np.float32(1 / math.sqrt(order))
        signs = np.rint(block / scale).astype(np.int64)
        assert (np.abs(signs) == 1).all()
        assert (block == signs * scale).all(), "one multiplication, nothing else, may round"
        assert (signs @ signs.T == order * np.eye(order, dtype=np.int64)).all()
        matrix[at : at + order, at : at + order] = 0
        at += order
    assert at == dim
    assert not matrix.any(), "nothing outside the blocks"


@st.composite
def heads(draw: st.DrawFn) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    tokens, count, dim = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.sampled_from(DIMS[:6] + ODD_DIMS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale = 2.0 ** draw(st.integers(-20, 20))
    signs = rotate.random_signs(count, dim, draw(st.integers(0, 2**32)))
    return (rng.standard_normal((tokens, count, dim)) * scale).astype(np.float32), signs


@given(heads())
def test_rotation_equals_the_dense_oracle(case: tuple[NDArray[np.float32], NDArray[np.int8]]) -> None:
    x, signs = case
    scale = np.abs(x).max() * math.sqrt(x.shape[2])
    np.testing.assert_allclose(rotate.rotate(x, signs), oracles.rotate(x, signs), rtol=0, atol=1e-6 * scale)


@given(heads())
def test_unrotate_inverts_rotate_and_keeps_the_norm(case: tuple[NDArray[np.float32], NDArray[np.int8]]) -> None:
    x, signs = case
    scale = np.abs(x).max()
    rotated = rotate.rotate(x, signs)
    np.testing.assert_allclose(rotate.unrotate(rotated, signs), x, rtol=0, atol=1e-5 * scale)
    np.testing.assert_allclose(np.linalg.norm(rotated, axis=2), np.linalg.norm(x, axis=2), rtol=1e-5)


@given(heads())
def test_unrotate_rounds_exactly_as_the_fixed_order_of_operations(
    case: tuple[NDArray[np.float32], NDArray[np.int8]],
) -> None:
    x, signs = case
    assert rotate.unrotate(x, signs).tobytes() == oracles.unrotate_exactly(x, signs).tobytes()


@given(heads())
def test_tokens_and_heads_do_not_touch_each_other_nor_the_input(
    case: tuple[NDArray[np.float32], NDArray[np.int8]],
) -> None:
    x, signs = case
    before = x.copy()
    whole, back = rotate.rotate(x, signs), rotate.unrotate(x, signs)
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            alone = x[t : t + 1, h : h + 1].copy()
            assert (rotate.rotate(alone, signs[h : h + 1]) == whole[t, h]).all()
            assert (rotate.unrotate(alone, signs[h : h + 1]) == back[t, h]).all()
    assert (x == before).all()


def test_signs_are_balanced_depend_on_the_seed_and_never_change() -> None:
    signs = rotate.random_signs(8, 128)
    assert signs.dtype == np.int8
    assert set(np.unique(signs)) == {-1, 1}
    assert abs(int(signs.sum())) < 4 * math.sqrt(signs.size)
    assert (rotate.random_signs(8, 128, seed=1) != signs).any()
    assert (rotate.random_signs(2, 64).reshape(-1) == signs.reshape(-1)[:128]).all()
    digest = hashlib.sha256(rotate.random_signs(8, 128).tobytes()).hexdigest()
    assert digest == "823b8ff466b511f229275c51765bed0286420f5db8bea5f9c78eeb4d8fb4cac9"

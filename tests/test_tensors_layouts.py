"""Axis orders: read as told, decided by evidence, or refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dquantcodec.errors import InputError
from dquantcodec.tensors.layouts import Geometry, decide_layout, token_runs
from dquantcodec.tensors.record import LAYOUTS


def shapes(*each: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {f"tensor{number}": shape for number, shape in enumerate(each)}


@given(
    st.sampled_from(LAYOUTS),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(1, 4),
    st.data(),
)
def test_runs_are_the_tokens(layout: str, b: int, h: int, t: int, d: int, data: st.DataObject) -> None:
    b = b if "B" in layout else 1
    geometry = Geometry(b, h, t, d)
    array = np.arange(b * h * t * d).reshape(geometry.shape(layout))
    sequence = data.draw(st.integers(0, b - 1))
    start = data.draw(st.integers(0, t))
    stop = data.draw(st.integers(start, t))
    whole = array[sequence] if "B" in layout else array
    expected = whole if layout.endswith("THD") else whole.transpose(1, 0, 2)
    flat = array.reshape(-1)
    runs = list(token_runs(geometry, layout, sequence, start, stop))
    if layout.endswith("THD"):
        (run,) = runs
        assert run.head is None
        got = flat[run.offset : run.offset + run.count].reshape(-1, h, d)
    else:
        assert [run.head for run in runs] == list(range(h))
        got = np.stack([flat[run.offset : run.offset + run.count].reshape(-1, d) for run in runs], axis=1)
    assert (got == expected[start:stop]).all()
    assert Geometry.of(array.shape, layout) == geometry


def test_four_axes_are_bhtd() -> None:
    assert decide_layout(shapes((1, 8, 4096, 128), (1, 8, 4096, 128)))[0] == "BHTD"
    assert decide_layout(shapes((1, 8, 2, 128)))[0] == "BHTD"
    assert decide_layout(shapes((2, 32, 32, 128)))[0] == "BHTD"


def test_four_axes_with_tokens_in_the_place_of_heads() -> None:
    with pytest.raises(InputError, match="--layout BTHD") as caught:
        decide_layout(shapes((1, 4096, 8, 128)))
    assert caught.value.code == "layout-ambiguous"
    assert decide_layout(shapes((1, 4096, 8, 128)), "BTHD") == ("BTHD", "as given")
    assert decide_layout(shapes((1, 200, 8, 128)), "BHTD")[0] == "BHTD"


@pytest.mark.parametrize(
    ("each", "layout"),
    [
        ([(8, 4096, 128)], "HTD"),
        ([(4096, 8, 128)], "THD"),
        ([(1, 129, 64)], "HTD"),
        ([(129, 128, 64)], "THD"),
        ([(8, 100, 64), (4, 100, 64)], "HTD"),
        ([(100, 8, 64), (100, 16, 64)], "THD"),
    ],
)
def test_three_axes_with_one_reading(each: list[tuple[int, ...]], layout: str) -> None:
    found, reason = decide_layout(shapes(*each))
    assert found == layout
    assert "axis" in reason


@pytest.mark.parametrize("each", [[(8, 100, 64)], [(1, 1, 64)], [(200, 300, 64)], [(8, 100, 64), (4, 50, 64)]])
def test_three_axes_with_two_readings(each: list[tuple[int, ...]]) -> None:
    with pytest.raises(InputError, match="--layout HTD or --layout THD") as caught:
        decide_layout(shapes(*each))
    assert caught.value.code == "layout-ambiguous"
    assert all(str(list(shape)) in str(caught.value) for shape in each)


@pytest.mark.parametrize(
    ("each", "asked", "code"),
    [
        ([(3, 4)], None, "layout-rank"),
        ([(1, 2, 3, 4, 5)], None, "layout-rank"),
        ([(1, 2, 3, 4)], "HTD", "layout-rank"),
        ([(2, 3, 4)], "BHTD", "layout-rank"),
        ([(1, 2, 3, 4), (2, 3, 4)], None, "layout-mixed"),
    ],
)
def test_numbers_of_axes(each: list[tuple[int, ...]], asked: str | None, code: str) -> None:
    with pytest.raises(InputError) as caught:
        decide_layout(shapes(*each), asked)
    assert caught.value.code == code


def test_long_lists_are_cut() -> None:
    with pytest.raises(InputError, match="and 32 more"):
        decide_layout(shapes(*[(8, 100, 64)] * 40))

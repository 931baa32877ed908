"""Integers of a file: the same as rows and as arrays, which are made when something asks for them."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dquantcodec.file import Layer
from dquantcodec.file.header import Header, parse_header
from dquantcodec.file.info import Info
from dquantcodec.plan import Plan, make_plan
from dquantcodec.profile import Profile
from dquantcodec.stored import Integers, Stored, as_given
from dquantcodec.testing.plans import small_plan

DTYPES = {"b": np.int8, "B": np.uint8, "H": np.uint16}


@given(
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple),
    st.integers(0, 2**32 - 1),
)
def test_rows_and_arrays_are_the_same_numbers(code: str, shape: tuple[int, ...], seed: int) -> None:
    dtype = np.dtype(DTYPES[code])
    want = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
    stored = Integers(want.astype(dtype.newbyteorder("<")).tobytes(), code, shape)
    array = stored.array()
    assert array.dtype == dtype and array.dtype.isnative and array.flags.writeable
    np.testing.assert_array_equal(array, want)
    assert [*stored.numbers()] == want.reshape(-1).tolist()
    if len(shape) == 2:
        assert [[*row] for row in stored.rows()] == want.tolist()


def parsed(plan: Plan) -> Plan:
    header = Header(bytes(16), (Layer(plan.kv_heads, plan.head_dim, "float32", plan, number=0),), 1, 0, 0, Info())
    found = parse_header(memoryview(header.pack())).layers[0].plan
    assert found is not None
    return found


@pytest.mark.parametrize(
    "plan", [make_plan(Profile.named("paper-2.26"), 3, 24), small_plan()], ids=["rotated", "grouped"]
)
def test_arrays_of_a_parsed_plan_are_made_on_first_use(plan: Plan) -> None:
    found = parsed(plan)
    fields: list[tuple[Any, Any, str]] = [(found, plan, "signs")]
    for read, ours in ((found.key, plan.key), (found.value, plan.value)):
        fields.append((read, ours, "frequencies"))
        if ours.grouping is not None:
            assert (read.grouping.heads, read.grouping.coded) == (ours.grouping.heads, ours.grouping.coded)
            fields += [(read.grouping, ours.grouping, name) for name in ("choice", "order")]
    assert all(isinstance(as_given(holder, name), Stored) for holder, _, name in fields)
    for holder, ours, name in fields:
        for other in (pickle.loads(pickle.dumps(holder)), copy.deepcopy(holder), replace(holder), holder):
            array, want = getattr(other, name), getattr(ours, name)
            assert array.dtype == want.dtype
            np.testing.assert_array_equal(array, want)
            assert getattr(other, name) is array is as_given(other, name)

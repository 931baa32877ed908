"""What is not fitted: kinds that stay as they were or are better rotated, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fit_support import normal, random_spread, same_plans
from numpy.typing import NDArray

from dquantcodec.codec import Codec
from dquantcodec.coding_loss import grouped_loss, rotated_loss
from dquantcodec.errors import InputError
from dquantcodec.fit import fit_plan
from dquantcodec.plan import make_plan
from dquantcodec.profile import PROFILES, ClassRule

# --- Nothing to fit, and what stays as it was -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["paper-2.26", "paper-1.96"])
def test_profiles_without_classes_are_as_they_were(name: str) -> None:
    plan = fit_plan(name, *normal(64, random_spread(2, 64)))
    assert same_plans(plan, make_plan(PROFILES[name], 2, 64))
    assert plan.key.grouping is None and plan.value.grouping is None


def test_one_kind_may_have_classes_alone() -> None:
    base = PROFILES["2.26"]
    profile = replace(base, value=replace(base.value, classes=None))
    plan = fit_plan(profile, *normal(64, random_spread(2, 64)))
    assert plan.key.grouping is not None and plan.value is make_plan(profile, 2, 64).value


def test_silent_kinds_stay_rotated() -> None:
    keys, values = normal(64, random_spread(2, 64))
    silent = fit_plan("2.26", keys * 0, values)
    assert silent.key.grouping is None and silent.value.grouping is not None
    silent = fit_plan("2.26", keys, values * 0)
    assert silent.key.grouping is not None and silent.value.grouping is None
    # Keys that are their own mean leave only what the means' steps leave.
    constant = np.ones_like(keys)
    codec = Codec(fit_plan("2.26", constant, values))
    assert codec.check(codec.encode(constant, values)) == []
    assert codec.check(codec.encode(keys, values)) == []


def test_constant_heads_beside_others() -> None:
    keys, values = normal(128, random_spread(4, 32))
    values[:, 1] = 0
    values[:, 2] = 7
    codec = Codec(fit_plan("2.26", keys, values))
    pages = codec.encode(keys, values)
    assert codec.check(pages) == []
    got = codec.decode_kind(pages, "value")
    assert not got[:, 1].any()
    # Equal values of the dearest head do not fit at their nearest level: some groups take a lower one.
    assert float(np.abs(got[:, 2] - 7).mean()) < 0.4 * 7


@pytest.mark.parametrize("tokens", [0, 1, 2, 31])
def test_few_tokens_will_do(tokens: int) -> None:
    keys, values = normal(max(40, tokens), random_spread(2, 64))
    plan = fit_plan("2.26", keys[:tokens], values[:tokens])
    if tokens == 0:
        assert plan.key.grouping is None and plan.value.grouping is None
    codec = Codec(plan)
    assert codec.check(codec.encode(keys, values)) == []


def test_streams_of_one_magnitude_are_better_rotated_and_usual_ones_are_not() -> None:
    rng = np.random.default_rng(2)
    usual = (rng.standard_normal((256, 3, 64)) * np.geomspace(0.1, 3, 64)).astype(np.float32)
    constant = np.full_like(usual, 3)
    plan = fit_plan("2.26", usual, constant)
    assert plan.key.grouping is not None and plan.value.grouping is None
    classes_only = fit_plan("2.26", usual, usual)
    assert rotated_loss(usual[:128], plan, make_plan(PROFILES["2.26"], 3, 64).key) > grouped_loss(
        usual[:128], plan, classes_only.key
    )
    decoded = Codec(plan).decode(Codec(plan).encode(usual, constant))[1]
    assert np.square(decoded - constant).mean() / 9 < 0.2


def test_losses_are_what_decoding_finds() -> None:
    x = (np.random.default_rng(3).standard_normal((128, 2, 64)) * np.geomspace(0.5, 3, 64)).astype(np.float32)
    for profile in ("2.26", "2.26-t"):
        plan = fit_plan(profile, x, x)
        decoded = Codec(plan).decode(Codec(plan).encode(x, x))[1].astype(np.float64)
        found = np.square(decoded - x).sum() / np.square(x.astype(np.float64)).sum()
        assert grouped_loss(x, plan, plan.value) == pytest.approx(found, rel=1e-3)
    plan = make_plan(PROFILES["2.26"], 2, 64)
    decoded = Codec(plan).decode(Codec(plan).encode(x, x))[1].astype(np.float64)
    found = np.square(decoded - x).sum() / np.square(x.astype(np.float64)).sum()
    assert rotated_loss(x, plan, plan.value) == pytest.approx(found, rel=1e-3)


# --- Refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "keys", "values"),
    [
        ("input-shape", np.zeros((5, 8), np.float32), np.zeros((5, 2, 8), np.float32)),
        ("input-shape", np.zeros((5, 2, 8), np.float32), np.zeros((5, 2, 8, 1), np.float32)),
        ("input-shape", np.zeros((5, 2, 8), np.float32), np.zeros((6, 2, 8), np.float32)),
        ("input-shape", np.zeros((5, 2, 8), np.float32), np.zeros((5, 8, 2), np.float32)),
        ("input-dtype", np.zeros((5, 2, 8), np.int32), np.zeros((5, 2, 8), np.int32)),
    ],
)
def test_wrong_arrays_are_refused(code: str, keys: NDArray[Any], values: NDArray[Any]) -> None:
    with pytest.raises(InputError) as caught:
        fit_plan("2.26", keys, values)
    assert caught.value.code == code


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_told(wrong: float) -> None:
    keys, values = normal(40, random_spread(2, 8))
    values[9, 1, 3] = wrong
    with pytest.raises(InputError) as caught:
        fit_plan("2.26", keys, values)
    assert caught.value.code == "input-nonfinite"
    assert [caught.value.where[k] for k in ("kind", "token", "head", "channel")] == ["value", 9, 1, 3]


def test_an_unknown_profile_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        fit_plan("2.27", *normal(40, random_spread(2, 8)))
    assert caught.value.code == "profile-unknown"


@pytest.mark.parametrize(
    "fields",
    [
        {"source": "laplace"}, {"field_bits": 3}, {"field_bits": 13}, {"precision": 8}, {"precision": 15},
        {"precision": 12, "table_bytes": 8191},
    ],
)  # fmt: skip
def test_rules_out_of_bounds_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        ClassRule(**fields)
    assert caught.value.code == "profile-classes"


@pytest.mark.parametrize("name", ["paper-2.26"])
def test_classes_need_a_mid_tread_grid_and_the_prefix_coder(name: str) -> None:
    with pytest.raises(InputError) as caught:
        replace(PROFILES[name].key, classes=ClassRule())
    assert caught.value.code == "profile-classes"
    with pytest.raises(InputError) as caught:
        replace(PROFILES["2.26"].key, coder="rans")
    assert caught.value.code == "profile-classes"

"""Names under which people save keys and values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dquantcodec.errors import InputError
from dquantcodec.tensors.names import match, recognise, recognise_queries, spell
from dquantcodec.tensors.numbers import format_numbers

KNOWN = [
    ("layers.{}.key", "layers.{}.value"),
    ("layers.{}.keys", "layers.{}.values"),
    ("layers.{}.k", "layers.{}.v"),
    ("key_cache.{}", "value_cache.{}"),
    ("key_cache_{}", "value_cache_{}"),
    ("past_key_values.{}.key", "past_key_values.{}.value"),
    ("past_key_values.{}.0", "past_key_values.{}.1"),
    ("present.{}.key", "present.{}.value"),
    ("past_key_{}", "past_value_{}"),
    ("{}.0", "{}.1"),
    ("{}.k", "{}.v"),
    ("{}_key", "{}_value"),
    ("key_{}", "value_{}"),
    ("keys/{}", "values/{}"),
    ("K{}", "V{}"),
    ("k_cache.{}", "v_cache.{}"),
    ("cache_k_{}", "cache_v_{}"),
    ("layer_{}_key", "layer_{}_value"),
    ("layer{}.k", "layer{}.v"),
    ("cache.{}.keys", "cache.{}.values"),
    ("model.layers.{}.self_attn.k", "model.layers.{}.self_attn.v"),
    ("model.layers.{}.self_attn.attn.key_cache", "model.layers.{}.self_attn.attn.value_cache"),
    ("transformer.h.{}.attn.k_cache", "transformer.h.{}.attn.v_cache"),
    ("blocks/{}/attention/key_states", "blocks/{}/attention/value_states"),
    ("layer_{:03}/key", "layer_{:03}/value"),
]


@pytest.mark.parametrize(("key", "value"), KNOWN)
def test_known_names_are_recognised_and_restored(key: str, value: str) -> None:
    numbers = [0, 2, 13]
    names = [pattern.format(number) for number in numbers for pattern in (key, value)]
    naming = recognise([*reversed(names), "layers.0.query", "token_ids", "model.norm.weight"])
    assert list(naming.layers) == numbers
    for number in numbers:
        assert naming.layers[number] == (key.format(number), value.format(number))
        assert (spell(naming.key, number), spell(naming.value, number)) == naming.layers[number]


@given(
    st.sampled_from(KNOWN),
    st.sets(st.integers(0, 999), min_size=1, max_size=20),
    st.permutations(range(40)),
)
def test_order_and_numbers_do_not_matter(patterns: tuple[str, str], numbers: set[int], order: list[int]) -> None:
    names = [pattern.format(number) for number in numbers for pattern in patterns]
    shuffled = [names[i] for i in order if i < len(names)]
    naming = recognise(shuffled)
    assert list(naming.layers) == sorted(numbers)
    assert all((spell(naming.key, number), spell(naming.value, number)) == naming.layers[number] for number in numbers)


@pytest.mark.parametrize("pair", [("key", "value"), ("keys", "values"), ("k", "v"), ("cache.key", "cache.value")])
def test_one_layer_without_a_number(pair: tuple[str, str]) -> None:
    naming = recognise(pair)
    assert naming.layers == {0: pair}
    assert (naming.key, naming.value) == pair


@pytest.mark.parametrize(
    "names",
    [
        ["model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"],
        ["layers.0.key_scale", "layers.0.value_scale"],
        ["monkey_3", "vase_3"],
        ["key_cache.0.1", "value_cache.0.1"],
        ["x"],
        [],
    ],
)
def test_other_names_are_not_guessed(names: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        recognise(names)
    assert caught.value.code == "names-unknown"
    assert "--key" in str(caught.value)


def test_two_ways_of_naming_are_ambiguous() -> None:
    names = ["layers.0.key", "layers.0.value", "key_cache.0", "value_cache.0"]
    with pytest.raises(InputError, match="--key PATTERN") as caught:
        recognise(names)
    assert caught.value.code == "names-ambiguous"
    assert "key_cache|value_cache.{layer} (2 tensors)" in str(caught.value)
    assert "layers.{layer}.key|value (2 tensors)" in str(caught.value)


def test_two_prefixes_are_ambiguous() -> None:
    with pytest.raises(InputError) as caught:
        recognise([f"{part}.layers.0.{kind}" for part in ("encoder", "decoder") for kind in ("key", "value")])
    assert caught.value.code == "names-ambiguous"


@pytest.mark.parametrize("lone", ["layers.1.key", "layers.1.value"])
def test_a_layer_needs_both(lone: str) -> None:
    with pytest.raises(InputError, match="layer 1 has") as caught:
        recognise(["layers.0.key", "layers.0.value", lone])
    assert caught.value.code == "names-unpaired"
    assert lone in str(caught.value)


def test_a_layer_has_each_once() -> None:
    with pytest.raises(InputError, match=r"k\.1 and k\.01") as caught:
        recognise(["k.1", "v.1", "k.01"])
    assert caught.value.code == "names-duplicate"


def test_names_that_no_template_restores() -> None:
    with pytest.raises(InputError) as caught:
        recognise(["k.01", "v.01", "k.2", "v.2"])
    assert caught.value.code == "names-irregular"


def test_patterns_of_the_caller() -> None:
    names = [f"net.L{number}.{kind}+x" for number in (3, 11) for kind in ("KK", "VV")]
    naming = match([*names, "net.L3.KK+xy"], "net.L{layer}.KK+x", "net.L{layer}.VV+x")
    assert naming.layers == {3: ("net.L3.KK+x", "net.L3.VV+x"), 11: ("net.L11.KK+x", "net.L11.VV+x")}
    assert spell(naming.key, 11) == "net.L11.KK+x"
    assert match(["a", "b"], "a", "b").layers == {0: ("a", "b")}


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("k.{layer}", "k.{layer}", "pattern-same"),
        ("k.{layer}", "v", "pattern-layer"),
        ("k.{layer}.{layer}", "v.{layer}", "pattern-layer"),
        ("k.{layer}", "w.{layer}", "names-unknown"),
        ("q.{layer}", "v.{layer}", "names-unknown"),
    ],
)
def test_patterns_that_cannot_be(key: str, value: str, code: str) -> None:
    with pytest.raises(InputError) as caught:
        match(["k.0", "v.0"], key, value)
    assert caught.value.code == code


def test_queries() -> None:
    names = ["layers.0.key", "layers.0.value", "layers.0.query", "layers.7.query"]
    assert recognise_queries(names) == {0: "layers.0.query", 7: "layers.7.query"}
    assert recognise_queries(["q_2", "3.x"]) == {2: "q_2"}
    assert recognise_queries(["layers.0.key"]) == {}
    with pytest.raises(InputError) as caught:
        recognise_queries(["layers.0.query", "q.0"])
    assert caught.value.code == "names-ambiguous"


def test_format_numbers() -> None:
    assert format_numbers([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert format_numbers([]) == ""

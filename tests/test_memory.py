"""Sizes of caches by arithmetic: against pages that were really encoded, and against counting token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dquantcodec import Codec, Profile
from dquantcodec.errors import InputError, LimitError, UnsupportedError
from dquantcodec.layer_budgets import LayerBudgets, LayerWords
from dquantcodec.memory import CacheSize, last
from dquantcodec.model_shape import LayerShape, ModelShape

SMALL = ModelShape("small", (LayerShape(0, 2, 32), LayerShape(1, 2, 32, sliding=300)))


def grown(size: CacheSize, layer: LayerShape, context: int) -> int:
    """The most bytes while tokens come one by one: a page as soon as a window and ``recent`` tokens are there."""
    assert size.profile
    codec = Codec(size.profile, layer.kv_heads, layer.head_dim)
    page = codec.encode(*np.ones((2, size.profile.window, layer.kv_heads, layer.head_dim), np.float32)).data.nbytes
    token = 2 * 2 * layer.kv_heads * layer.head_dim
    pages, exact, most = 0, 0, 0
    for _ in range(layer.tokens(context)):
        exact += 1
        if exact - size.profile.sinks - size.recent >= size.profile.window:
            exact -= size.profile.window
            pages += 1
        most = max(most, pages * page + exact * token)
    return most


@pytest.mark.parametrize("recent", [0, 5, 128])
@pytest.mark.parametrize("profile", ["2.26", "paper-1.96"])
def test_bytes_are_those_of_a_cache_that_grows_token_by_token(profile: str, recent: int) -> None:
    size = CacheSize(SMALL, Profile.named(profile), recent=recent)
    for context in (1, 127, 128, 129, 130, 255, 256, 257, 258, 300, 301, 1000):
        for layer in SMALL.layers:
            assert size.layer_bytes(layer, context) == grown(size, layer, context), (context, layer)


@given(memory=st.integers(0, 10**12), sequences=st.integers(1, 100))
def test_the_longest_context_fits_and_one_token_more_does_not(memory: int, sequences: int) -> None:
    size = CacheSize(ModelShape("", SMALL.layers[:1]), Profile.named("2.26"))
    longest = size.most_tokens(memory, sequences)
    assert sequences * size.bytes(longest) <= memory < sequences * size.bytes(longest + 1)


@pytest.mark.parametrize("recent", [0, 128, 500])
def test_break_even_is_where_counting_finds_it(recent: int) -> None:
    size = CacheSize(SMALL, Profile.named("2.26"), recent=recent)
    for other in (CacheSize(SMALL, None), CacheSize(SMALL, None, bytes_per_value=1)):
        larger = [context for context in range(6000) if size.bytes(context) >= other.bytes(context)]
        assert size.break_even(other) == larger[-1] + 1
    only_sliding = ModelShape("", SMALL.layers[1:])
    assert CacheSize(only_sliding, size.profile, recent=512).break_even(CacheSize(only_sliding, None)) is None


def test_head_groups_take_their_own_containers_and_repeat_scarce_heads() -> None:
    shape = ModelShape("", (LayerShape(0, 4, 64),))
    whole, split, repeated = (CacheSize(shape, Profile.named("2.26"), groups=g) for g in (1, 4, 8))
    assert split.bits_per_value(shape.layers[0]) > whole.bits_per_value(shape.layers[0])
    assert repeated.bytes(5000) == 2 * split.bytes(5000)
    with pytest.raises(InputError, match="do not make 3 groups"):
        CacheSize(shape, None, groups=3)


@given(st.integers(0, 10**6))
def test_last_finds_the_border(border: int) -> None:
    assert last(lambda number: number <= border) == border


def config(**changes: Any) -> dict[str, Any]:
    return {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512, "num_key_value_heads": 2} | changes


@pytest.mark.parametrize(
    ("changes", "sliding"),
    [
        ({}, [None] * 4),
        ({"sliding_window": 64}, [64] * 4),
        ({"sliding_window": 64, "use_sliding_window": False}, [None] * 4),
        ({"sliding_window": 64, "sliding_window_pattern": 2}, [64, None] * 2),
        ({"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"] * 2}, [None, 64] * 2),
    ],
)
def test_configurations_say_which_layers_slide(changes: dict[str, Any], sliding: list[int | None]) -> None:
    shape = ModelShape.from_config(config(**changes))
    assert [layer.sliding for layer in shape.layers] == sliding
    assert {(layer.kv_heads, layer.head_dim) for layer in shape.layers} == {(2, 64)}


def test_layers_without_a_cache_are_left_out_and_text_models_found_within_others() -> None:
    mixed = config(layer_types=["linear_attention", "full_attention"] * 2, head_dim=256)
    shape = ModelShape.from_config({"model_type": "outer", "text_config": mixed})
    assert [(layer.number, layer.head_dim) for layer in shape.layers] == [(1, 256), (3, 256)]
    assert shape.name == "outer"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"num_hidden_layers": 0}, "config-field"),
        ({"num_attention_heads": "8"}, "config-field"),
        ({"layer_types": ["full_attention"]}, "config-layers"),
        ({"layer_types": ["mamba"] * 4}, "config-layers"),
    ],
)
def test_unusable_configurations_are_refused(changes: dict[str, Any], code: str) -> None:
    with pytest.raises(InputError) as caught:
        ModelShape.from_config(config(**changes))
    assert caught.value.code == code


def test_latent_attention_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="MLA"):
        ModelShape.from_config(config(kv_lora_rank=512))


def test_geometries_the_format_cannot_hold_are_refused() -> None:
    with pytest.raises(LimitError):
        CacheSize(ModelShape("", (LayerShape(0, 2000, 64),)), Profile.named("2.26")).bytes(1000)


def test_profile_files_come_back_as_they_were(tmp_path: Any) -> None:
    budgets = LayerBudgets("1.96", {7: LayerWords(8, 128, 41, 29), 0: LayerWords(1, 64, 1, 32767)})
    budgets.save(tmp_path / "layers.json")
    assert LayerBudgets.load(tmp_path / "layers.json") == budgets
    assert budgets.words(7, 8, 128) == (41, 29)
    assert budgets.words(3, 8, 128) is None
    with pytest.raises(InputError, match="plan again"):
        budgets.words(7, 4, 128)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "profile-file"),
        ("[]", "profile-file"),
        ('{"dqkv-profile": 2, "profile": "2.26", "layers": {}}', "profile-file"),
        ('{"dqkv-profile": 1, "profile": "9.99", "layers": {}}', "profile-unknown"),
        ('{"dqkv-profile": 1, "profile": [], "layers": {}}', "profile-unknown"),
        ('{"dqkv-profile": 1, "profile": "2.26", "layers": []}', "profile-file"),
        ('{"dqkv-profile": 1, "profile": "2.26", "layers": {"x": {}}}', "profile-file"),
        ('{"dqkv-profile": 1, "profile": "2.26", "layers": {"1": {"kv_heads": 1}}}', "profile-file"),
    ],
)
def test_profile_files_are_checked(tmp_path: Any, text: str, code: str) -> None:
    path = tmp_path / "layers.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        LayerBudgets.load(path)
    assert caught.value.code == code and caught.value.where["path"] == str(path)


@pytest.mark.parametrize("words", [0, -1, 32768, 1.5, True, "4"])
def test_words_out_of_bounds_are_refused(words: Any) -> None:
    with pytest.raises(InputError, match="key_words"):
        LayerWords(8, 128, words, 29)

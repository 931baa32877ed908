"""The cache for transformers on tiny random models: pages coded once and never again, text that goes on in another
process, and every way that generation has of changing a cache."""

# What is imported below needs torch, so it comes after the line that skips this file without it.
# ruff: noqa: E402

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")

import dquantcodec as dq
from dquantcodec.errors import IdentityError, InputError, UnsupportedError
from dquantcodec.integrations.transformers import ATTENTION, DQuantCache
from dquantcodec.integrations.transformers_layer import DQuantLayer
from dquantcodec.profile import Profile

#: Windows of 32 tokens and few exact ones, so that short prompts make pages.
SMALL = replace(Profile.named("3.0"), window=32)
SETTINGS: dict[str, Any] = {"profile": SMALL, "recent": 20, "fit_windows": 2}
#: First token that is coded, and how many tokens a prompt needs until one is.
SINKS = SMALL.sinks


def tiny(kind: str = "llama", **changes: Any) -> Any:
    sizes = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3,
        "max_position_embeddings": 2048, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, **changes,
    }  # fmt: skip
    torch.manual_seed(1)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3TextConfig(**sizes, sliding_window=24, layer_types=kinds)
    return transformers.Gemma3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny()


def prompt(tokens: int, batch: int = 1, seed: int = 0) -> Any:
    return torch.randint(1, 128, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def read(model: Any, tokens: Any, cache: Any, **kwargs: Any) -> Any:
    return model(tokens, cache=cache, use_cache=True, **kwargs).logits


def rows(cache: DQuantCache, layer: int = 0) -> Any:
    return cache.layers[layer].rows


def write(model: Any, tokens: Any, cache: Any, count: int = 12, **kwargs: Any) -> list[list[int]]:
    kwargs = {"attention_mask": torch.ones_like(tokens), **kwargs}
    output = model.generate(tokens, cache=cache, max_new_tokens=count, do_sample=False, **kwargs)
    return output[:, tokens.shape[1] :].tolist()


def test_what_nothing_is_coded_of_is_what_the_stock_cache_holds(llama: Any) -> None:
    tokens = prompt(60, batch=2)
    stock = write(llama, tokens, transformers.DynamicCache(config=llama.config))
    assert write(llama, tokens, DQuantCache(llama.config, **{**SETTINGS, "recent": 500})) == stock


def test_pages_are_the_codecs_and_the_rest_is_exact(llama: Any) -> None:
    tokens, stock = prompt(150), transformers.DynamicCache(config=llama.config)
    cache = DQuantCache(llama.config, **SETTINGS)
    # The first forward pass attends to exact tokens, so both see the same.
    assert torch.equal(read(llama, tokens, cache), read(llama, tokens, stock))
    for layer, exact in zip(cache.layers, stock.layers):
        (row,) = layer.rows
        keys, values = (x[0].transpose(0, 1).numpy() for x in (exact.keys, exact.values))
        coded = (150 - SINKS - 20) // 32 * 32
        first, last = SINKS, SINKS + coded
        plan = dq.fit_plan(SMALL, keys[first : first + 64], values[first : first + 64])
        np.testing.assert_array_equal(row.pages, dq.Codec(plan).encode(keys[first:last], values[first:last]).data)
        for held, whole in ((row.keys, keys), (row.values, values)):
            np.testing.assert_array_equal(held.transpose(0, 1), np.concatenate([whole[:first], whole[last:]]))
        assert layer.get_seq_length() == 150
        assert layer.get_mask_sizes(3) == (153, 0)
    step = cache.layers[0].update(*(torch.zeros(1, 2, 1, 16) for _ in range(2)))
    decoded = dq.Codec(cache.plans[0]).decode(dq.Pages(rows(cache)[0].pages, 128))
    for given, part, exact in zip(step, decoded, (stock.layers[0].keys, stock.layers[0].values)):
        np.testing.assert_array_equal(given[0, :, SINKS : SINKS + 128].transpose(0, 1), part)
        assert torch.equal(given[:, :, SINKS + 128 : 150], exact[:, :, SINKS + 128 :])


def test_one_by_one_or_at_once_the_pages_are_the_same() -> None:
    settings = DQuantCache(tiny().config, **SETTINGS).settings
    at_once, one_by_one, chunks = (DQuantLayer(0, settings, None, [3, 0]) for _ in range(3))
    states = torch.randn(2, 2, 2, 170, 16, generator=torch.Generator().manual_seed(5))
    at_once.update(*states)
    for token in range(170):
        one_by_one.update(*states[:, :, :, token : token + 1])
    for part in (states[:, :, :, :100], states[:, :, :, 100:]):
        chunks.update(*part)
    for a, b, c in zip(at_once.rows, one_by_one.rows, chunks.rows):
        assert len(a.pages) == 4
        for other in (b, c):
            np.testing.assert_array_equal(a.pages, other.pages)
            assert torch.equal(a.keys, other.keys)


@pytest.mark.parametrize(
    ("dtype", "keep_decoded"), [(torch.float32, False), (torch.bfloat16, True), (torch.float16, False)]
)
def test_both_attentions_write_the_same(dtype: Any, keep_decoded: bool) -> None:
    model = tiny().to(dtype)
    tokens = prompt(150, batch=2)
    caches = [DQuantCache(model.config, **SETTINGS, keep_decoded=keep_decoded) for _ in range(2)]
    logits = []
    for cache, attention in zip(caches, ("sdpa", ATTENTION)):
        model.set_attn_implementation(attention)
        read(model, tokens, cache)
        logits.append(read(model, prompt(5, batch=2, seed=1), cache).float())  # several queries over pages
        logits.append(read(model, prompt(1, batch=2, seed=2), cache).float())
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    for decoded, pages in zip(logits[:2], logits[2:]):
        assert float((decoded - pages).abs().max()) < tolerance * float(decoded.abs().max())


@pytest.mark.parametrize("attention", ["sdpa", "eager", ATTENTION])
def test_padding_is_not_coded(attention: str) -> None:
    model = tiny()
    model.set_attn_implementation(attention)
    long, short = prompt(150), prompt(121, seed=3)
    batch = torch.cat([long, torch.cat([torch.zeros(1, 29, dtype=torch.long), short], dim=1)])
    mask = torch.cat([torch.ones(1, 150), (torch.arange(150) >= 29)[None]]).long()
    together = DQuantCache(model.config, **SETTINGS, attention_mask=mask)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    last = read(model, batch, together, attention_mask=mask, position_ids=positions)[:, -1:]
    next_mask, next_positions = torch.cat([mask, torch.ones(2, 1)], dim=1), positions[:, -1:] + 1
    after = read(model, last.argmax(-1), together, attention_mask=next_mask.long(), position_ids=next_positions)
    alone = DQuantCache(model.config, **SETTINGS, plans=together.plans)
    expected = read(model, short, alone)[:, -1:]
    expected = read(model, expected.argmax(-1), alone)
    assert len(rows(together)[1].pages) == len(rows(alone)[0].pages) == 3
    # Not to the bit: matrix products of a batch round differently, and a page may follow the rounding.
    np.testing.assert_allclose(after[1], expected[0], atol=2e-2 * float(expected.abs().max()))


def test_crop_within_the_exact_tail_leaves_no_trace(llama: Any) -> None:
    tokens = prompt(150)
    cache = DQuantCache(llama.config, **SETTINGS)
    read(llama, tokens, cache)
    before = copy.deepcopy(cache)
    read(llama, prompt(6, seed=1), cache)
    cache.crop(-6)
    assert cache.get_seq_length() == 150
    for a, b in zip(cache.layers, before.layers):
        assert torch.equal(a.rows[0].keys, b.rows[0].keys)
        np.testing.assert_array_equal(a.rows[0].pages, b.rows[0].pages)
    assert write(llama, torch.cat([tokens, prompt(1, seed=2)], 1), cache) == write(
        llama, torch.cat([tokens, prompt(1, seed=2)], 1), before
    )


@pytest.mark.parametrize("left", [150, 100, 97, 90, 33, 32, 1, 0])
@pytest.mark.parametrize("keep_decoded", [False, True])
def test_crop_into_pages_keeps_what_attention_saw(left: int, keep_decoded: bool) -> None:
    states = torch.randn(2, 1, 2, 150, 16, generator=torch.Generator().manual_seed(5))
    layer = DQuantLayer(0, DQuantCache(tiny().config, **SETTINGS, keep_decoded=keep_decoded).settings, None)
    layer.update(*states)
    empty = states[:, :, :, :0]
    seen = layer.update(*empty)
    layer.crop(left - 150)
    assert layer.get_seq_length() == left
    assert len(layer.rows[0].pages) == min(4, max(0, left - SINKS) // 32)
    for a, b in zip(layer.update(*empty), seen):
        assert torch.equal(a, b[:, :, :left])


def test_batches_are_reordered_repeated_and_selected_without_copies() -> None:
    states = torch.randn(2, 3, 2, 150, 16, generator=torch.Generator().manual_seed(5))
    layer = DQuantLayer(0, DQuantCache(tiny().config, **SETTINGS).settings, None, [0, 2, 4])
    layer.update(*states)
    empty = states[:, :, :, :0]
    whole = layer.update(*empty)[0]
    layer.reorder_cache(torch.tensor([2, 2, 0]))
    assert torch.equal(layer.update(*empty)[0], whole[[2, 2, 0]])
    assert layer.rows[0].pages is layer.rows[1].pages
    layer.batch_repeat_interleave(2)
    assert torch.equal(layer.update(*empty.repeat_interleave(2, 1))[0], whole[[2, 2, 2, 2, 0, 0]])
    layer.batch_select_indices(torch.tensor([True, False, False, False, True, False]))
    assert torch.equal(layer.update(*empty[:, :2])[0], whole[[2, 0]])
    plan = layer.plan
    layer.reset()
    assert layer.get_seq_length() == 0 and layer.plan is plan
    layer.batch_select_indices(torch.tensor([0]))  # of nothing, as when generation prepares a cache
    # Other prompts follow, and the padding of the first ones is not theirs.
    assert layer.update(*states)[0].all()


def test_reset_takes_the_mask_of_the_next_prompts(llama: Any) -> None:
    cache = DQuantCache(llama.config, **SETTINGS, attention_mask=torch.tensor([[0, 0, 1]]))
    cache.reset(attention_mask=torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]))
    read(llama, prompt(60, batch=2), cache)
    assert [row.padding for row in rows(cache)] == [1, 0]


class CodesInPlace(transformers.cache_utils.DynamicLayer):
    """transformers' own layer, whose windows are replaced by what they decode to: no pages, rows or sharing."""

    def __init__(self, plan: Any) -> None:
        super().__init__()
        self.codec, self.coded = dq.Codec(plan), SINKS

    def update(self, *states: Any, **kwargs: Any) -> Any:
        seen = [x.clone() for x in super().update(*states[:2])]
        while self.coded + 32 + 20 <= self.keys.shape[2]:
            part = slice(self.coded, self.coded + 32)
            for keys, values in zip(self.keys[:, :, part], self.values[:, :, part]):
                pages = self.codec.encode(*(x.transpose(0, 1).numpy() for x in (keys, values)))
                for x, decoded in zip((keys, values), self.codec.decode(pages)):
                    x.copy_(torch.from_numpy(decoded).transpose(0, 1))
            self.coded += 32
        return seen


def test_beams_and_speculation_use_it(llama: Any) -> None:
    tokens = prompt(130)
    cache = DQuantCache(llama.config, **SETTINGS)
    # A window fills while beams are apart, so some of them share its page and some do not.
    settings = {"max_new_tokens": 24, "num_beams": 3, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    beams = llama.generate(tokens, cache=cache, **settings)
    plans = cache.plans
    stock = transformers.Cache(layers=[CodesInPlace(plans[number]) for number in range(3)])
    assert torch.equal(beams, llama.generate(tokens, cache=stock, **settings))
    assert len(rows(cache)) == 3 and all(len(row.pages) == 4 for row in rows(cache))
    # No window fills while candidates are tried: that would code it up to as many tokens earlier.
    looked_up = DQuantCache(llama.config, **SETTINGS, plans=plans)
    plain = DQuantCache(llama.config, **SETTINGS, plans=plans)
    assert write(llama, tokens, looked_up, prompt_lookup_num_tokens=3) == write(llama, tokens, plain)


@pytest.mark.parametrize(("kind", "tokens"), [("llama", 150), ("gemma3", 150), ("gemma3", 40)])
def test_a_loaded_cache_goes_on_with_the_same_text(kind: str, tokens: int, tmp_path: Path) -> None:
    model = tiny(kind).to(torch.bfloat16)
    start = torch.cat([torch.zeros(1, 7, dtype=torch.long), prompt(tokens - 7)], dim=1)
    mask = (torch.arange(tokens) >= 7)[None].long()
    cache = DQuantCache(model.config, **SETTINGS, attention_mask=mask)
    first = write(model, start, cache, attention_mask=mask)
    path = tmp_path / "cache.dqkv"
    cache.save(path, model="tiny", metadata={"text": first[0]})
    so_far = torch.cat([start, torch.tensor(first)], dim=1)
    mask = (torch.arange(so_far.shape[1]) >= 7)[None].long()
    loaded = DQuantCache.load(path, model.config, model="tiny", profile=SMALL, fit_windows=2)
    assert loaded.nbytes <= cache.nbytes
    assert write(model, so_far, loaded, 60, attention_mask=mask) == write(model, so_far, cache, 60, attention_mask=mask)
    assert len(loaded.layers[1].rows[0].pages) == len(cache.layers[1].rows[0].pages) > 0
    with dq.open(path) as file:
        assert not list(file.verify())
        assert file.metadata["text"] == first[0]
    with pytest.raises(IdentityError, match="model"):
        DQuantCache.load(path, model.config, model="other")
    with pytest.raises(IdentityError):
        DQuantCache.load(path, tiny(kind, num_key_value_heads=4).config, profile=SMALL)


#: What another process does: the models by their kinds, the saved caches, and the text so far.
ELSEWHERE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from test_integrations_transformers import SMALL, DQuantCache, tiny, torch, write

for kind, attention in (("llama", "dquant"), ("gemma3", "sdpa")):
    model = tiny(kind)
    model.set_attn_implementation(attention)
    cache = DQuantCache.load(f"{sys.argv[2]}/{kind}.dqkv", model.config, model=kind, profile=SMALL, fit_windows=2)
    so_far = json.load(open(f"{sys.argv[2]}/{kind}.json"))
    print(json.dumps(write(model, torch.tensor(so_far), cache, 24)))
"""


def test_another_process_goes_on_with_the_text_of_an_uninterrupted_run(tmp_path: Path) -> None:
    expected = []
    for kind, attention in (("llama", ATTENTION), ("gemma3", "sdpa")):
        model, start = tiny(kind), prompt(120)
        model.set_attn_implementation(attention)
        whole = write(model, start, DQuantCache(model.config, **SETTINGS), 36)
        expected.append([text[12:] for text in whole])
        cache = DQuantCache(model.config, **SETTINGS)
        so_far = torch.cat([start, torch.tensor(write(model, start, cache, 12))], dim=1)
        cache.save(tmp_path / f"{kind}.dqkv", model=kind)
        (tmp_path / f"{kind}.json").write_text(json.dumps(so_far.tolist()), encoding="utf-8")
        pages = len(rows(cache, 1)[0].pages)
        assert 0 < pages < (155 - SINKS - 20) // 32  # some pages are loaded, some made afterwards
    command = [sys.executable, "-c", ELSEWHERE, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected


def test_memory_is_that_of_pages_and_exact_tokens(llama: Any) -> None:
    cache = DQuantCache(llama.config, **SETTINGS)
    read(llama, prompt(1000), cache)
    page = rows(cache)[0].pages.nbytes / len(rows(cache)[0].pages)
    pages = (1000 - SINKS - 20) // 32
    assert cache.nbytes == 3 * (pages * page + (1000 - 32 * pages) * 2 * 32 * 4)
    kept = DQuantCache(llama.config, **SETTINGS, keep_decoded=True)
    read(llama, prompt(1000), kept)
    assert kept.nbytes - cache.nbytes == 3 * pages * 32 * 2 * 32 * 4


def test_refusals(llama: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="left"):
        DQuantCache(llama.config, attention_mask=torch.tensor([[1, 1, 0]]))
    with pytest.raises(InputError, match="recent"):
        DQuantCache(llama.config, recent=-1)
    with pytest.raises(InputError, match="no tokens"):
        DQuantCache(llama.config).save(tmp_path / "x.dqkv")
    cache = DQuantCache(llama.config, **SETTINGS)
    states = torch.randn(1, 2, 150, 16)
    states[0, 1, 40, 3] = torch.nan
    with pytest.raises(InputError, match="key of layer 2, token 40, head 1, channel 3"):
        cache.update(states, states, 2)
    assert cache.get_seq_length(2) == 0  # nothing was taken in
    with pytest.raises(InputError, match="exact_layers"):
        cache.update(states, states[..., :8], 1)
    with pytest.raises(InputError, match="crop"):
        cache.layers[0].crop(5)
    model = tiny()
    model.set_attn_implementation(ATTENTION)
    read(model, prompt(150), cache := DQuantCache(model.config, **SETTINGS))
    model.train()
    model.config.attention_dropout = model.model.layers[0].self_attn.attention_dropout = 0.5
    with pytest.raises(UnsupportedError, match="dropout"):
        read(model, prompt(1), cache)

"""Attention over pages in transformers' caches: what holds on any device, and a device that is none.

The checks take the device that keys are on.  :func:`stand_in` puts the CPU's codec and the kernels compiled for the
host in the place of a GPU's, so that the same checks run without one.
"""

# ruff: noqa: E402

from __future__ import annotations

import copy
import ctypes
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu_support import aligned, library

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")

import dquantcodec as dq
from dquantcodec.cuda import attend_launch
from dquantcodec.foreign import to_numpy
from dquantcodec.integrations import transformers_device, transformers_store
from dquantcodec.integrations.tensors import as_torch
from dquantcodec.integrations.transformers import ATTENTION, DQuantCache
from dquantcodec.integrations.transformers_attention import attention_forward
from dquantcodec.integrations.transformers_layer import DQuantLayer, Settings
from dquantcodec.profile import Profile

#: Windows of 32 tokens and few exact ones, so that short sequences make pages.
SMALL = replace(Profile.named("3.0"), window=32)
SINKS, RECENT, FIT = SMALL.sinks, 20, 2
#: KV heads, query heads and head size of SmolLM2-135M.
KV_HEADS, QUERY_HEADS, HEAD_DIM = 3, 9, 64

#: Errors of attention over pages against float64 attention over what they decode to, the same as the kernels' own
#: tests: sums of levels are exact, queries and weights are rounded to FP16; bfloat16 outputs alone are off by 1.7e-3.
TOLERANCE = {"float32": 2e-3, "float16": 2e-3, "bfloat16": 3e-3}
#: How far two runs of a model may part in a layer: by that error, and by what runs being rounded itself, half a unit of
#: the dtype some ten times in each run, four units by chance; in bfloat16 these alone are more.
PARTING = {"float32": 2e-3, "float16": 2e-3 + 2.0**-9, "bfloat16": 2.0**-6}


class Codec:
    """The calls of :class:`dquantcodec.cuda.Codec` that stores make, on tensors of the CPU."""

    def __init__(self, plan: Any, *, device: int) -> None:
        self._cpu = dq.Codec(plan)
        self.plan, self.layout = plan, self._cpu.layout
        self.device = SimpleNamespace(current=nullcontext())

    def encode(self, keys: Any, values: Any, *, pages: Any, numbers: Any) -> None:
        data = self._cpu.encode(to_numpy(keys, "keys"), to_numpy(values, "values")).data
        pages[numbers.long()] = torch.from_numpy(data)

    def decode(self, pages: Any, start: int, *, dtype: Any, numbers: Any) -> Any:
        data = pages.data[numbers.long()].numpy()
        return tuple(
            as_torch(x).to(dtype) for x in self._cpu.decode(dq.Pages(data, pages.tokens), start, dtype=np.float32)
        )


class PageAttention:
    """The kernels of :class:`dquantcodec.cuda.attend.PageAttention` on the host, blocks of one warp."""

    folder: Path
    made = 0
    called: list[tuple[int, bool]]

    def __init__(
        self, plan: Any, batch: int, query_heads: int, *, positions: int, dtype: str, most_tokens: int, masked: bool
    ) -> None:
        type(self).made += 1
        self.plan, self.shape = plan, (batch, positions, query_heads)
        self.launch = attend_launch.attend_launch(
            plan, query_heads // plan.kv_heads, positions, dtype, masked=masked, warps=1, shared=1 << 20
        )
        defined = tuple(option for option in self.launch.options if option.startswith("-D"))
        self.built = library(defined, str(self.folder), f"{self.launch.name}.cpp")

    def __call__(
        self, query: Any, pages: Any, table: Any, lengths: Any, *, tail: Any, scale: float, causal: bool, out: Any,
        lse: Any,
    ) -> None:  # fmt: skip
        self.called.append((self.shape[1], tail is not None))
        batch, *_ = self.shape
        assert query.shape == (*self.shape, self.plan.head_dim) and query.is_contiguous()
        shape, blocks = self.launch.shape, 3
        slots = blocks + batch * shape.groups
        arrays = {
            "pages": aligned(pages.numpy()), "block_table": table.numpy(), "lengths": lengths.numpy(),
            "query": bits(query), "partial": np.full(slots * shape.partial_floats, np.nan, np.float32),
            "state": np.full(slots * shape.state_floats, np.nan, np.float32), "out": bits(out), "lse": lse.numpy(),
            **attend_launch.attend_memory(self.plan),
        }  # fmt: skip
        params = attend_launch.attend_params(self.plan, self.launch)
        if tail is not None:
            arrays |= {"tail_keys": bits(tail[0]), "tail_values": bits(tail[1]), "tail_lengths": tail[2].numpy()}
            params["tail_stride"] = tail[0].shape[1]
        for name, array in arrays.items():
            params[name] = array.ctypes.data
        params["page_stride"], params["table_stride"] = pages.shape[1], table.shape[1]
        params["batch"], params["blocks"], params["causal"] = batch, blocks, int(causal)
        params["scale"], params["lse_factor"] = scale, math.log(2)
        finish = self.plan.kv_heads * batch * shape.passes * shape.rows // 4
        self.built.run_attend(ctypes.c_void_p(params.ctypes.data), finish)


def bits(tensor: Any) -> Any:
    """A contiguous tensor's memory as NumPy has names for it."""
    assert tensor.is_contiguous()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@pytest.fixture(scope="session")
def kernel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attend")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, kernel_folder: Path) -> type[PageAttention]:
    """The CPU counts as a GPU."""
    monkeypatch.setattr(transformers_store, "on_gpu", lambda device: True)
    monkeypatch.setattr(transformers_device, "Codec", Codec)
    monkeypatch.setattr(transformers_device, "PageAttention", PageAttention)
    here = SimpleNamespace(number=0, current=nullcontext())
    monkeypatch.setattr(transformers_device, "cuda_device", lambda number: here)
    monkeypatch.setattr(transformers_device, "stream_of", lambda stream, arrays: nullcontext())
    PageAttention.folder, PageAttention.made, PageAttention.called = kernel_folder, 0, []
    return PageAttention


def states(batch: int, tokens: int, dtype: str, device: str, seed: int = 5, heads: int = KV_HEADS) -> Any:
    """Keys and values ``[2, B, H, T, D]`` whose channels are unlike."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(0.5 * torch.randn(2, 1, heads, 1, HEAD_DIM, generator=torch.Generator().manual_seed(1)))
    found = spread * torch.randn(2, batch, heads, tokens, HEAD_DIM, generator=generator)
    return found.to(getattr(torch, dtype)).to(device)


def queries(batch: int, length: int, dtype: str, device: str, seed: int = 6) -> Any:
    found = torch.randn(batch, QUERY_HEADS, length, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
    return found.to(getattr(torch, dtype)).to(device)


@lru_cache(maxsize=1)
def plan() -> Any:
    """One plan for most checks, so that there are few kernels to compile."""
    return dq.fit_plan(SMALL, *(x[0].transpose(0, 1).numpy() for x in states(1, 256, "float32", "cpu", 0)))


def layer(padding: list[int] | None = None) -> DQuantLayer:
    config = SimpleNamespace(_attn_implementation=ATTENTION)
    settings = Settings(SMALL, sinks=SINKS, recent=RECENT, fit_windows=FIT, keep_decoded=False, threads=1)
    return DQuantLayer(0, settings, config, padding, plan())


def causal(padding: list[int], tokens: int, length: int, device: str) -> Any:
    """The mask bool ``[B, 1, L, T]`` that transformers makes."""
    column, newest = torch.arange(tokens), torch.arange(tokens - length, tokens)
    visible = (column >= torch.tensor(padding)[:, None, None, None]) & (column <= newest[:, None])
    return visible.to(device)


def attend(of: DQuantLayer, query: Any, new: Any, mask: Any) -> Any:
    """Output ``[B, L, Q, D]`` of a step, as a model's attention asks for it."""
    keys, values = of.update(*new)
    module = SimpleNamespace(num_key_value_groups=QUERY_HEADS // KV_HEADS, is_causal=True, training=False)
    return attention_forward(module, query, keys, values, mask)[0]


def reference(of: DQuantLayer, query: Any, new: Any, mask: Any) -> Any:
    """The same in float64 over everything decoded to float32, which rounds nothing; ``of`` is left as it was."""
    of = copy.deepcopy(of)
    of._config = SimpleNamespace(_attn_implementation="sdpa")
    of.rows = [replace(row, keys=row.keys.float(), values=row.values.float()) for row in of.rows]
    keys, values = (x.double().repeat_interleave(QUERY_HEADS // KV_HEADS, dim=1) for x in of.update(*new.float()))
    logits = query.double() @ keys.transpose(2, 3) / math.sqrt(query.shape[-1])
    return (logits.masked_fill(~mask, -torch.inf).softmax(-1) @ values).transpose(1, 2)


def near(got: Any, want: Any, dtype: str) -> None:
    for i in range(len(got)):
        error = float((got[i].double() - want[i]).norm() / want[i].norm())
        assert error < TOLERANCE[dtype], (i, error)


#: Tokens that steps bring, and the sizes of kernels that take them.
STEPS = {1: 1, 3: 4, 8: 8, 5: 8, 2: 2}


def check_steps(device: str, dtype: str, lengths: tuple[int, ...] = (1, 1, 3, 8, 1, 5, 8, 8, 2, 1)) -> None:
    """Steps of one and of several tokens, through several pages, of sequences of different lengths."""
    padding = [0, 9, 60, 95]
    of = layer(padding)
    of.update(*states(4, 130, dtype, device))
    assert [len(row.pages) for row in of.rows] == [3, 3, 1, 0]
    for step, length in enumerate(lengths):
        new, query = states(4, length, dtype, device, step), queries(4, length, dtype, device, step)
        mask = causal(padding, of.get_seq_length() + length, length, device)
        want = reference(of, query, new, mask)
        near(attend(of, query, new, mask if step % 3 else as_numbers(mask, dtype)), want, dtype)
    made = [(130 + sum(lengths) - skipped - SINKS - RECENT) // 32 for skipped in padding]
    assert [len(row.pages) for row in of.rows] == made
    by_kernels(of)


def by_kernels(of: DQuantLayer) -> None:
    """Nothing was decoded because kernels did not take the plan."""
    assert isinstance(of.store, transformers_device.DeviceStore)
    assert of.store._attentions and not of.store._refused


def as_numbers(mask: Any, dtype: str) -> Any:
    kind = getattr(torch, dtype)
    return torch.zeros(mask.shape, dtype=kind, device=mask.device).masked_fill(~mask, torch.finfo(kind).min)


def check_masks_of_ones_own(device: str, dtype: str) -> None:
    """What only hides new tokens from one another is attended to; what hides pages is refused."""
    of = layer([0, 4])
    of.update(*states(2, 120, dtype, device))
    new, query = states(2, 4, dtype, device, 1), queries(2, 4, dtype, device)
    tree = causal([0, 4], 124, 4, device)
    tree[:, :, 2, 104:122] = False
    tree[:, :, 3, 104:121] = False
    want = reference(of, query, new, tree)
    near(attend(copy.deepcopy(of), query, new, tree), want, dtype)
    plain = reference(of, query, new, causal([0, 4], 124, 4, device))
    assert float((want - plain).norm() / plain.norm()) > 10 * TOLERANCE[dtype]
    hiding = causal([0, 4], 124, 4, device)
    hiding[1, :, :, 40] = False
    with pytest.raises(dq.errors.InputError, match="hides tokens that are in pages"):
        attend(of, query, new, hiding)


def check_what_kernels_do_not_take(device: str) -> None:
    """Many new tokens, and plans without kernels, are decoded."""
    of = layer([0])
    of.update(*states(1, 120, "float32", device))
    new, query = states(1, 40, "float32", device, 1), queries(1, 40, "float32", device)
    mask = causal([0], 160, 40, device)
    want = reference(of, query, new, mask)
    got = attend(of, query, new, mask)
    assert float((got.double() - want).norm() / want.norm()) < 1e-5  # nothing but float32's own error
    wide = torch.cat([states(1, 121, "float32", device)] * 2, dim=-1)[..., :80]
    of = layer([0])
    of.plan = None  # fitted to them
    of.update(*wide[:, :, :, :120])
    query = torch.cat([queries(1, 1, "float32", device)] * 2, dim=-1)[..., :80]
    new = wide[:, :, :, 120:]
    for turn in range(2):  # the second time it is known that there are no kernels
        mask = causal([0], 121 + turn, 1, device)
        want = reference(of, query, new, mask)
        got = attend(of, query, new, mask)
        assert float((got.double() - want).norm() / want.norm()) < 1e-5
    assert of.store is not None and len(of.rows[0].pages) == 3


def check_numbers_that_are_not_finite(device: str) -> None:
    """Named in tokens of their own sequence, although all sequences are coded together; and nothing is taken in."""
    of = layer([0, 5, 0])
    states_of = states(3, 125, "float16", device)
    of.update(*states_of[:, :, :, :20])
    states_of[1, 1, 2, 71, 9] = torch.nan
    with pytest.raises(dq.errors.InputError, match="value of layer 0, token 66, head 2, channel 9 is not finite"):
        of.update(*states_of[:, :, :, 20:])
    assert of.get_seq_length() == 20 and not any(len(row.pages) for row in of.rows)
    states_of[1, 1, 2, 71, 9] = 0
    of.update(*states_of[:, :, :, 20:])
    assert [len(row.pages) for row in of.rows] == [3, 3, 3]


def same(on_device: DQuantLayer, on_host: DQuantLayer) -> None:
    assert on_device.get_seq_length() == on_host.get_seq_length() and len(on_device.rows) == len(on_host.rows)
    for ours, theirs in zip(on_device.rows, on_host.rows):
        assert len(ours.pages) == len(theirs.pages) and ours.padding == theirs.padding
        if len(ours.pages):
            assert on_device.store and on_host.store
            np.testing.assert_array_equal(on_device.store.data(ours.pages), on_host.store.data(theirs.pages))
        for x, y in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert torch.equal(x.cpu(), y)


def pages_used(of: DQuantLayer) -> int:
    return len({int(number) for row in of.rows for number in row.pages})


def check_operations(device: str, host: Any, seed: int, dtype: str = "bfloat16") -> None:
    """A life of random operations leaves the same tokens and pages on a device as on the CPU.

    ``host()`` is a context in which stores of the CPU are made.
    """
    rng = np.random.default_rng(seed)
    padding = [0, 5, 37]
    there = layer(padding)
    there.update(*(first := states(3, 125, dtype, device)))
    with host():
        here = layer(padding)
        here.update(*first.cpu())
    most = pages_used(there)
    for turn in range(30):
        batch = len(there.rows)
        what = rng.choice(["grow", "grow", "grow", "grow", "crop", "reorder", "repeat", "select", "copy"])
        if what == "grow":
            length = int(rng.choice([1, 1, 3, 8, 33]))
            new = states(batch, length, dtype, device, turn)
            query = queries(batch, length, dtype, device, turn)
            tokens = there.get_seq_length() + length
            mask = causal([row.padding for row in there.rows], tokens, length, device)
            want = reference(there, query, new, mask)
            out = attend(there, query, new, mask)
            if length <= transformers_device.MOST_POSITIONS:
                near(out, want, dtype)
            with host():
                here.update(*new.cpu())
        elif what == "crop":
            count = int(rng.integers(1, 50))
            if there.get_seq_length() - count > max(padding) + 1:
                there.crop(-count)
                here.crop(-count)
        elif what == "copy":
            there = copy.deepcopy(there)
        else:
            picked = torch.from_numpy(rng.integers(0, batch, 3 if what == "select" else batch))
            for one, at in ((there, device), (here, "cpu")):
                if what == "repeat" and batch < 4:
                    one.batch_repeat_interleave(2)
                elif what == "reorder":
                    one.reorder_cache(picked.to(at))
                elif what == "select":
                    one.batch_select_indices(picked.to(at))
        same(there, here)
        most = max(most, pages_used(there))
        assert len(there.store._pool) <= most + max(transformers_device.LEAST_GROWTH, most // 4)
    there.reset()
    assert there.get_seq_length() == 0 and there.plan and not len(there.store._pool)
    there.reset([0])
    there.update(*states(1, 125, dtype, device))
    assert len(there.rows[0].pages) == 3
    # Pages that are let go are used again: the pool holds what is alive at once, and its slack.
    for _ in range(12):
        there.crop(-64)
        there.update(*states(1, 64, dtype, device))
    assert len(there.rows[0].pages) == 3 and len(there.store._pool) == 3 + transformers_device.LEAST_GROWTH


def llama(device: str, dtype: str, layers: int = 2) -> Any:
    """A random model with the heads of SmolLM2-135M."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=QUERY_HEADS * HEAD_DIM, intermediate_size=256, num_hidden_layers=layers,
        num_attention_heads=QUERY_HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, initializer_range=0.08,
        max_position_embeddings=2048, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().to(getattr(torch, dtype)).to(device)


def prompt(tokens: int, batch: int, device: str, seed: int = 0) -> Any:
    return torch.randint(1, 128, (batch, tokens), generator=torch.Generator().manual_seed(seed)).to(device)


def cache_of(model: Any, **changes: Any) -> DQuantCache:
    return DQuantCache(model.config, **{"profile": SMALL, "recent": RECENT, "fit_windows": FIT, **changes})


@torch.inference_mode()
def read(model: Any, tokens: Any, cache: Any, mask: Any = None) -> Any:
    """Logits float32 ``[B, vocabulary]`` behind ``tokens``; positions are counted without padding."""
    extra = {}
    if mask is not None:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        extra = {"attention_mask": mask, "position_ids": positions}
    return model(tokens, cache=cache, use_cache=True, **extra).logits[:, -1].float()


def check_text(device: str, dtype: str, batch: int = 2, steps: int = 40) -> None:
    """Greedy text with attention over pages is that with decoding, logits within the error of the attention.

    The text is that of decoding: where the best two logits are further apart than both errors together, attention over
    pages must choose the same token.
    """
    model = llama(device, dtype)
    mask = (torch.arange(130, device=device) >= torch.arange(batch, device=device)[:, None] * 29).long()
    start = prompt(130, batch, device)
    caches: dict[str, DQuantCache] = {}
    logits = {}
    for attention in ("sdpa", ATTENTION):
        model.set_attn_implementation(attention)
        caches[attention] = cache_of(model, attention_mask=mask, plans={0: plan(), 1: plan()})
        logits[attention] = read(model, start, caches[attention], mask)
    tolerance = len(model.model.layers) * PARTING[dtype]
    sure = 0
    for _ in range(steps):
        decoded, paged = logits["sdpa"], logits[ATTENTION]
        error = (decoded - paged).norm(dim=-1) / decoded.norm(dim=-1)
        assert float(error.max()) < tolerance, error
        best = decoded.topk(2).values
        clear = best[:, 0] - best[:, 1] > 2 * (decoded - paged).abs().max(dim=-1).values
        assert torch.equal(decoded.argmax(-1)[clear], paged.argmax(-1)[clear])
        sure += int(clear.sum())
        token = decoded.argmax(-1)[:, None]
        mask = torch.cat([mask, torch.ones_like(token)], dim=1)
        for attention in ("sdpa", ATTENTION):
            model.set_attn_implementation(attention)
            logits[attention] = read(model, token, caches[attention], mask)
    assert sure > (0.5 if dtype == "bfloat16" else 0.9) * batch * steps
    for cache in caches.values():
        assert len(cache.layers[1].rows[0].pages) == (130 + steps - SINKS - RECENT) // 32
    by_kernels(caches[ATTENTION].layers[1])


def check_resumed(device: str, path: Path, dtype: str = "bfloat16") -> None:
    """A file written with pages on a device is the CPU's format, and text goes on from it the same."""
    model = llama(device, dtype)
    model.set_attn_implementation(ATTENTION)
    start = prompt(130, 2, device)
    cache = cache_of(model)
    settings = {"do_sample": False, "attention_mask": torch.ones_like(start)}
    half = model.generate(start, cache=cache, max_new_tokens=10, **settings)
    cache.save(path, model="tiny")
    loaded = DQuantCache.load(path, model.config, model="tiny", profile=SMALL, fit_windows=FIT)
    assert all(row.keys.device.type == "cpu" for row in loaded.layers[0].rows)
    texts = [
        model.generate(half, cache=c, max_new_tokens=30, do_sample=False, attention_mask=torch.ones_like(half)).tolist()
        for c in (cache, loaded)
    ]
    assert texts[0] == texts[1]
    with dq.open(path) as file:
        assert not list(file.verify())
        for i, sequence in enumerate(file.sequences):
            of = cache.layers[1]
            pages = sequence.layers[1].pages().data
            np.testing.assert_array_equal(pages, of.store.data(of.rows[i].pages[: len(pages)]))


def check_beams_and_speculation(device: str) -> None:
    """Beams, which share pages until they part, and candidates that are cropped write what they write with decoding."""
    model = llama(device, "float32")
    tokens = prompt(120, 1, device)
    settings = {"do_sample": False, "attention_mask": torch.ones_like(tokens), "max_new_tokens": 16}
    for more in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        texts = []
        for attention in ("sdpa", ATTENTION):
            model.set_attn_implementation(attention)
            cache = cache_of(model, plans={0: plan(), 1: plan()})
            texts.append(model.generate(tokens, cache=cache, **settings, **more).tolist())
        assert texts[0] == texts[1]
        assert len(cache.layers[1].rows[0].pages) >= 3
        by_kernels(cache.layers[1])

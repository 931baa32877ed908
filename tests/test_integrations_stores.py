"""LMCache's serde, SGLang's storage backend and vLLM's offloading tier against fakes that follow their interfaces
(lmcache 0.5.6, sglang 0.5.23, vllm 0.33.0), and fakes and adapters against the record of those interfaces that
``tools/engine_interfaces.py`` makes.  The packages' own classes are used in ``test_integrations_packages.py``."""

# What is imported below needs torch, so it comes after the line that skips this file without it.
# ruff: noqa: E402

from __future__ import annotations

import importlib
import inspect
import json
import sys
import types
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import dquantcodec as dq
from dquantcodec.errors import ChecksumError, InputError, UnsupportedError

HEADS, DIM, LAYERS, TOKENS = 2, 32, 3, 96


def module(name: str, **members: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(members)
    return made


class FakeProcessor:
    """What LMCache's AsyncSerdeProcessor does with its two halves, without its threads."""

    def __init__(self, serializer: Any, deserializer: Any, max_workers: int = 1) -> None:
        self.serializer, self.deserializer, self.max_workers = serializer, deserializer, max_workers

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        return self.serializer.estimate_serialized_size(layout_desc)

    def serialize(self, src: Any, dst: Any, key: Any) -> Any:
        dst.tensor = dst.tensor[: self.serializer.serialize(src, dst, key)]
        return dst


@dataclass
class Memory:
    tensor: Any


@dataclass
class Layout:
    shapes: list[Any]
    dtypes: list[Any]


@pytest.fixture
def lmcache(monkeypatch: pytest.MonkeyPatch) -> Any:
    registry: dict[str, Any] = {}
    base = "lmcache.v1.distributed.serde"
    for name in ("lmcache", "lmcache.v1", "lmcache.v1.distributed", base):
        monkeypatch.setitem(sys.modules, name, module(name, __path__=[]))
    monkeypatch.setitem(sys.modules, f"{base}.base", module("base", Serializer=object, Deserializer=object))
    monkeypatch.setitem(sys.modules, f"{base}.factory", module("factory", register_serde_factory=registry.__setitem__))
    monkeypatch.setitem(sys.modules, f"{base}.async_processor", module("processor", AsyncSerdeProcessor=FakeProcessor))
    monkeypatch.delitem(sys.modules, "dquantcodec.integrations.lmcache", raising=False)
    importlib.import_module("dquantcodec.integrations.lmcache")
    yield registry
    sys.modules.pop("dquantcodec.integrations.lmcache", None)


SETTINGS = {"kv_heads": HEADS, "head_dim": DIM, "max_workers": 2}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lmcache_serde(lmcache: Any, fused: bool, dtype: Any) -> None:
    processor = lmcache["dquant"](SETTINGS)
    planes = torch.randn(2, LAYERS, TOKENS, HEADS, DIM, generator=torch.Generator().manual_seed(0)).to(dtype)
    shape = (1, LAYERS, TOKENS, HEADS * 2 * DIM) if fused else (2, LAYERS, TOKENS, HEADS * DIM)
    stored = (torch.cat(list(planes), dim=-1)[None] if fused else planes).reshape(shape)
    size = processor.estimate_serialized_size(Layout([torch.Size(shape)], [dtype]))
    chunk = processor.serialize(Memory(stored), Memory(torch.zeros(size, dtype=torch.uint8)), "key")
    assert len(chunk.tensor) == size < stored.nbytes / 4
    found = Memory(torch.zeros(shape, dtype=dtype))
    processor.deserializer.deserialize(chunk, found, "key")
    codec = dq.Codec("2.26", HEADS, DIM)
    for layer in range(LAYERS):
        expected = codec.decode(codec.encode(planes[0, layer], planes[1, layer]))
        rows = found.tensor.reshape(-1, LAYERS, TOKENS, HEADS, 2 * DIM if fused else DIM)
        given = rows[0, layer].split(DIM, dim=-1) if fused else rows[:, layer]
        for a, b in zip(expected, given):
            np.testing.assert_array_equal(torch.from_numpy(a).to(dtype).float(), b.float())
    chunk.tensor[1000] ^= 1
    with pytest.raises(ChecksumError):
        processor.deserializer.deserialize(chunk, found, "key")


def test_lmcache_refusals(lmcache: Any) -> None:
    with pytest.raises(UnsupportedError):
        lmcache["dquant"]({**SETTINGS, "mla": True})
    with pytest.raises(InputError, match="head_dim"):
        lmcache["dquant"]({"kv_heads": 2})
    # The latent plane of MLA looks like a fused cache of another width.
    with pytest.raises(InputError, match=r"\[1, layers, tokens, 128\]"):
        lmcache["dquant"](SETTINGS).estimate_serialized_size(Layout([torch.Size((1, 3, 96, 576))], [torch.bfloat16]))


class FakeStorage:
    def register_mem_pool_host(self, pool: Any) -> None:
        self.mem_pool_host = pool


@dataclass
class StorageConfig:
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    is_mla_model: bool = False
    should_split_heads: bool = False
    model_name: str = "maker/model"
    extra_config: dict[str, Any] = field(default_factory=dict)


class Pool:
    """The host pool of one layout, as far as storage backends use it."""

    shapes: ClassVar = {
        "layer_first": (2, LAYERS, TOKENS, HEADS, DIM),
        "page_first": (2, TOKENS, LAYERS, HEADS, DIM),
        "page_first_direct": (2, 1, LAYERS, TOKENS, HEADS, DIM),
        "page_head": (2, 1, HEADS, TOKENS, LAYERS, DIM),
    }
    #: Axes of a page in the order [kind, layer, token, head, value], once axes of length one are gone.
    orders: ClassVar = {"page_first": (0, 2, 1, 3, 4), "page_head": (0, 3, 2, 1, 4)}

    def __init__(self, layout: str, pages: int = 4, dtype: Any = torch.bfloat16) -> None:
        self.layout, self.dtype = layout, dtype
        self.layer_num, self.page_size, self.head_num, self.head_dim = LAYERS, TOKENS, HEADS, DIM
        generator = torch.Generator().manual_seed(0)
        self.data = torch.randn(pages, *self.shapes.get(layout, (1,)), generator=generator).to(dtype)

    def get_data_page(self, index: int, flat: bool = True) -> Any:
        page = self.data[index // TOKENS]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> Any:
        return torch.zeros_like(self.data[0]).flatten()

    def set_from_flat_data_page(self, index: int, page: Any) -> None:
        self.data[index // TOKENS] = page.reshape(self.data.shape[1:])

    def planes(self, index: int) -> Any:
        page = self.data[index].reshape([n for i, n in enumerate(self.data.shape[1:]) if i == 0 or n != 1])
        return page.permute(*self.orders.get(self.layout, (0, 1, 2, 3, 4)))


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
        monkeypatch.setitem(sys.modules, name, module(name, __path__=[]))
    fake = module("hicache_storage", HiCacheStorage=FakeStorage)
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.hicache_storage", fake)
    monkeypatch.delitem(sys.modules, "dquantcodec.integrations.sglang", raising=False)
    yield importlib.import_module("dquantcodec.integrations.sglang").DQuantStorage
    sys.modules.pop("dquantcodec.integrations.sglang", None)


def config(folder: Path, **changes: Any) -> StorageConfig:
    extra = {"backend_name": "dquant", "module_path": "x", "class_name": "y", "folder": str(folder)}
    return StorageConfig(extra_config=extra, **changes)


@pytest.mark.parametrize("layout", Pool.shapes)
def test_sglang_storage(storage: Any, tmp_path: Path, layout: str) -> None:
    pool = Pool(layout)
    backend = storage(config(tmp_path / "cache"), {})
    backend.register_mem_pool_host(pool)
    before = [pool.planes(page).clone() for page in range(4)]
    indices = torch.arange(4 * TOKENS)
    assert backend.batch_set_v1(["a", "b"], indices[: 2 * TOKENS]) == [True, True]
    assert backend.exists("a") and not backend.exists("c")
    pool.data[2:] = 0
    assert backend.batch_get_v1(["b", "missing"], indices[2 * TOKENS :]) == [True, False]
    codec = dq.Codec("2.26", HEADS, DIM)
    for layer in range(LAYERS):
        expected = codec.decode(codec.encode(*before[1][:, layer]))
        for a, b in zip(expected, pool.planes(2)[:, layer]):
            np.testing.assert_array_equal(torch.from_numpy(a).bfloat16().float(), b.float())
    assert not pool.data[3].any()
    page = pool.get_dummy_flat_data_page()
    assert backend.get("a", page) is page
    flat = backend.batch_get(["a", "c"], [pool.get_dummy_flat_data_page() for _ in range(2)])
    assert torch.equal(flat[0], page) and flat[1] is None


def test_sglang_misses_instead_of_wrong_numbers(storage: Any, tmp_path: Path) -> None:
    pool = Pool("page_first")
    backend = storage(config(tmp_path), {})
    backend.register_mem_pool_host(pool)
    assert backend.set("a", pool.get_data_page(0))
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    data[2000] ^= 4
    file.write_bytes(data)
    target = pool.get_dummy_flat_data_page()
    assert backend.get("a", target) is None and not target.any()
    # Another rank, dtype or model sees none of it.
    others = [
        (config(tmp_path, tp_rank=1, tp_size=2), pool),
        (config(tmp_path, model_name="other"), pool),
        (config(tmp_path), Pool("page_first", dtype=torch.float16)),
    ]
    for other, host in others:
        neighbour = storage(other, {})
        neighbour.register_mem_pool_host(host)
        assert not neighbour.exists("a")
    bad = pool.get_data_page(0).clone()
    bad[5] = torch.nan
    assert backend.set("nan", bad) is False
    assert sorted(path.name for path in tmp_path.iterdir()) == [file.name]
    backend.clear()
    assert not list(tmp_path.iterdir())


def test_sglang_refusals(storage: Any, tmp_path: Path) -> None:
    for change in ({"is_mla_model": True}, {"should_split_heads": True}):
        with pytest.raises(UnsupportedError):
            storage(config(tmp_path, **change), {})
    with pytest.raises(UnsupportedError, match="page_unified"):
        storage(config(tmp_path), {}).register_mem_pool_host(Pool("page_unified"))


class FakeTier:
    def __init__(self, spec: Any, view: memoryview, tier_type: str, detector: Any) -> None:
        self.block_size_bytes = view.strides[0]


@dataclass
class Result:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


@dataclass
class Job:
    job_id: int
    keys: list[bytes]
    chunk_ids: Any
    is_promotion: bool


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("vllm", "vllm.v1", "vllm.v1.kv_offload", "vllm.v1.kv_offload.tiering"):
        monkeypatch.setitem(sys.modules, name, module(name, __path__=[]))
    names = types.SimpleNamespace
    base = module(
        "base",
        LookupResult=names(HIT="hit", MISS="miss"),
        Medium=names(STORAGE="storage"),
        RequestOffloadingContext=dict,
    )
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_offload.base", base)
    tiering = module("base", JobResult=Result, SecondaryTierManager=FakeTier)
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_offload.tiering.base", tiering)
    monkeypatch.delitem(sys.modules, "dquantcodec.integrations.vllm", raising=False)
    yield importlib.import_module("dquantcodec.integrations.vllm").DQuantTier
    sys.modules.pop("dquantcodec.integrations.vllm", None)


def offloading(layout: str = "LBHNC", blocks: int = 3, tokens: int = 32, **parallel: int) -> Any:
    names = types.SimpleNamespace
    group = names(
        tokens_per_block=tokens,
        layer_names=tuple(f"model.layers.{n}.self_attn.attn" for n in range(LAYERS)),
        sliding_window_size_in_chunks=None,
    )
    sizes = {"tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, **parallel}
    return names(
        config=names(
            groups=(group,),
            worker_kv_bytes_per_block=LAYERS * tokens * HEADS * 2 * DIM * 2,
            model=names(name="maker/model", dtype="bfloat16"),
            cache=names(blocks_per_chunk=blocks),
            parallel=names(**sizes),
            canonical_layout=False,
            replicated_layout=False,
            kv_cache_layout=layout,
        )
    )


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_vllm_tier(tier: Any, tmp_path: Path, layout: str) -> None:
    spec = offloading(layout)
    # Rows are padded to whole pages of memory, as vLLM's are.
    primary = np.zeros((4, -(-LAYERS * 96 * HEADS * 2 * DIM * 2 // 4096) * 4096 + 4096), np.int8)
    shape = (LAYERS, 3, HEADS, 32, 2 * DIM) if layout == "LBHNC" else (LAYERS, 3, 32, HEADS, 2 * DIM)
    rows = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    size = rows[0].nbytes
    primary[:2, :size] = rows.reshape(2, -1).view(torch.int8).numpy()
    made = tier(spec, memoryview(primary), "DQuantTier", folder=str(tmp_path), kv_heads=HEADS, head_dim=DIM, workers=2)
    keys = [b"a" * 32 + bytes(4), b"b" * 32 + bytes(4)]
    assert made.lookup(keys[0], None) == "miss"
    made.submit_store(Job(1, keys, np.array([0, 1]), False))
    made.drain_jobs()
    while not (done := list(made.get_finished_jobs())):
        pass
    assert [(r.job_id, r.success) for r in done] == [(1, True)]
    assert made.lookup(keys[1], None) == "hit"
    damaged = next(path for path in tmp_path.rglob("*.dqkvchunk") if path.name.startswith(keys[0].hex()))
    data = bytearray(damaged.read_bytes())
    data[500] ^= 1
    damaged.write_bytes(data)
    made.submit_load(Job(2, keys, np.array([2, 3]), True))
    made.drain_jobs()
    while not (done := list(made.get_finished_jobs())):
        pass
    assert (done[0].success, done[0].successful_keys) == (False, [keys[1]])
    assert made.lookup(keys[0], None) == "miss"  # damaged chunks go
    assert not primary[2].any() and not primary[3, size:].any()
    blocks = rows[1].permute(0, 1, 3, 2, 4) if layout == "LBHNC" else rows[1]
    found = torch.from_numpy(primary[3, :size].copy()).view(torch.bfloat16).reshape(shape)
    found = (found.permute(0, 1, 3, 2, 4) if layout == "LBHNC" else found).reshape(LAYERS, 96, HEADS, 2 * DIM)
    codec = dq.Codec("2.26", HEADS, DIM)
    for layer in range(LAYERS):
        pair = blocks[layer].reshape(96, HEADS, 2 * DIM).split(DIM, dim=-1)
        for a, b in zip(codec.decode(codec.encode(*pair)), found[layer].split(DIM, dim=-1)):
            np.testing.assert_array_equal(torch.from_numpy(a).bfloat16().float(), b.float())
    made.shutdown()


def test_vllm_refusals(tier: Any, tmp_path: Path) -> None:
    primary = memoryview(np.zeros((2, 1 << 17), np.int8))
    for spec in (offloading(tp_size=2), offloading("BLHNC"), offloading(tokens=16, blocks=7)):
        if spec.config.parallel.tp_size == 1 and spec.config.kv_cache_layout in ("LBHNC", "LBNHC"):
            spec.config.worker_kv_bytes_per_block += 2
        with pytest.raises(UnsupportedError):
            tier(spec, primary, "DQuantTier", folder=str(tmp_path), kv_heads=HEADS, head_dim=DIM)


RECORD = json.loads((Path(__file__).parent / "engine_interfaces.json").read_text(encoding="utf-8"))


def interface(package: str, name: str) -> Any:
    found = [value for path, value in RECORD[package]["interfaces"].items() if path.endswith(f".{name}")]
    assert len(found) == 1
    return found[0]


def parameters(text: str) -> list[str]:
    """Names of the parameters in a recorded signature."""
    names = (part.split("=")[0].strip() for part in text.strip("()").split(","))
    return [name for name in names if name not in ("self", "/")]


def check(adapter: type, package: str, base: str) -> None:
    """Whatever the base lets be called can be called on ``adapter`` in the same way, and no abstract method is left."""
    recorded = interface(package, base)
    assert set(recorded["abstract"]) <= set(vars(adapter))
    for name, signature in recorded["methods"].items():
        if name == "__init__" or name not in vars(adapter):
            continue
        ours = inspect.signature(getattr(adapter, name)).parameters
        assert list(ours)[1 : 1 + len(parameters(signature))] == parameters(signature), name
        # The base's optional arguments may be left out here too; nothing else may be asked for.
        required = [p for p, value in ours.items() if value.default is value.empty and p != "self"]
        assert set(required) <= {p.split("=")[0].strip() for p in signature.strip("()").split(",")}, name


def test_the_adapters_follow_the_recorded_interfaces(lmcache: Any, storage: Any, tier: Any) -> None:
    ours = sys.modules["dquantcodec.integrations.lmcache"]
    check(ours.DQuantSerializer, "lmcache", "Serializer")
    check(ours.DQuantDeserializer, "lmcache", "Deserializer")
    check(storage, "sglang", "HiCacheStorage")
    check(tier, "vllm", "SecondaryTierManager")
    # What vLLM hands to the constructor beside the tier's own settings.
    given = parameters(interface("vllm", "SecondaryTierManager")["methods"]["__init__"])
    assert list(inspect.signature(tier).parameters)[:3] == given[:3]
    assert "backpressure_detector" in inspect.signature(tier).parameters


def test_the_fakes_follow_the_recorded_interfaces() -> None:
    stands_for = [
        (Layout, "lmcache", "MemoryLayoutDesc"),
        (StorageConfig, "sglang", "HiCacheStorageConfig"),
        (Result, "vllm", "JobResult"),
        (Job, "vllm", "TransferJob"),
    ]
    for fake, package, name in stands_for:
        assert {member.name for member in fields(fake)} <= set(interface(package, name)["fields"]), name
    processor = interface("lmcache", "AsyncSerdeProcessor")["methods"]
    for name in ("__init__", "estimate_serialized_size"):
        assert list(inspect.signature(getattr(FakeProcessor, name)).parameters)[1:] == parameters(processor[name])
    assert len(parameters(interface("lmcache", "register_serde_factory")["parameters"])) == 2
    given = parameters(interface("vllm", "SecondaryTierManager")["methods"]["__init__"])
    assert len(inspect.signature(FakeTier.__init__).parameters) - 1 == len(given)
    made = offloading().config
    for name, part in (
        ("OffloadingConfig", made),
        ("OffloadingGroupConfig", made.groups[0]),
        ("OffloadingModelConfig", made.model),
        ("OffloadingCacheConfig", made.cache),
        ("OffloadingParallelConfig", made.parallel),
    ):
        assert set(vars(part)) <= set(interface("vllm", name)["fields"]), name
    assert {"HIT", "MISS"} <= set(interface("vllm", "LookupResult")["members"])
    assert "STORAGE" in interface("vllm", "Medium")["members"]

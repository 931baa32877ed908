"""The adapters on the classes of LMCache, SGLang and vLLM themselves, where they are installed.

``.ci/run`` installs the first two with ``pip install --no-deps``.  No server runs, and no GPU is needed.
"""

# What is imported below needs torch, so it comes after the line that skips this file without it.
# ruff: noqa: E402

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import time
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import dquantcodec as dq

TOOLS = Path(__file__).parents[1] / "tools"
if not (TOOLS / "engine_interfaces.py").exists():
    pytest.skip("the tools are not part of this distribution", allow_module_level=True)
sys.path.insert(0, str(TOOLS))

import engine_interfaces

RECORD = json.loads((Path(__file__).parent / "engine_interfaces.json").read_text(encoding="utf-8"))
HEADS, DIM, LAYERS, TOKENS = 2, 32, 3, 96
STATES = torch.randn(2, LAYERS, TOKENS, HEADS, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()


def decoded() -> Any:
    """``[2, layers, tokens, H, D]`` float32: what coding :data:`STATES` leaves."""
    codec = dq.Codec("2.26", HEADS, DIM)
    pairs = [codec.decode(codec.encode(*STATES[:, layer])) for layer in range(LAYERS)]
    return torch.from_numpy(np.array(pairs)).transpose(0, 1).bfloat16().float()


#: What engines were found to lack: a package whose import has failed half-way cannot be asked again.
LACKS: dict[str, str] = {}


def engine(package: str, *modules: str) -> list[Any]:
    """Modules of an engine and our adapter to it; the test is skipped where they are not installed whole enough."""
    if package in LACKS or importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} lacks {LACKS[package]}" if package in LACKS else f"{package} is not installed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [importlib.import_module(name) for name in modules]
            return [*found, importlib.import_module(f"dquantcodec.integrations.{package}")]
    except ModuleNotFoundError as error:
        LACKS[package] = str(error.name)
        pytest.skip(f"{package} lacks {error.name}")


@pytest.mark.parametrize("package", engine_interfaces.NAMES)
def test_the_record_is_of_the_package(package: str) -> None:
    engine(package, *engine_interfaces.NAMES[package])
    try:
        number = version(package)
    except PackageNotFoundError:  # only its modules are on the path
        number = RECORD[package]["version"]
    if number != RECORD[package]["version"]:
        pytest.skip(f"{package} {number} is installed, {RECORD[package]['version']} recorded")
    assert engine_interfaces.record(package) == RECORD[package]["interfaces"]


@dataclass
class Memory:
    tensor: Any


def finished(query: Any, task: int) -> bool:
    while (result := query(task)) is None:
        time.sleep(0.001)
    return bool(result)


@pytest.mark.filterwarnings("ignore")
def test_lmcache_makes_and_runs_the_serde() -> None:
    api, base, factory, _ = engine(
        "lmcache",
        "lmcache.v1.distributed.api",
        "lmcache.v1.distributed.serde.base",
        "lmcache.v1.distributed.serde.factory",
    )
    settings = {"kv_heads": HEADS, "head_dim": DIM, "max_workers": 2}
    processor = factory.create_serde_processor(base.SerdeConfig("dquant", settings))
    try:
        source = STATES.reshape(2, LAYERS, TOKENS, HEADS * DIM)
        size = processor.estimate_serialized_size(api.MemoryLayoutDesc([source.shape], [source.dtype]))
        stored = Memory(torch.zeros(size, dtype=torch.uint8))
        task = processor.submit_serialize([Memory(source)], [stored], ["key"])
        assert finished(processor.query_serialize_result, task)
        found = Memory(torch.zeros_like(source))
        task = processor.submit_deserialize([stored], [found], ["key"])
        assert finished(processor.query_deserialize_result, task)
        assert torch.equal(found.tensor.reshape(STATES.shape).float(), decoded())
        stored.tensor[500] ^= 1
        untouched = Memory(torch.zeros_like(source))
        task = processor.submit_deserialize([stored], [untouched], ["key"])
        assert not finished(processor.query_deserialize_result, task) and not untouched.tensor.any()
    finally:
        processor.close()


@pytest.mark.filterwarnings("ignore")
def test_sglang_finds_and_makes_the_storage(tmp_path: Path) -> None:
    storage, backends, ours = engine(
        "sglang", "sglang.srt.mem_cache.hicache_storage", "sglang.srt.mem_cache.storage.backend_factory"
    )
    page = STATES.flatten()
    pool = SimpleNamespace(
        layout="layer_first", dtype=torch.bfloat16, layer_num=LAYERS, page_size=TOKENS, head_num=HEADS, head_dim=DIM
    )
    config = storage.HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=False, model_name="maker/model",
        extra_config={
            "backend_name": "dquant", "module_path": ours.__name__, "class_name": "DQuantStorage",
            "folder": str(tmp_path),
        },
    )  # fmt: skip
    backend = backends.StorageBackendFactory.create_backend("dynamic", config, pool)
    assert isinstance(backend, ours.DQuantStorage)
    backend.register_mem_pool_host(pool)
    assert backend.set("a", page) and backend.exists("a")
    assert backend.batch_exists(["a", "b"]) == 1  # SGLang's own method on top of ours
    target = torch.zeros_like(page)
    assert backend.get("a", target) is target
    assert torch.equal(target.reshape(STATES.shape).float(), decoded())


@pytest.mark.filterwarnings("ignore")
def test_vllm_makes_and_runs_the_tier(tmp_path: Path) -> None:
    base, configs, tiering, ours = engine(
        "vllm", "vllm.v1.kv_offload.base", "vllm.v1.kv_offload.config", "vllm.v1.kv_offload.tiering.base"
    )
    sizes = dict.fromkeys(("tp_size", "pp_size", "pcp_size", "dcp_size", "world_size", "data_parallel_size"), 1)
    block, bytes_per_value = TOKENS // 3, 2
    config = configs.OffloadingConfig(
        groups=(configs.OffloadingGroupConfig(block, tuple(f"model.layers.{n}.attn" for n in range(LAYERS)), 0),),
        worker_kv_bytes_per_block=LAYERS * block * HEADS * 2 * DIM * bytes_per_value,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="engine",
        model=configs.OffloadingModelConfig("maker/model", "bfloat16"),
        cache=configs.OffloadingCacheConfig(block, 3),
        parallel=configs.OffloadingParallelConfig(
            rank=0, data_parallel_index=0, data_parallel_rank_local=None, is_parallelism_agnostic=False, **sizes
        ),
        kv_cache_layout="LBNHC",
    )
    row = torch.cat(list(STATES), dim=-1).reshape(-1)  # [layers, tokens, H, 2 * D], three blocks of a layer in a row
    primary = np.zeros((2, row.nbytes), np.int8)
    primary[0] = row.view(torch.int8).numpy()
    tier = ours.DQuantTier(
        SimpleNamespace(config=config), memoryview(primary), "DQuantTier", folder=str(tmp_path), kv_heads=HEADS,
        head_dim=DIM,
    )  # fmt: skip
    key = b"a" * 36
    for promotion, chunk in ((False, 0), (True, 1)):
        job = tiering.TransferJob(chunk, [key], np.array([chunk]), promotion, None)
        (tier.submit_load if promotion else tier.submit_store)(job)
        tier.drain_jobs()
        done: list[Any] = []
        while not done:
            done = list(tier.get_finished_jobs())
        assert isinstance(done[0], tiering.JobResult) and done[0].success
    assert tier.lookup(key, None) is base.LookupResult.HIT
    tier.shutdown()
    found = torch.from_numpy(primary[1]).view(torch.bfloat16).reshape(LAYERS, TOKENS, HEADS, 2, DIM)
    assert torch.equal(found.permute(3, 0, 1, 2, 4).float(), decoded())

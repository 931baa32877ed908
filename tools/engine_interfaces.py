"""Records the interfaces of LMCache, SGLang and vLLM that the adapters follow, out of the packages themselves.

    python tools/engine_interfaces.py lmcache sglang vllm [--json tests/engine_interfaces.json]

The packages need not be whole: their interfaces can be imported with the few dependencies of ``.ci/engines.txt`` after
``pip install --no-deps``.  Of every class the parameters of its methods are recorded, which of them are abstract, the
fields of dataclasses and the members of enumerations; annotations and values of defaults are not.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import inspect
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

RECORD = Path(__file__).resolve().parents[1] / "tests" / "engine_interfaces.json"

#: What the adapters subclass, call or are handed, by package and module.
NAMES = {
    "lmcache": {
        "lmcache.v1.distributed.api": ("MemoryLayoutDesc",),
        "lmcache.v1.distributed.serde.async_processor": ("AsyncSerdeProcessor",),
        "lmcache.v1.distributed.serde.base": ("Deserializer", "SerdeConfig", "Serializer"),
        "lmcache.v1.distributed.serde.factory": ("create_serde_processor", "register_serde_factory"),
    },
    "sglang": {
        "sglang.srt.mem_cache.hicache_storage": ("HiCacheStorage", "HiCacheStorageConfig"),
        "sglang.srt.mem_cache.storage.backend_factory": ("StorageBackendFactory",),
    },
    "vllm": {
        "vllm.v1.kv_offload.base": ("LookupResult", "Medium", "RequestOffloadingContext"),
        "vllm.v1.kv_offload.config": (
            "OffloadingCacheConfig", "OffloadingConfig", "OffloadingGroupConfig", "OffloadingModelConfig",
            "OffloadingParallelConfig",
        ),
        "vllm.v1.kv_offload.tiering.base": ("JobResult", "SecondaryTierManager", "TransferJob"),
    },
}  # fmt: skip


def parameters(function: Any) -> str:
    """The parameters of a function without annotations, ``...`` for every default."""
    signature = inspect.signature(function)
    plain = [
        p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else ...)
        for p in signature.parameters.values()
    ]
    text = signature.replace(parameters=plain, return_annotation=signature.empty)
    return str(text).replace("Ellipsis", "...")


def described(thing: Any) -> dict[str, Any]:
    """One class or function as JSON values."""
    if not inspect.isclass(thing):
        return {"parameters": parameters(thing)}
    if issubclass(thing, enum.Enum):
        return {"members": list(thing.__members__)}
    if dataclasses.is_dataclass(thing):
        return {
            "fields": {
                field.name: field.default is field.default_factory is dataclasses.MISSING  # whether it must be given
                for field in dataclasses.fields(thing)
            }
        }
    methods = {
        name: parameters(member)
        for name, member in inspect.getmembers(thing, callable)
        if name == "__init__" or not name.startswith("_")
    }
    return {"abstract": sorted(getattr(thing, "__abstractmethods__", ())), "methods": methods}


def record(package: str) -> dict[str, Any]:
    """The interfaces of an importable package."""
    return {
        f"{module}.{name}": described(getattr(importlib.import_module(module), name))
        for module, names in NAMES[package].items()
        for name in names
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="+", choices=NAMES)
    parser.add_argument("--version", help="of the one package, if it is not installed but only on the path")
    parser.add_argument("--json", type=Path, default=RECORD)
    arguments = parser.parse_args()
    found = json.loads(arguments.json.read_text(encoding="utf-8")) if arguments.json.exists() else {}
    for package in arguments.packages:
        number = arguments.version or version(package)
        found[package] = {"version": number, "interfaces": record(package)}
    arguments.json.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

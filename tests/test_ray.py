"""Ray Data over files, on a cluster of this machine; where ``ray`` is installed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import dquantcodec
from dquantcodec.batch import Compress, Settings
from dquantcodec.integrations.ray import compress_files, decompress_files, on_batch

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")


@pytest.mark.filterwarnings("ignore")
def test_files_over_a_cluster(tmp_path: Path) -> None:
    """One failed file is a row, is tried anew by the next run, and finished ones are then passed over."""
    rows = np.random.default_rng(7).standard_normal((1, 2, 200, 64)).astype(np.float16)
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        save_file({"key_0": rows, "value_0": rows}, tmp_path / "in" / f"{name}.safetensors")
    (tmp_path / "in" / "bad.safetensors").write_bytes(b"no tensors")
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(dquantcodec.__file__).parent.parent), **_caches()}},
    )
    try:
        paths, out = [str(tmp_path / "in")], str(tmp_path / "out")

        def states(**options: object) -> dict[str, tuple[str, str]]:
            found = compress_files(paths, out, exact_layers={0}, concurrency=2, **options).take_all()  # type: ignore[arg-type]
            return {Path(row["input"]).name[0:3].rstrip("."): (row["state"], row["code"]) for row in found}

        done, skipped = ("done", ""), ("skipped", "")
        assert states() == {"a.s": done, "b.s": done, "bad": ("failed", "input-damaged")}
        save_file({"key_0": rows, "value_0": rows}, tmp_path / "in" / "bad.safetensors")
        assert states() == {"a.s": skipped, "b.s": skipped, "bad": done}
        back = decompress_files([f"{out}/a.dqkv"], str(tmp_path / "back")).take_all()
        assert [row["state"] for row in back] == ["done"]
        columns = {"input": [f"{paths[0]}/a.safetensors"], "output": [f"{out}/a.dqkv"]}
        batches = ray.data.from_items([{"input": columns["input"][0], "output": columns["output"][0]}])
        work = Compress(Settings(exact_layers={0}))
        assert batches.map_batches(on_batch(work)).take_all()[0]["state"] == "skipped"
    finally:
        ray.shutdown()


def _caches() -> dict[str, str]:
    return {name: os.environ[name] for name in ("DQUANTCODEC_CACHE_DIR",) if name in os.environ}

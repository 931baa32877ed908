"""``dqkv bench``: what its lines say, and the way through a GPU with the CPU in its place."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from answer_support import check
from numpy.typing import NDArray

from dquantcodec.arrays import BFLOAT16
from dquantcodec.bench import suite
from dquantcodec.bench.work import Work
from dquantcodec.cli.answers import ANSWERS
from dquantcodec.cli.bench import LEGEND, table
from dquantcodec.cli.main import main
from dquantcodec.codec import Codec, Pages
from dquantcodec.errors import DeviceError, UnsupportedError
from dquantcodec.plan import Plan

GPU = ["bench", "--device", "cuda", "--quick", "--kv-heads", "2", "--head-dim", "64", "--tokens", "256"]


def test_lines_are_beside_the_copy_before_them() -> None:
    lines = suite._Lines("cpu", 2)
    copy = lines.line("memory", "copy", Work("", int, 100, 200), [8e9, 1e10, 2e10])
    assert (copy.ratio_to_copy, copy.bf16_bytes_per_s, copy.stored_bytes_per_s) == (1, 2e10, None)
    read = lines.line("file", "read", Work("", int, 100, 25), [1e10, 2e10, 3e10], 2.0)
    assert (read.values_per_s_least, read.values_per_s, read.values_per_s_most) == (1e10, 2e10, 3e10)
    assert (read.ratio_to_copy, read.stored_bytes_per_s) == (2, 5e9)
    text = table([copy, read])
    assert "2 threads\n" in text and "2 threads, files" in text
    assert text.splitlines()[-1].split() == ["read", "20000", "10000-30000", "40", "2x"]
    assert all(len(line) <= 80 for line in (*text.splitlines(), *LEGEND.splitlines()))


def test_every_thread_has_pages_to_work_on() -> None:
    many = suite.Settings("2.26", threads=64)
    assert many.tokens_for(1) == 2048 and many.tokens_for(64) >= 64 * 128
    assert suite.Settings("2.26", tokens=7, threads=64).tokens_for(64) == 7
    assert many.fitted and not suite.Settings("paper-2.26").fitted


class Event:
    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass


class Device:
    id, mem_info = 0, (1 << 33, 1 << 33)


RUNTIME = SimpleNamespace(
    getDeviceProperties=lambda _: {"name": b"a device", "multiProcessorCount": 3}, driverGetVersion=lambda: 13000
)


class HostCupy:
    """As much of CuPy as is needed, on the host."""

    cuda = SimpleNamespace(
        Event=Event, Device=Device, runtime=RUNTIME, get_elapsed_time=lambda a, b: 1000 * (b.at - a.at) + 1e-6
    )
    asnumpy = staticmethod(np.asarray)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


class HostCodec:
    """A codec on the device that is the CPU's; ``spoiled`` bytes are wrong."""

    spoiled = 0

    def __init__(self, plan: Plan) -> None:
        self.plan, self._codec = plan, Codec(plan)
        self.layout = self._codec.layout

    def encode(self, keys: Any, values: Any, *, pages: NDArray[Any], status: NDArray[Any]) -> None:
        pages[:] = self._codec.encode(keys, values).data
        pages[: self.spoiled, -100] ^= 1
        status[:] = 0

    def decode_kind(self, pages: Pages, kind: str, *, out: NDArray[Any], status: NDArray[Any]) -> None:
        out[:] = self._codec.decode_kind(pages, kind, dtype=BFLOAT16)
        status[:] = 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    module = HostCupy()
    monkeypatch.setattr("dquantcodec.cuda.device.cupy", lambda: module)
    monkeypatch.setattr("dquantcodec.bench.device.cupy", lambda: module)
    monkeypatch.setattr("dquantcodec.cuda.device.device", lambda _: None)
    monkeypatch.setattr("dquantcodec.bench.device.Codec", HostCodec)
    monkeypatch.setattr("dquantcodec.bench.device.RUNS", 1)
    monkeypatch.setattr("dquantcodec.bench.suite._DEVICE_VALUES", 1 << 12)


class Attention:
    def __init__(self, plan: Plan, batch: int, query_heads: int, *, most_tokens: int) -> None:
        if plan.head_dim % 32:
            raise UnsupportedError("not this one", code="attend-dim")
        self.shape = (batch, 1, query_heads, plan.head_dim)

    def __call__(self, query: NDArray[Any], pages: Any, table: NDArray[Any], lengths: NDArray[Any]) -> None:
        assert query.shape == self.shape and sorted(table.reshape(-1)) == list(range(len(pages)))
        assert (lengths == 128 * table.shape[1]).all()


@pytest.mark.usefixtures("gpu")
def test_a_gpu_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("dquantcodec.cuda.attend.PageAttention", Attention)
    assert main([*GPU, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    check(answer, ANSWERS["bench"])
    assert answer["gpu"]["device"] == "a device"
    names = [row["name"] for row in answer["rows"]]
    assert names == [
        "device copy of BF16 values", "encode keys and values", "decode keys", "decode values",
        "attend, 4 queries a KV head",
    ]  # fmt: skip
    assert all(row["device"] == "cuda" and row["threads"] is None for row in answer["rows"])
    assert answer["rows"][1]["values_per_s_least"] <= answer["rows"][1]["values_per_s"]
    assert main(GPU) == 0
    assert "GPU\n  device copy" in capsys.readouterr().out


@pytest.mark.usefixtures("gpu")
def test_wrong_bytes_of_a_gpu_are_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(HostCodec, "spoiled", 1)
    assert main(GPU) == 1
    assert "[device-bytes]" in capsys.readouterr().err


def test_a_gpu_that_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> None:
        raise DeviceError("no GPU here", code="device-none")

    monkeypatch.setattr("dquantcodec.cuda.device.cupy", missing)
    monkeypatch.setattr("dquantcodec.cli.bench._prepare", lambda *_: None)
    monkeypatch.setattr(suite, "measure_cpu", lambda _: iter([suite.Measured("cpu", 1, "codec", "x", 1, 1, 1, 1, 2.0)]))
    assert main(GPU) == 1
    assert "no GPU here [device-none]" in capsys.readouterr().err
    assert main(["bench"]) == 0
    assert "not measured: no GPU here" in capsys.readouterr().out

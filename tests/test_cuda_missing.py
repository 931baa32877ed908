"""Without CuPy, NVRTC or a GPU everything imports, and using it says in one line what is missing."""

from __future__ import annotations

import importlib
import sys

import pytest

import dquantcodec
from dquantcodec.cuda import device
from dquantcodec.errors import DeviceError


@pytest.fixture(autouse=True)
def fresh_device() -> None:
    device.cupy.cache_clear()


def test_everything_imports() -> None:
    for name in ("arrays", "cache", "codec", "device", "encoder", "launches", "nvrtc", "params", "sources", "tables"):
        importlib.import_module(f"dquantcodec.cuda.{name}")
    from dquantcodec.cuda import Cache, Codec

    assert (Cache.__module__, Codec.__module__) == ("dquantcodec.cuda.cache", "dquantcodec.cuda.codec")


def test_a_codec_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match="CuPy") as failed:
        dquantcodec.Codec("2.26", 8, 128, device="cuda")
    assert failed.value.code == "device-cupy" and "\n" not in str(failed.value)


def test_a_codec_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        @staticmethod
        def getDeviceCount() -> int:  # noqa: N802 (CuPy's name)
            return 0

    class Module:
        class cuda:
            runtime = Runtime

    monkeypatch.setitem(sys.modules, "cupy", Module)
    with pytest.raises(DeviceError) as failed:
        dquantcodec.Codec("2.26", 8, 128, device="cuda")
    assert failed.value.code == "device-none" and "\n" not in str(failed.value)


def test_an_unknown_device() -> None:
    for name in ("cuda:x", "tpu", "cuda:-1"):
        with pytest.raises(DeviceError) as failed:
            dquantcodec.Codec("2.26", 8, 128, device=name)
        assert failed.value.code == "device-name"


def test_the_cpu_by_name() -> None:
    assert type(dquantcodec.Codec("2.26", 2, 64, device="cpu")) is dquantcodec.Codec

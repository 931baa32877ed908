"""Without CuPy, NVRTC or a GPU everything imports, and using it says in one line what is missing."""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext

import pytest

import dquantcodec
from dquantcodec.cuda import device
from dquantcodec.cuda.launches import Launch
from dquantcodec.errors import DeviceError


@pytest.fixture(autouse=True)
def fresh_device() -> None:
    device.cupy.cache_clear()


def test_everything_imports() -> None:
    names = "arrays cache codec device encoder hosted launches nvrtc params sources tables"
    for name in names.split():
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


def test_plans_that_share_machine_code_never_ask_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver keeps one number a function: the larger launch must still fit after the smaller one is loaded."""

    class Function:
        max_dynamic_shared_size_bytes = 0

    class Module:
        function = Function()

        @staticmethod
        def RawModule(path: str) -> type[Module]:  # noqa: N802 (CuPy's name)
            return Module

        @classmethod
        def get_function(cls, name: str) -> Function:
            return cls.function

    monkeypatch.setattr(device, "cupy", lambda: Module)
    monkeypatch.setattr(device.nvrtc, "cached_kernel", lambda *_: "one.cubin")
    monkeypatch.setattr(device.Device, "current", nullcontext())
    on = device.Device(0, "sm_90", 132, 233472)
    for size in (60000, 200000, 100000):
        device.Kernel(Launch("decode", (), 8, size, 1), on, "f")
    assert Module.function.max_dynamic_shared_size_bytes == 200000

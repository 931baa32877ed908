"""What ``dqkv bench`` measures: copies first, then everything beside them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..codec import Codec
from ..profile import TILE, Profile
from . import codec, coders
from .timing import measure, pinned
from .work import Work

if TYPE_CHECKING:
    from ..plan import Plan
    from .files import Coded

#: Works of the codec that are left out: decoding to FP16 costs what decoding to BF16 does.
_LEFT_OUT = ("decode to FP16",)
#: Tokens for every thread, so that all of them have whole pages to work on.
_TOKENS_A_THREAD = 512
#: Seconds that the runs of one work should take at most.
_SECONDS = 1.5
#: Layers of the file.
_LAYERS = 8
#: Values of keys and of values that go to the GPU at once, and how often: several times the second-level cache.
_DEVICE_VALUES, _DEVICE_PARTS = 1 << 26, 4
#: Bytes of device memory that a value of one part takes while tokens are made, all parts counted.
_DEVICE_BYTES = 24
_FITTED_TOKENS = 1024


@dataclass(frozen=True)
class Settings:
    """``tokens`` None: as many as give all ``threads`` work."""

    profile: str
    kv_heads: int = 8
    head_dim: int = 128
    tokens: int | None = None
    threads: int = 1
    quick: bool = False

    @property
    def fitted(self) -> bool:
        """Whether plans have variance classes, as files make them."""
        return Profile.named(self.profile).key.classes is not None

    def tokens_for(self, threads: int) -> int:
        return self.tokens or max(512 if self.quick else 2048, _TOKENS_A_THREAD * threads)

    @property
    def copied_values(self) -> int:
        """More than the caches of a processor hold."""
        return 1 << (24 if self.quick else 26)

    @property
    def repeats(self) -> int:
        return 3 if self.quick else 9

    @property
    def least_seconds(self) -> float:
        return 0.02 if self.quick else 0.05


@dataclass(frozen=True)
class Measured:
    """One line: values a second, of the median run and of the slowest and the fastest.

    ``ratio_to_copy`` is the rate beside that of copying BF16 values on the same device and number of threads;
    ``stored_bytes_per_s`` that of the bytes that stand for the values, where the work handles bytes.
    """

    device: str
    threads: int | None
    section: str
    name: str
    values_per_s: float
    values_per_s_least: float
    values_per_s_most: float
    ratio_to_copy: float
    bits_per_value: float | None = None
    stored_bytes_per_s: float | None = None
    note: str = ""

    @property
    def bf16_bytes_per_s(self) -> float:
        return 2 * self.values_per_s


class _Lines:
    """Makes lines of measured rates; the first one is the copy that the others are compared with."""

    def __init__(self, device: str, threads: int | None) -> None:
        self._device, self._threads = device, threads
        self._copied = 0.0

    def line(self, section: str, name: str, work: Work, rates: list[float], bits: float | None = None) -> Measured:
        """``rates``: values a second of every run, sorted."""
        median = rates[len(rates) // 2]
        self._copied = self._copied or median
        stored = work.nbytes and section == "file"
        return Measured(
            self._device, self._threads, section, name, median, rates[0], rates[-1], median / self._copied, bits,
            median * work.nbytes / work.values if stored else None, work.note,
        )  # fmt: skip


def steps(settings: Settings, cpu: bool, gpu: bool) -> int:
    """How many lines there will be."""
    return cpu * (12 + 6 * (settings.threads > 1)) + 5 * gpu


def measure_cpu(settings: Settings) -> Iterator[Measured]:
    """One thread pinned to one core, files among its works, then all threads."""
    from .files import memory_folder

    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        coded = _coded_file(settings, Path(folder))
        with pinned():
            yield from _one_thread(settings, coded)
    if settings.threads > 1:
        yield from _all_threads(settings)


def _rates(settings: Settings, work: Work) -> list[float]:
    began = perf_counter()
    work.run()
    # Slow work is timed a few times only, so that all of it takes about as long on any machine.
    repeats = max(3, min(settings.repeats, int(_SECONDS / (perf_counter() - began))))
    return measure(work.run, work.values, repeats, settings.least_seconds)


def _codec_lines(settings: Settings, lines: _Lines, threads: int) -> Iterator[Measured]:
    copy = codec.copy_work(settings.copied_values, threads)
    yield lines.line("memory", "memcpy of BF16 values", copy, _rates(settings, copy))
    plan, keys, values = codec.plan_for(
        settings.profile, settings.kv_heads, settings.head_dim, settings.tokens_for(threads), settings.fitted
    )
    bits, works = codec.codec_works(Codec(plan, threads=threads), keys, values)
    for work in works:
        if work.name not in _LEFT_OUT:
            yield lines.line("codec", work.name, work, _rates(settings, work), bits)


def _tiles(tokens: int) -> int:
    """As many tokens in whole tiles, which coders take."""
    return -(-tokens // TILE) * TILE


def _coder_plans() -> dict[str, Callable[[], Plan]]:
    return {"prefix": coders.prefix_plan, "rans": coders.rans_plan}


def _one_thread(settings: Settings, coded: Coded) -> Iterator[Measured]:
    from .files import RUNS, file_works

    lines = _Lines("cpu", 1)
    yield from _codec_lines(settings, lines, 1)
    symbols = coders.key_symbols(_tiles(settings.tokens_for(1)))
    for name, plan in _coder_plans().items():
        bits = 8 * plan().key.container / plan().values
        for work in coders.coder_works(symbols, plan()):
            yield lines.line("coder", f"{name}: {work.name}", work, _rates(settings, work), bits)
    bits = 8 * coded.content.nbytes / coded.values
    for work in file_works(coded, 2 if settings.quick else RUNS):
        if work.nbytes:
            yield lines.line("file", work.name, work, _rates(settings, work), bits)


def _coded_file(settings: Settings, folder: Path) -> Coded:
    """One layer is coded; all have its pages."""
    from ..file import Layer
    from .files import Coded

    layer = Layer(settings.kv_heads, settings.head_dim, "float16", settings.profile)
    # The first token is kept exact, and a file has pages to write.
    tokens = max(settings.tokens_for(1), codec.LEAST_FITTED)
    keys, values = codec.normal_tokens(tokens, settings.kv_heads, settings.head_dim, settings.fitted)
    coded = Coded.of(folder / "cache.dqkv", [layer], [keys], [values], threads=settings.threads)
    return coded.repeated(_LAYERS)


def _all_threads(settings: Settings) -> Iterator[Measured]:
    threads = settings.threads
    lines = _Lines("cpu", threads)
    yield from _codec_lines(settings, lines, threads)
    symbols = coders.key_symbols(_tiles(settings.tokens_for(threads)))
    with ThreadPoolExecutor(threads) as pool:
        for name, plan in _coder_plans().items():
            work = coders.threaded_decode(symbols, plan(), pool, threads)
            yield lines.line("coder", f"{name}: {work.name}", work, _rates(settings, work))


def measure_gpu(settings: Settings) -> Iterator[Measured]:
    """The current device.  Raises :class:`DeviceError` where there is none to use."""
    from ..errors import UnsupportedError
    from . import device

    plan, tokens = _device_plan(settings)
    lines = _Lines("cuda", None)
    runs = 5 if settings.quick else device.RUNS

    def line(section: str, work: Work, bits: float | None = None) -> Measured:
        times = device.device_times(work.run, runs)
        rates = [work.values / (ms / 1000) for ms in reversed(times)]
        return lines.line(section, work.name, work, rates, bits)

    yield line("memory", device.copy_on_device(_DEVICE_VALUES))
    coded = device.DeviceCodec(plan, tokens, 1 if settings.quick else _DEVICE_PARTS)
    bits = 8 * coded.codec.layout.page_bytes / (2 * plan.values * plan.window)
    for work in coded.works():
        yield line("codec", work, bits)
    try:
        sequences = max(1, coded.pages.tokens // 8192)
        yield line("codec", coded.attention(sequences, codec.GROUP * plan.kv_heads), bits)
    except UnsupportedError:
        return  # the fused kernel does not take every geometry


def _device_plan(settings: Settings) -> tuple[Plan, int]:
    """The plan, and tokens of a part that fit in half of the memory that is free."""
    from ..cuda.device import cupy, device
    from ..fit import fit_plan
    from ..plan import make_plan
    from .device import device_tokens

    module: Any = cupy()
    device(module.cuda.Device().id)  # is it new enough?
    heads, dim = settings.kv_heads, settings.head_dim
    profile = Profile.named(settings.profile)
    values = _DEVICE_VALUES >> (2 if settings.quick else 0)
    free, _ = module.cuda.Device().mem_info
    while values > 1 << 20 and values * _DEVICE_BYTES > free // 2:
        values //= 2
    tokens = settings.tokens or values // (heads * dim)
    tokens = max(1, tokens // profile.window) * profile.window
    if not settings.fitted:
        return make_plan(profile, heads, dim), tokens
    sample = device_tokens(max(tokens, _FITTED_TOKENS), heads, dim)[:, :_FITTED_TOKENS]
    keys, values_of = (module.asnumpy(part) for part in sample)
    return fit_plan(profile, keys, values_of), tokens

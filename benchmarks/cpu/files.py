"""The file layer: pages in and out of files in page cache, with checksums; and the command end to end.

Everything but the command runs on tmpfs and on the file system of temporary files, each beside plain writes and reads
of as many bytes there, so that what the kernel costs can be told from what the library does.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

import dquantcodec as dq
from dquantcodec.bench.files import MEMORY, Coded, file_works
from dquantcodec.bench.timing import Row, row
from dquantcodec.file import compose

LAYERS, HEADS, DIM, TOKENS = 16, 8, 128, 2048
#: Layers that the command compresses, so many that the start of Python weighs little.
COMMAND_LAYERS = 8
#: Tokens appended and flushed one by one.
FLUSHES = 64

Arrays = list[NDArray[np.float16]]


def tensors() -> tuple[Arrays, Arrays]:
    """Keys and values of all layers."""
    rng = np.random.default_rng(0)
    shape = (TOKENS, HEADS, DIM)
    keys, values = (
        [rng.standard_normal(shape, dtype=np.float32).astype(np.float16) for _ in range(LAYERS)] for _ in range(2)
    )
    return keys, values


def file_system(folder: Path) -> str:
    """The type of the file system of ``folder``, where the system tells."""
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return "unknown"
    real, found = str(folder.resolve()), ("", "unknown")
    for line in mounts.read_text(encoding="utf-8").splitlines():
        _, point, kind, *_ = line.split()
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(found[0]):
            found = (point, kind)
    return found[1]


def places() -> list[Path]:
    """Where files are timed: tmpfs, and the place of temporary files if that is another kind of file system."""
    usual = Path(tempfile.gettempdir())
    if not MEMORY.is_dir():
        return [usual]
    return [MEMORY] if file_system(MEMORY) == file_system(usual) else [MEMORY, usual]


def rows() -> Iterator[Row]:
    """Rates of the file layer, one thread."""
    keys, values = tensors()
    with tempfile.TemporaryDirectory(dir=places()[0]) as folder:
        layers = [dq.Layer(kv_heads=HEADS, head_dim=DIM, dtype="float16")] * LAYERS
        coded = Coded.of(Path(folder) / "cache.dqkv", layers, keys, values)
    work = coded.checksum_work()
    yield row("file", work.name, work.run, work.nbytes / 1e9, "GB/s", repeats=5)
    for place in places():
        with tempfile.TemporaryDirectory(dir=place) as folder:
            section = f"file on {file_system(place)}"
            for work in file_works(coded, Path(folder)):
                amount, unit, repeats = (work.nbytes / 1e9, "GB/s", 7) if work.nbytes else (1, "files/s", 9)
                yield row(
                    section, work.name, work.run, amount, unit, note=work.note, what=work.what, of=work.of,
                    after=work.after, repeats=repeats,
                )  # fmt: skip
            yield from _append_rows(coded, keys, values, Path(folder), section)


def _append_rows(given: Coded, keys: Arrays, values: Arrays, folder: Path, section: str) -> Iterator[Row]:
    copy = folder / "copy.dqkv"
    window, coded = given.header.window, given.tokens

    def write_by_window() -> None:
        dq.create(copy, given.layers, recent=0, sinks=0).close()
        with dq.append(copy) as out:
            for number in range(coded // window):
                one = [[parts[0][number : number + 1]] for parts in given.pages]
                compose.write_pages(out._log, out._run, 0, number * window, window, one)

    def flush_tokens() -> None:
        dq.create(copy, given.layers, recent=TOKENS, sinks=0).close()
        with dq.append(copy) as out:
            for token in range(FLUSHES):
                out.append(*([array[token : token + 1] for array in arrays] for arrays in (keys, values)))
                out.flush()

    yield row(
        section, "append pages, a record and a sync for each window", write_by_window,
        coded // window / -(-coded // window) * given.data.nbytes / 1e9, "GB/s", repeats=5, after=copy.unlink,
    )  # fmt: skip
    yield row(
        section, f"append and flush single tokens of {LAYERS} layers", flush_tokens, FLUSHES, "tokens/s", repeats=5,
        after=copy.unlink, note="exact rows, compressed; a sync each",
    )  # fmt: skip


def command_rows(all_threads: int) -> Iterator[Row]:
    """The commands as processes, start of Python and fitting of plans included."""
    with tempfile.TemporaryDirectory(dir=places()[0]) as name:
        folder = Path(name)
        path, source, back = (folder / name for name in ("cache.dqkv", "cache.safetensors", "back.safetensors"))
        rng = np.random.default_rng(0)
        tensors = {
            f"layers.{i}.{kind}": rng.standard_normal((1, HEADS, TOKENS, DIM), dtype=np.float32).astype(np.float16)
            for i in range(COMMAND_LAYERS)
            for kind in ("key", "value")
        }
        save_file(tensors, source)
        millions = sum(tensor.size for tensor in tensors.values()) / 1e6
        note = f"start of Python included, {millions:.0f} million values"

        def command(*arguments: object) -> None:
            subprocess.run([sys.executable, "-m", "dquantcodec", *map(str, arguments)], check=True, capture_output=True)

        for threads in sorted({1, all_threads}):
            for name, arguments in (
                ("compress", ("compress", source, path)),
                ("decompress", ("decompress", path, back)),
            ):
                yield row(
                    "command", f"dqkv {name}, whole process",
                    lambda a=arguments, t=threads: command(*a, "--threads", t),
                    millions, "M values/s", threads, repeats=3, least_seconds=0, note=note,
                )  # fmt: skip

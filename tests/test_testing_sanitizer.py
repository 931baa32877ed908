"""The device's container readers under AddressSanitizer and UndefinedBehaviorSanitizer, on the corpus of containers."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gpu_support as gpu
import numpy as np
import pytest

from dquantcodec.cuda import launches, sources, tables
from dquantcodec.plan import Plan, make_plan
from dquantcodec.status import REASONS
from dquantcodec.testing import ContainerPlan, library_decode, plain_encode
from dquantcodec.testing.fuzz import corpus_of
from dquantcodec.testing.plans import SMALL

CORPUS = Path(__file__).parent / "corpus" / "container"
SANITIZE = ("-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def single(plan: Plan, kind: str) -> ContainerPlan:
    """The plan of one of a kind's containers."""
    stream = getattr(plan, kind)
    return ContainerPlan(
        stream.coder, stream.levels, stream.letter, stream.precision, tuple(stream.frequencies.tolist()),
        plan.kv_heads // stream.substreams, plan.head_dim, stream.words,
    )  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="sanitizers of g++ on Linux")
@pytest.mark.parametrize("kind", ["key", "value"])
def test_device_readers_decode_any_container_within_bounds(kind: str, tmp_path: Path) -> None:
    plan = make_plan(SMALL, 8, 20)
    # Small containers, which many bytes overrun.
    plan = replace(plan, key=replace(plan.key, words=4), value=replace(plan.value, words=8))
    one, stream = single(plan, kind), getattr(plan, kind)
    program = tmp_path / "containers"
    command = [
        gpu.needs_compiler(), *SANITIZE, *launches.definitions(plan, kind), "-DDQ_ELEMENT=0",
        f"-I{sources.root() / 'include'}", f"-I{gpu.HOST}", str(gpu.HOST / "containers.cpp"), "-o", str(program),
    ]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    rng = np.random.default_rng(0)
    any_bytes = [data[1:][: one.bytes].ljust(one.bytes, b"\0") for data in corpus_of("container", CORPUS)]
    any_bytes += [rng.integers(0, 256, one.bytes, np.uint8).tobytes() for _ in range(500)]
    for _ in range(200):
        # Mostly the cheapest letters, so that containers hold them.
        row = np.where(rng.random(one.values) < 0.1, rng.integers(0, one.levels, one.values), one.levels // 2)
        data = plain_encode(one, row.tolist())
        any_bytes += [data] if data is not None else []
    arrays = tables.decode_arrays(plan, stream)
    advance = arrays.advance if stream.coder == "rans" else np.zeros(1 << stream.precision, np.uint32)
    given = arrays.entries.astype("<u4").tobytes() + advance.astype("<u4").tobytes() + b"".join(any_bytes)
    run = subprocess.run([str(program)], input=given, capture_output=True)
    assert run.returncode == 0, run.stderr.decode()
    rows = np.frombuffer(run.stdout, np.uint8).reshape(len(any_bytes), one.values + 1)
    seen = set()
    for data, row in zip(any_bytes, rows):
        symbols, finding = library_decode(one, data)
        wanted = None if finding == "container-padding" else finding
        assert REASONS.get(int(row[-1])) == wanted
        seen.add(wanted)
        if wanted is None:
            assert row[:-1].tolist() == symbols
    assert seen >= {None, "container-overrun"} and (stream.coder == "prefix" or "container-state" in seen)

"""Fuzzing: ``python -m dquantcodec.testing.fuzz TARGET --time 60``.

With Atheris (``pip install atheris``; CPython on Linux and macOS) inputs follow the coverage of the library's Python
code, kernels included: they run without a compiler.  Without it, inputs are mutations of the corpus at random; from
Python 3.12 on those that take a new branch are mutated further, before that only shallow faults are found.  The command
says which of the three it does.

``--corpus DIR`` (default: ``tests/corpus/TARGET`` where it exists) holds inputs to begin with; ``--save DIR`` takes new
ones that reach new code; ``--replay`` runs the corpus once and ends.  An input that fails is written to ``--failing``;
``--json FILE`` adds how many inputs ran.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from . import branches as watching
from .branches import Branches

TARGET_NAMES = ("header", "records", "index", "container", "encode", "file")

_WITH_ATHERIS = """
import sys
import atheris
with atheris.instrument_imports(include=["dquantcodec"], enable_loader_override=False):
    from dquantcodec.testing.targets import TARGETS
target = TARGETS[sys.argv.pop(1)]
atheris.Setup(sys.argv, target)
atheris.Fuzz()
"""


#: Inputs that are made before they run, some of them together.
AT_ONCE = 1 << 11
#: New lines are seen at any time; branches whose lines are known are watched, which takes longer, one time in four.
BRANCHES_EVERY = 4

#: What libFuzzer says of branches, on every line of progress.
_COVERED = re.compile(r"\bcov: (\d+)")


def corpus_of(target: str, folder: Path | None) -> list[bytes]:
    """The seeds of a target and the inputs in ``folder``."""
    from .targets import seeds

    stored = sorted(folder.iterdir()) if folder is not None and folder.is_dir() else []
    return seeds(target) + [path.read_bytes() for path in stored if path.is_file()]


def replay_corpus(target: str, folder: Path | None) -> int:
    """Run every input of the corpus once; returns how many.  Raises what the target raises."""
    from .targets import TARGETS

    inputs = corpus_of(target, folder)
    for data in inputs:
        TARGETS[target](data)
    return len(inputs)


def mutated(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """A few random changes: bits, bytes, numbers at the edges, parts removed, repeated or taken from ``other``."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(len(made) + 1)
        # Zeros are mostly what fills a block, and all of them mean the same: other bytes are changed more often.
        if not any(made[at : at + 4]):
            at = rng.randrange(len(made) + 1)
        kind = rng.randrange(6)
        if kind == 0 and at < len(made):
            made[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(made):
            made[at] = rng.randrange(256)
        elif kind == 2:
            size = rng.choice((1, 2, 4, 8))
            edge = rng.choice((0, 1, -1, 1 << 8 * size - 1, (1 << 8 * size - 1) - 1))
            made[at : at + size] = (edge % (1 << 8 * size)).to_bytes(size, "little")
        elif kind == 3:
            del made[at : at + rng.choice((1, 2, 8, 64))]
        elif kind == 4:
            made[at:at] = made[at : at + rng.choice((1, 4, 32))]
        elif other:
            start = rng.randrange(len(other))
            part = other[start : start + rng.choice((4, 16, 64, 256))]
            made[at : at + len(part)] = part
    return bytes(made)


def fuzz_at_random(
    target: str, seconds: float, folder: Path | None, failing: Path, seed: int = 0, *,
    most: int | None = None, save: Path | None = None, branches: Branches | None = None,
) -> int:  # fmt: skip
    """Mutations of the corpus for ``seconds``, ``most`` of them at most; returns how many.

    With ``branches``, entered, inputs that see something new are mutated too, and written to ``save``.  A failing input
    is written to ``failing``, its error raised; inputs that ran together and fail only so are one input.
    """
    from .targets import kind_of, longest, seeds, together

    rng = random.Random(seed)
    runs, end, most_bytes = 0, time.monotonic() + seconds, longest(target)
    inputs = corpus_of(target, folder)
    for data in inputs:
        _run(target, [data], data, failing)
    kinds = [kind_of(target, data) for data in inputs]
    costs = [_seconds(target, data, failing) for data in inputs]
    quickest: dict[int, float] = {}
    for kind, cost in list(zip(kinds, costs, strict=True))[: len(seeds(target))]:
        quickest[kind] = min(cost, quickest.get(kind, cost))
    for turn in count():
        if time.monotonic() >= end or runs == most:
            break
        weights = _weights(kinds, costs, quickest)
        parents = rng.choices(inputs, weights, k=AT_ONCE if most is None else min(AT_ONCE, most - runs))
        made = [mutated(data, rng.choice(inputs), rng)[:most_bytes] for data in parents]
        if branches is not None:
            branches.fresh()
            branches.watch(both=turn % BRANCHES_EVERY == 0)
        for group, joined in together(target, made):
            if time.monotonic() >= end:
                break
            _run(target, group, joined, failing)
            runs += len(group)
            for data in _finders(target, group, branches, failing) if branches is not None else ():
                inputs.append(data)
                kinds.append(kind_of(target, data))
                costs.append(_seconds(target, data, failing))
                if save is not None:
                    save.mkdir(parents=True, exist_ok=True)
                    (save / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    return runs


def _weights(kinds: Sequence[int], costs: Sequence[float], quickest: dict[int, float]) -> list[float]:
    """How often inputs are mutated: kinds the less often the longer their ``quickest`` seeds take, and within a kind
    those as quick as that most often; slower ones take longer, and what is refused early says little."""
    weights, times = [], dict.fromkeys(kinds, 0.0)
    for kind, cost in zip(kinds, costs, strict=True):
        ratio = cost / quickest[kind]
        weights.append(float(ratio**-2 if ratio > 1 else ratio**0.3))
        times[kind] += weights[-1] * cost
    return [weight / times[kind] / quickest[kind] ** 0.5 for kind, weight in zip(kinds, weights, strict=True)]


def _seconds(target: str, data: bytes, failing: Path) -> float:
    """What an input takes that has run before, together with as many as may be."""
    from ..profile import TILE
    from .targets import together

    group, joined = together(target, [data] * TILE)[0]
    begun = time.perf_counter()
    _run(target, group, joined, failing)
    return (time.perf_counter() - begun) / len(group)


def _run(target: str, group: Sequence[bytes], joined: bytes, failing: Path) -> None:
    """Run inputs together, as ``joined``; an input that fails is written, the first that fails alone if any does."""
    from .targets import TARGETS

    try:
        TARGETS[target](joined)
    except BaseException:
        found = joined
        try:
            for data in group:
                found = data
                TARGETS[target](data)
            found = joined
        finally:
            failing.write_bytes(found)
            print(f"failing input: {failing}", file=sys.stderr)
        raise


def _finders(target: str, group: Sequence[bytes], branches: Branches, failing: Path) -> list[bytes]:
    """The inputs of a group, which has just run, that see what is new since :meth:`Branches.fresh` was last asked."""
    found = branches.fresh()
    if not found or len(group) == 1:
        return list(group) if found else []
    branches.forget(found)
    finders = []
    missing = set(found)
    for data in group:
        _run(target, [data], data, failing)
        if again := branches.fresh():
            finders.append(data)
            missing.difference_update(again)
        if not missing:
            break
    branches.remember(found)
    return finders


def fuzz_by_coverage(
    target: str, seconds: float, folder: Path | None, save: Path | None, failing: Path
) -> tuple[int, int, int]:
    """Atheris for ``seconds``, in a process of its own; its exit status, how many inputs it ran, branches it saw."""
    from .targets import longest

    with tempfile.TemporaryDirectory() as scratch:
        first = Path(scratch) / "corpus"
        first.mkdir()
        for data in corpus_of(target, folder):
            (first / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
        kept = Path(scratch) / "new"
        kept.mkdir()
        command = [
            sys.executable, "-c", _WITH_ATHERIS, target, str(kept), str(first), f"-max_total_time={round(seconds)}",
            f"-max_len={longest(target)}", "-print_final_stats=1", "-timeout=60", "-rss_limit_mb=3000",
            f"-exact_artifact_path={failing}",
        ]  # fmt: skip
        runs = seen = 0
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as process:
            assert process.stderr is not None
            for line in process.stderr:
                if not line.startswith("INFO: Instrumenting"):
                    sys.stderr.write(line)
                if line.startswith("stat::number_of_executed_units:"):
                    runs = int(line.split()[-1])
                elif (found := _COVERED.search(line)) is not None:
                    seen = int(found[1])
        status = process.returncode
        if save is not None:
            save.mkdir(parents=True, exist_ok=True)
            for path in kept.iterdir():
                (save / path.name[:16]).write_bytes(path.read_bytes())
    return status, runs, seen


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m dquantcodec.testing.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("target", choices=TARGET_NAMES)
    parser.add_argument("--time", type=float, default=60, metavar="SECONDS")
    parser.add_argument("--inputs", type=int, metavar="N", help="end after so many, without Atheris")
    parser.add_argument("--corpus", type=Path, metavar="DIR")
    parser.add_argument("--save", type=Path, metavar="DIR")
    parser.add_argument("--failing", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--replay", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    folder = chosen.corpus or Path("tests/corpus") / chosen.target
    failing = chosen.failing or Path(f"failing-{chosen.target}.bin")
    if chosen.replay:
        print(f"{replay_corpus(chosen.target, folder)} inputs of {chosen.target} replayed")
        return 0
    begun = time.monotonic()
    status = seen = 0
    if find_spec("atheris") is not None and chosen.inputs is None:
        engine = "atheris"
        print(f"Atheris fuzzes {chosen.target}, guided by coverage", flush=True)
        status, runs, seen = fuzz_by_coverage(chosen.target, chosen.time, folder, chosen.save, failing)
    elif watching.AVAILABLE:
        engine = "sys.monitoring"
        print(f"{chosen.target} gets mutations of the corpus at random, guided by the branches they take", flush=True)
        with watching.Branches() as branches:
            runs = fuzz_at_random(
                chosen.target, chosen.time, folder, failing, chosen.seed,
                most=chosen.inputs, save=chosen.save, branches=branches,
            )  # fmt: skip
        seen = len(branches)
    else:
        engine = "random"
        print(
            f"Atheris is not installed: {chosen.target} gets mutations of the corpus at random, not guided by coverage"
        )
        runs = fuzz_at_random(chosen.target, chosen.time, folder, failing, chosen.seed, most=chosen.inputs)
    print(f"{runs} inputs of {chosen.target} in {time.monotonic() - begun:.0f} s")
    if chosen.json:
        record(chosen.json, Run(
            chosen.target, engine, runs, time.monotonic() - begun, seen, int(status != 0),
            f"python -m dquantcodec.testing.fuzz {chosen.target} "
            + f"--time {chosen.time:g}{'' if chosen.inputs is None else f' --inputs {chosen.inputs}'}",
        ))  # fmt: skip
    return status


@dataclass(frozen=True)
class Run:
    """One run of a target: inputs, seconds of the clock, branches seen at its end (0: not counted), failing inputs."""

    target: str
    engine: str
    inputs: int
    seconds: float
    branches: int
    failed: int
    command: str


def record(path: Path, run: Run, machine: str | None = None) -> None:
    """Add a run to those of its target and engine in the JSON file at ``path``: many short runs make a long one.

    ``machine`` is where it ran, if not here.
    """
    stored: dict[str, Any] = {"what": "inputs run by fuzz target and engine, all runs together", "runs": []}
    if path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
    place = next((r for r in stored["runs"] if (r["target"], r["engine"]) == (run.target, run.engine)), None)
    if place is None:
        place = {"target": run.target, "engine": run.engine, "parts": 0, "inputs": 0, "seconds": 0.0, "failed": 0}
        stored["runs"].append(place)
    place["parts"] += 1
    place["inputs"] += run.inputs
    place["seconds"] = round(place["seconds"] + run.seconds, 1)
    place["failed"] += run.failed
    place["branches"] = max(place.get("branches", 0), run.branches)
    place["command"] = run.command
    place["machine"] = machine or f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    path.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


def _without_compiler() -> None:
    """Start again with kernels as Python: compiled ones hide their branches, and do not check their arrays."""
    if os.environ.get("NUMBA_DISABLE_JIT") != "1":
        command = [sys.executable, "-m", "dquantcodec.testing.fuzz", *sys.argv[1:]]
        sys.exit(subprocess.run(command, env={**os.environ, "NUMBA_DISABLE_JIT": "1"}).returncode)


if __name__ == "__main__":
    _without_compiler()
    sys.exit(main())

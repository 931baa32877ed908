"""The C++ headers under libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer: needs clang with its runtime.

    python tools/fuzz_headers.py container --inputs 10000000 --json benchmarks/results/fuzz.json

Targets of the reader (``gpu/fuzz``) begin from the corpus of the Python targets of the same name; ``device-prefix`` and
``device-rans`` are the readers of device code (``gpu/host/containers.cpp``), of one plan each.  New inputs that reach
new code go to ``--save``, from where another run goes on.  ``--docs docs/fuzzing.md`` writes what the JSON file holds
of all targets between the marks there, and runs nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dquantcodec.cuda import launches, tables
from dquantcodec.plan import make_plan
from dquantcodec.testing.files import SMALL
from dquantcodec.testing.fuzz import Run, corpus_of, record
from dquantcodec.testing.targets import bases

ROOT = Path(__file__).parents[1]
READER = ("header", "records", "index", "container", "file")
DEVICE = {"device-prefix": "key", "device-rans": "value"}
MARKS = ("<!-- fuzz -->", "<!-- end of fuzz -->")
#: Bytes of an input; a few are enough for a container.
MOST_BYTES = {"header": 4096, "records": 8192, "index": 4096, "file": 8192}
SANITIZE = ("-O2", "-g1", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all")


def build(target: str, folder: Path) -> Path:
    """The program of a target, and in ``folder`` the files it reads."""
    name = "reader" if target in READER else target
    options = []
    if target in READER:
        source = ROOT / "gpu" / "fuzz" / "main.cpp"
        options = [f"-fsanitize-coverage-ignorelist={ROOT / 'gpu' / 'fuzz' / 'plain.txt'}"]
        for base, data in bases().items():
            (folder / f"{base}.dqkv").write_bytes(data)
    else:
        source, kind = ROOT / "gpu" / "host" / "containers.cpp", DEVICE[target]
        plan = make_plan(SMALL, 8, 20)
        # Small containers, which many bytes overrun.
        plan = replace(plan, key=replace(plan.key, words=4), value=replace(plan.value, words=8))
        stream = getattr(plan, kind)
        arrays = tables.decode_arrays(plan, stream)
        advance = arrays.advance if stream.coder == "rans" else np.zeros(1 << stream.precision, np.uint32)
        both = [array.astype("<u4").tobytes() for array in (arrays.entries, advance)]
        (folder / f"{target}.tables").write_bytes(b"".join(both))
        options = [*launches.definitions(plan, kind), "-DDQ_ELEMENT=0", f"-I{ROOT / 'gpu' / 'host'}"]
    program = folder / name
    if not program.exists():
        options += ["-DDQ_FUZZER", f"-I{ROOT / 'gpu' / 'include'}"]
        command = ["clang++", "-std=c++17", *SANITIZE, *options, str(source)]
        # Compressed rows are read where libzstd is there.
        if subprocess.run([*command, "-DDQUANT_ZSTD", "-lzstd", "-o", str(program)], capture_output=True).returncode:
            subprocess.run([*command, "-o", str(program)], check=True)
    return program


def fuzz(target: str, folder: Path, inputs: int, save: Path, failing: Path) -> tuple[int, int, int]:
    """Exit status, inputs that ran, and edges of the control flow they reached."""
    program = build(target, folder)
    first = folder / f"corpus-{target}"
    first.mkdir(exist_ok=True)
    stored = ROOT / "tests" / "corpus" / target
    for data in corpus_of(target, stored) if target in READER else corpus_of("container", stored.parent / "container"):
        (first / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    save.mkdir(parents=True, exist_ok=True)
    command = [
        str(program), str(save), str(first), f"-runs={inputs}", f"-max_len={MOST_BYTES.get(target, 48)}",
        "-print_final_stats=1", "-entropic=0", "-detect_leaks=0", "-timeout=60", "-rss_limit_mb=2000",
        f"-exact_artifact_path={failing}",
    ]  # fmt: skip
    given = {
        "DQ_TARGET": target, "DQ_BASES": str(folder), "DQ_TABLES": str(folder / f"{target}.tables"),
        # Stacks of allocations and much memory kept after its release cost more time than all the rest.
        "ASAN_OPTIONS": "malloc_context_size=0:quarantine_size_mb=16",
    }  # fmt: skip
    runs = seen = 0
    with subprocess.Popen(
        command, env={**os.environ, **given}, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if " NEW " not in line and "REDUCE" not in line:
                sys.stderr.write(line)
            if line.startswith("stat::number_of_executed_units:"):
                runs = int(line.split()[-1])
            elif (found := re.search(r"\bcov: (\d+)", line)) is not None:
                seen = int(found[1])
    return process.returncode, runs, seen


def table(runs: list[dict[str, Any]]) -> str:
    """The runs as Markdown."""
    lines = ["| target | engine | inputs | seconds | a second | branches | failed |", "|---|---|--:|--:|--:|--:|--:|"]
    for run in runs:
        lines.append(
            f"| `{run['target']}` | {run['engine']} | {run['inputs']:,} | {run['seconds']:,.0f} | "
            f"{run['inputs'] / run['seconds']:,.0f} | {run['branches']:,} | {run['failed']} |"
        )
    return "\n".join(lines)


def write_table(results: Path, docs: Path) -> None:
    """Put the runs of the JSON file ``results`` between the marks of ``docs``."""
    before, _, rest = docs.read_text(encoding="utf-8").partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    made = table(json.loads(results.read_text(encoding="utf-8"))["runs"])
    docs.write_text(f"{before}{MARKS[0]}\n\n{made}\n\n{MARKS[1]}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", choices=[*READER, *DEVICE], nargs="?", default="container")
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--build", type=Path, metavar="DIR", help="kept programs; by default they are built anew")
    parser.add_argument("--save", type=Path, metavar="DIR", help="new inputs")
    parser.add_argument("--failing", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="inputs that ran are added to this file")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="the page to write the table of --json into")
    chosen = parser.parse_args()
    if chosen.docs:
        write_table(chosen.json or ROOT / "benchmarks" / "results" / "fuzz.json", chosen.docs)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.build or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        build(chosen.target, folder)
        begun = time.monotonic()
        failing = chosen.failing or Path(f"failing-{chosen.target}.bin")
        save = chosen.save or Path(scratch) / "new"
        status, runs, seen = fuzz(chosen.target, folder, chosen.inputs, save, failing)
        seconds = time.monotonic() - begun
    print(f"{runs} inputs of {chosen.target} in {seconds:.0f} s")
    if chosen.json:
        command = f"python tools/fuzz_headers.py {chosen.target} --inputs {chosen.inputs}"
        engine = "libFuzzer, AddressSanitizer, UndefinedBehaviorSanitizer"
        record(chosen.json, Run(chosen.target, engine, runs, seconds, seen, int(status != 0), command))
    return status


if __name__ == "__main__":
    sys.exit(main())

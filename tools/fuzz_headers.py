"""The C++ headers under libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer: needs clang with its runtime.

    python tools/fuzz_headers.py container --inputs 10000000 --json benchmarks/results/fuzz.json

Targets of the reader (``gpu/fuzz``) begin from the corpus of the Python targets of the same name; ``device-prefix`` and
``device-rans`` are the readers of device code (``gpu/host/containers.cpp``), of one plan each.  New inputs that reach
new code go to ``--save``, from where another run goes on.  ``--docs docs/fuzzing.md`` writes what the JSON file holds
of all targets between the marks there, and runs nothing.

A machine of many cores needs neither clang nor Python:

    python tools/fuzz_headers.py records index file --pack DIR      # here: programs, corpora, run.sh
    sh DIR/run.sh LOGS 480 16 10000000                              # there: seconds, processes, inputs of a target
    python tools/fuzz_headers.py --logs LOGS --machine NAME --json benchmarks/results/fuzz.json
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
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import generated_pages
import numpy as np

from dquantcodec.cuda import launches, tables
from dquantcodec.plan import make_plan
from dquantcodec.testing.fuzz import Run, corpus_of, record
from dquantcodec.testing.plans import SMALL
from dquantcodec.testing.targets import bases

ROOT = Path(__file__).parents[1]
READER = ("header", "records", "index", "container", "file")
DEVICE = {"device-prefix": "key", "device-rans": "value"}
#: Bytes of an input; a few are enough for a container.
MOST_BYTES = {"header": 4096, "records": 8192, "index": 4096, "file": 10240}
#: Comparisons are not traced, which takes half the time: checksums are made right, so no input has to guess a constant.
SANITIZE = (
    "-O2", "-g1", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all",
    "-fno-sanitize-coverage=trace-cmp",
)  # fmt: skip
#: So that a program runs on a machine that has no compiler.
STATIC = ("-static-libstdc++", "-static-libgcc")
ENGINE = "libFuzzer, AddressSanitizer, UndefinedBehaviorSanitizer"
#: Stacks of allocations cost more time than all the rest.  What is kept after its release, against use after that,
#: holds all that one input allocates, and stays in the processor's cache.
ASAN_OPTIONS = "malloc_context_size=0:quarantine_size_mb=2"


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
        command = ["clang++", "-std=c++17", *SANITIZE, *options, str(source), *STATIC]
        # Compressed rows are read where libzstd is there.
        for zstd in (["-DDQUANT_ZSTD", "-l:libzstd.a"], ["-DDQUANT_ZSTD", "-lzstd"]):
            if not subprocess.run([*command, *zstd, "-o", str(program)], capture_output=True).returncode:
                return program
        subprocess.run([*command, "-o", str(program)], check=True)
    return program


def longest(target: str) -> int:
    """Bytes of an input at most."""
    return MOST_BYTES.get(target, 48)


def write_corpus(target: str, folder: Path) -> Path:
    """The inputs that a target begins with, in a folder of their own in ``folder``."""
    first = folder / f"corpus-{target}"
    first.mkdir(exist_ok=True)
    of = target if target in READER else "container"
    for data in corpus_of(of, ROOT / "tests" / "corpus" / of):
        (first / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    return first


def command_of(target: str, program: Path, folders: Sequence[Path], inputs: int, failing: Path) -> list[str]:
    """libFuzzer's: new inputs go to the first of ``folders``."""
    return [
        str(program), *map(str, folders), f"-runs={inputs}", f"-max_len={longest(target)}", *COMMON,
        f"-exact_artifact_path={failing}",
    ]  # fmt: skip


def environment(target: str, folder: Path) -> dict[str, str]:
    """What a program reads of its environment; ``folder`` is the one it was built in."""
    return {
        "DQ_TARGET": target, "DQ_BASES": str(folder), "DQ_TABLES": str(folder / f"{target}.tables"),
        "ASAN_OPTIONS": ASAN_OPTIONS,
    }  # fmt: skip


def fuzz(target: str, folder: Path, inputs: int, save: Path, failing: Path) -> tuple[int, int, int]:
    """Exit status, inputs that ran, and edges of the control flow they reached."""
    save.mkdir(parents=True, exist_ok=True)
    folders = [save, write_corpus(target, folder)]
    command, given = command_of(target, build(target, folder), folders, inputs, failing), environment(target, folder)
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


#: One target after another, each in all processes; every process has its own random numbers and its own new inputs.
RUN = r"""#!/bin/sh
# sh run.sh LOGS SECONDS PROCESSES INPUTS: processes share the inputs of a target; seconds are of all targets.
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1" && logs=$(cd "$1" && pwd)
end=$(($(date +%s) + $2)) processes=$3 inputs=$4
cd "$here" || exit
export ASAN_OPTIONS={options} DQ_BASES=.
fuzz() {{ # target program longest
    n=0
    while [ "$n" -lt "$processes" ]; do
        new=$logs/new/$1-$n
        mkdir -p "$new"
        {{
            DQ_TARGET=$1 DQ_TABLES=$1.tables "./$2" "$new" "corpus-$1" -seed=$((n + 1)) -max_len="$3" \
                -runs=$((inputs * (n + 1) / processes - inputs * n / processes)) -max_total_time="$left" {common} \
                -exact_artifact_path="$logs/failing-$1-$n" 2>&1
            echo "exit status $?"
        }} | grep -v -E ' (NEW|REDUCE|RELOAD|pulse) ' >"$logs/$1-$n.log" &
        n=$((n + 1))
    done
    wait
    ran=$(cat "$logs/$1"-*.log | awk '/^stat::number_of_executed_units/ {{ n += $2 }} END {{ print n }}')
    echo "$1: $ran inputs, $((end - $(date +%s))) seconds left"
}}
{targets}
"""
COMMON = ("-print_final_stats=1", "-entropic=0", "-detect_leaks=0", "-timeout=60", "-rss_limit_mb=2000")


def pack(targets: Sequence[str], folder: Path) -> None:
    """Everything that ``run.sh`` in ``folder`` needs to run the targets elsewhere."""
    lines = []
    for target in targets:
        program = build(target, folder)
        write_corpus(target, folder)
        lines.append(f"left=$((end - $(date +%s)))\n[ $left -lt 1 ] || fuzz {target} {program.name} {longest(target)}")
    script = RUN.format(options=ASAN_OPTIONS, common=" ".join(COMMON), targets="\n".join(lines))
    (folder / "run.sh").write_text(script, encoding="utf-8")


def run_of(target: str, logs: Sequence[str]) -> Run:
    """What the logs of the processes of a target say; seconds are of all of them together."""
    inputs = seconds = seen = failed = 0
    for text in logs:
        inputs += sum(int(n) for n in re.findall(r"^stat::number_of_executed_units: (\d+)", text, re.MULTILINE))
        seconds += sum(int(n) for n in re.findall(r"^Done \d+ runs in (\d+) second", text, re.MULTILINE))
        seen = max([seen, *(int(n) for n in re.findall(r"\bcov: (\d+)", text))])
        # A process that was ended from outside says neither how many inputs it ran nor its status: it counts nothing.
        failed += len(re.findall(r"^exit status [1-9]", text, re.MULTILINE))
    command = f"sh DIR/run.sh LOGS SECONDS {len(logs)} {inputs}"
    return Run(target, ENGINE, inputs, seconds, seen, failed, command)


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
    generated_pages.rewrite(docs, {"fuzz": table(json.loads(results.read_text(encoding="utf-8"))["runs"])})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", default=["container"], help=", ".join((*READER, *DEVICE))
    )
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--build", type=Path, metavar="DIR", help="kept programs; by default they are built anew")
    parser.add_argument("--save", type=Path, metavar="DIR", help="new inputs")
    parser.add_argument("--failing", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="inputs that ran are added to this file")
    parser.add_argument(
        "--pack", type=Path, metavar="DIR", help="build and write corpora and run.sh there, run nothing"
    )
    parser.add_argument("--logs", type=Path, metavar="DIR", help="count the logs of run.sh and --json files there")
    parser.add_argument("--machine", metavar="NAME", help="the machine of --logs")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="the page to write the table of --json into")
    chosen = parser.parse_args()
    if unknown := set(chosen.targets) - {*READER, *DEVICE}:
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    if chosen.docs:
        write_table(chosen.json or ROOT / "benchmarks" / "results" / "fuzz.json", chosen.docs)
        return 0
    if chosen.pack:
        chosen.pack.mkdir(parents=True, exist_ok=True)
        pack(chosen.targets, chosen.pack)
        return 0
    if chosen.logs:
        runs = [run_of(target, texts) for target, texts in logs_of(chosen.logs).items()] + python_runs(chosen.logs)
        for run in runs:
            print(f"{run.inputs} inputs of {run.target} in {run.seconds:.0f} s, {run.failed} failed")
            if chosen.json:
                record(chosen.json, run, chosen.machine)
        return int(any(run.failed for run in runs))
    return max(fuzz_here(target, chosen) for target in chosen.targets)


def python_runs(folder: Path) -> list[Run]:
    """The runs that processes of ``dquantcodec.testing.fuzz`` wrote to JSON files there."""
    rows = [
        row for path in sorted(folder.glob("*.json")) for row in json.loads(path.read_text(encoding="utf-8"))["runs"]
    ]
    return [Run(**{field.name: row[field.name] for field in fields(Run)}) for row in rows]


def logs_of(folder: Path) -> dict[str, list[str]]:
    """The logs that ``run.sh`` left, by target."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*-*.log")):
        found.setdefault(path.stem.rpartition("-")[0], []).append(path.read_text(encoding="utf-8", errors="replace"))
    return found


def fuzz_here(target: str, chosen: argparse.Namespace) -> int:
    """Fuzz a target on this machine, as the arguments say; the program's exit status."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.build or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        build(target, folder)
        begun = time.monotonic()
        failing = chosen.failing or Path(f"failing-{target}.bin")
        save = chosen.save or Path(scratch) / "new"
        status, runs, seen = fuzz(target, folder, chosen.inputs, save, failing)
        seconds = time.monotonic() - begun
    print(f"{runs} inputs of {target} in {seconds:.0f} s")
    if chosen.json:
        command = f"python tools/fuzz_headers.py {target} --inputs {chosen.inputs}"
        record(chosen.json, Run(target, ENGINE, runs, seconds, seen, int(status != 0), command))
    return status


if __name__ == "__main__":
    sys.exit(main())

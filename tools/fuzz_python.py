"""Fuzz targets of Python in many processes at once, so that all of them reach a number of inputs together.

    python tools/fuzz_python.py container encode file --processes 14 --seconds 500 --logs LOGS
    python tools/fuzz_headers.py --logs LOGS --machine NAME --json benchmarks/results/fuzz.json

What ``--json`` has on record counts, and says what an input takes: processes are shared out by the time that what is
missing takes.  So the two commands can be repeated, on another machine or on several, until nothing is missing.  Needs
Python 3.12 (``sys.monitoring``).  ``LOGS`` gets few files: ``runs.json`` (every process), ``new.tar.gz`` (inputs that
found something new, to begin with by ``--new`` next time) and, if any failed, ``failing.tar.gz``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ("atheris", "sys.monitoring", "random")
#: Seconds of an input before there is a record of any.
SECONDS = {"container": 5e-5, "encode": 1e-3, "file": 4e-4}
#: For a process to end by itself after its time.
GRACE = 30


def missing(runs: Sequence[dict[str, Any]], targets: Sequence[str], inputs: int) -> dict[str, int]:
    """How many inputs every target lacks, all engines of Python together."""
    done = {target: sum(run["inputs"] for run in runs if run["target"] == target and run["engine"] in ENGINES)
            for target in targets}  # fmt: skip
    return {target: max(inputs - count, 0) for target, count in done.items()}


def shared_out(lacking: dict[str, int], runs: Sequence[dict[str, Any]], processes: int) -> list[str]:
    """The target of every process: one at least of all that lack inputs, then whoever needs most time."""
    seconds = dict.fromkeys(lacking, 1e-4) | SECONDS
    seconds |= {run["target"]: run["seconds"] / run["inputs"] for run in runs if run["engine"] == "sys.monitoring"}
    chosen = [target for target, count in lacking.items() if count]
    while chosen and len(chosen) < processes:
        chosen.append(max(set(chosen), key=lambda target: lacking[target] * seconds[target] / chosen.count(target)))
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("targets", nargs="+", metavar="TARGET")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=500, help="of the clock, all processes at once")
    parser.add_argument("--inputs", type=int, default=10_000_000, help="of a target, what is on record counted")
    parser.add_argument("--json", type=Path, metavar="FILE", default=ROOT / "benchmarks" / "results" / "fuzz.json")
    parser.add_argument("--logs", type=Path, metavar="DIR", required=True)
    parser.add_argument("--new", type=Path, metavar="FILE", help="new.tar.gz of an earlier run")
    chosen = parser.parse_args()
    runs = json.loads(chosen.json.read_text(encoding="utf-8"))["runs"]
    lacking = missing(runs, chosen.targets, chosen.inputs)
    shares = shared_out(lacking, runs, chosen.processes)
    chosen.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if chosen.new:
            with tarfile.open(chosen.new) as stored:
                for name in ("corpus", "new"):
                    stored.extractall(folder / name, filter="data")
        for target in set(shares):
            shutil.copytree(ROOT / "tests" / "corpus" / target, folder / "corpus" / target, dirs_exist_ok=True)
        made = run_all(shares, lacking, sum(run["inputs"] for run in runs), chosen.seconds, folder)
        failed = (folder / "failing").is_dir()
        (chosen.logs / "runs.json").write_text(json.dumps({"runs": made}, indent=1) + "\n", encoding="utf-8")
        for name in ("new", "failing"):
            if (folder / name).is_dir():
                with tarfile.open(chosen.logs / f"{name}.tar.gz", "w:gz") as stored:
                    stored.add(folder / name, "." if name == "new" else name)
    for target in lacking:
        of = [run for run in made if run["target"] == target]
        lacking[target] -= sum(run["inputs"] for run in of)
        print(
            f"{target}: {sum(run['inputs'] for run in of)} inputs in {sum(run['seconds'] for run in of):.0f} s of "
            f"{len(of)} processes, {sum(run['failed'] for run in of)} failed, {max(lacking[target], 0)} are missing"
        )
    return int(failed)


def run_all(
    shares: Sequence[str], lacking: dict[str, int], seed: int, seconds: float, folder: Path
) -> list[dict[str, Any]]:
    """Run a process for every share, and give what they recorded."""
    end = time.monotonic() + seconds
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    processes = []
    for number, target in enumerate(shares):
        command = [
            sys.executable, "-m", "dquantcodec.testing.fuzz", target, "--seed", str(seed + number),
            "--time", str(seconds), "--inputs", str(-(-lacking[target] // shares.count(target))),
            "--corpus", str(folder / "corpus" / target), "--save", str(folder / "new" / target),
            "--failing", str(folder / f"failing-{target}-{number}"), "--json", str(folder / f"{number}.json"),
        ]  # fmt: skip
        with (folder / f"{number}.log").open("w") as log:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
    for process in processes:
        try:
            process.wait(max(end + GRACE - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    made = []
    for number, (target, process) in enumerate(zip(shares, processes, strict=True)):
        stored = folder / f"{number}.json"
        if stored.exists():
            made += json.loads(stored.read_text(encoding="utf-8"))["runs"]
        if process.returncode:
            failed = folder / "failing"
            failed.mkdir(exist_ok=True)
            log = folder / f"{number}.log"
            print(f"{target}, process {number}: status {process.returncode}\n{log.read_text(errors='replace')[-3000:]}")
            for found in log, folder / f"failing-{target}-{number}":
                if found.exists():
                    found.rename(failed / found.name)
    return made


if __name__ == "__main__":
    sys.exit(main())

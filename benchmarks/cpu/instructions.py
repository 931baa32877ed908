"""Instructions a value, stage by stage: what timing on a shared machine cannot show steadily.

    python benchmarks/cpu/instructions.py [--json FILE]          # needs valgrind (callgrind) and a minute or two

Counts are those of one processor model (``haswell``: AVX2, no AVX-512) so that they can be compared between machines.
A marker, a system call that nothing else makes, divides the run: callgrind writes its counts at every marker.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from stages import stages

MARKER = "getpriority"
PROCESSOR = {
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sse4.1,+sse4.2,+ssse3",
    "NUMBA_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def run_stages(profile: str) -> None:
    """Every stage once to load its kernels, then once between two markers."""
    for name, values, work in stages(profile):
        work()
        os.getpriority(os.PRIO_PROCESS, 0)
        work()
        os.getpriority(os.PRIO_PROCESS, 0)
        print(f"{values}\t{name}", flush=True)


def count(profile: str) -> list[dict[str, object]]:
    """Instructions a value of every stage of ``profile``."""
    command = [sys.executable, __file__, "--stages", profile]
    environment = {**os.environ, **PROCESSOR}
    subprocess.run(command, env=environment, check=True, capture_output=True)  # compiles into the cache
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "counts"
        valgrind = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", f"--dump-before={MARKER}"]
        done = subprocess.run([*valgrind, *command], env=environment, check=True, capture_output=True, text=True)
        totals = []
        for number in range(1, len(list(Path(folder).iterdir())) + 1):
            part = Path(f"{out}.{number}")
            if part.exists():
                totals.append(int(re.search(r"^(?:totals|summary): (\d+)", part.read_text(), re.M).group(1)))  # type: ignore[union-attr]
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    # Dump 2k + 1 ends what lies before a stage, dump 2k + 2 the stage.
    return [
        {"profile": profile, "stage": name, "instructions": round(totals[2 * k + 1] / int(values), 2)}
        for k, (values, name) in enumerate(rows)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", nargs="+", default=["2.26 classes", "2.26-t classes", "2.26", "paper-2.26"])
    parser.add_argument("--json", type=Path, help="also write the counts here")
    parser.add_argument("--stages", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stages:
        run_stages(arguments.stages)
        return
    rows = [row for profile in arguments.profiles for row in count(profile)]
    for row in rows:
        print(f"{row['profile']:14} {row['stage']:45} {row['instructions']:8.2f} instructions a value")
    if arguments.json:
        what = "instructions a value, one page of 128 tokens of 1024 values, by callgrind"
        document = {"what": what, "command": " ".join(["python", *sys.argv]), "processor": PROCESSOR, "rows": rows}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

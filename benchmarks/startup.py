"""What a command costs before it works: CPU and wall time beside a bare interpreter, and the first use of kernels.

    python benchmarks/startup.py --json benchmarks/results/startup.json

Commands take turns, so that all see the same machine, and each is compared with the bare interpreter of its own turn;
CPU time (user and system) is what other programs disturb least.
Modules are compiled to bytecode beforehand, as an installation does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = "from dquantcodec.cli.main import main; raise SystemExit(main())"


def timed(code: str, arguments: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Wall and CPU seconds of one run, its child processes included."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{arguments or code} failed")
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime


def summary(runs: list[tuple[float, float]]) -> dict[str, float]:
    wall, cpu = zip(*runs)
    return {
        "wall_ms": round(1000 * statistics.median(wall), 1),
        "cpu_ms": round(1000 * statistics.median(cpu), 1),
        "least_cpu_ms": round(1000 * min(cpu), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=25)
    parser.add_argument("--file", metavar="FILE", help="a .dqkv file to look into; kernels are then not timed")
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    options = parser.parse_args()
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as folder:
        environment |= {"DQUANTCODEC_CACHE_DIR": f"{folder}/kernels", "PYTHONPYCACHEPREFIX": f"{folder}/bytecode"}
        demo = ["demo", "--out", folder, "--quiet"]
        timed(COMMAND, ["info", "--help"], environment)
        demos = {} if options.file else {"first use": [timed(COMMAND, demo, environment)]}
        if demos:
            demos["later"] = [timed(COMMAND, demo, environment) for _ in range(3)]
        path = options.file or f"{folder}/sample.dqkv"
        commands: dict[str, tuple[str, list[str]]] = {
            "python -c pass": ("pass", []),
            "python -c 'import numpy'": ("import numpy", []),
            "dqkv --version": (COMMAND, ["--version"]),
            "dqkv --help": (COMMAND, ["--help"]),
            "dqkv info FILE": (COMMAND, ["info", path]),
        }
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for turn in range(options.runs + 1):
            for name, (code, arguments) in commands.items():
                found = timed(code, arguments, environment)
                if turn:  # the first writes bytecode
                    runs[name].append(found)
    rows = {name: summary(found) for name, found in runs.items()}
    bare = rows["python -c pass"]
    for name, row in rows.items():
        for column, measure in enumerate(("wall", "cpu")):
            over = [run[column] - beside[column] for run, beside in zip(runs[name], runs["python -c pass"])]
            row[f"{measure}_over_bare_ms"] = round(1000 * statistics.median(over), 1)
        row["least_cpu_over_bare_ms"] = round(row["least_cpu_ms"] - bare["least_cpu_ms"], 1)
    result = {
        "what": "start-up, medians of runs that take turns; over bare: of the differences to the bare interpreter in "
        "the same turn; least: the run that others disturbed least",
        "command": f"python benchmarks/startup.py --runs {options.runs}{' --file sample.dqkv' * bool(options.file)}",
        "machine": {"system": platform.system(), "machine": platform.machine(), "cores": os.cpu_count(),
                    "load": round(os.getloadavg()[0], 1)},
        "python": platform.python_version(),
        "runs": options.runs,
        "commands": rows,
        "dqkv demo": {name: summary(found) for name, found in demos.items()},
    }  # fmt: skip
    for name, row in rows.items():
        print(
            f"{name:26}{row['cpu_ms']:6.0f} ms CPU {row['cpu_over_bare_ms']:+6.0f} over bare"
            f"{row['wall_ms']:6.0f} ms wall {row['wall_over_bare_ms']:+6.0f} over bare"
        )
    for name, found in demos.items():
        print(f"dqkv demo, {name}: {statistics.median(wall for wall, _ in found):.1f} s")
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

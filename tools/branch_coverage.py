"""How many branches of the file format, the rANS coder and the page layout do the tests take?

    python tools/branch_coverage.py --json benchmarks/results/branch_coverage.json
    python tools/branch_coverage.py --page docs/fuzzing.md       write the result into the page, measure nothing

Prints every line and branch that no test takes, and the share of those taken; fails below 100 %.  Files and pages are
measured with compiled kernels, which coverage cannot see into, and the coder with kernels as Python.  Needs
``pip install 'dquantcodec[dev]'``; takes some minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import generated_pages

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "branch_coverage.json"
MEASURED = ("file/*", "rans.py", "page.py")
#: Tests that are about these, and whether kernels run as Python.
NAMES = (
    *(f"file_{name}" for name in ("crafted", "crafted_groupings", "shards", "writing", "append", "salvage")),
    *(f"file_{name}" for name in ("roundtrip", "damage", "rare", "fitting", "device")), "overlap", "urls", "page",
)  # fmt: skip
SLOW = "not every_flip and not every_length and not any_bytes"
RUNS = (
    (False, (*(f"tests/test_{name}.py" for name in NAMES), "-k", SLOW)),
    (True, ("tests/test_coders.py", "tests/test_testing_edges.py", "-k", "padding_bit or told_apart or too_short")),
)  # fmt: skip


def measure(folder: Path) -> dict[str, Any]:
    """Run the tests under coverage; what it reports, files by their names in the package."""
    spec = importlib.util.find_spec("dquantcodec")
    assert spec and spec.origin
    package = Path(spec.origin).parent
    environment = {**os.environ, "COVERAGE_FILE": str(folder / "data")}
    include = ",".join(str(package / name) for name in MEASURED)
    coverage = [sys.executable, "-m", "coverage"]
    for plain, tests in RUNS:
        command = [*coverage, "run", "--branch", "--parallel-mode", f"--include={include}", "-m", "pytest", "-q"]
        subprocess.run(
            [*command, "-p", "no:cacheprovider", *tests], cwd=ROOT, check=True,
            env={**environment, "NUMBA_DISABLE_JIT": str(int(plain))},
        )  # fmt: skip
    subprocess.run([*coverage, "combine", "--quiet", str(folder)], cwd=ROOT, check=True, env=environment)
    report = folder / "report.json"
    subprocess.run([*coverage, "json", "--quiet", "-o", str(report)], cwd=ROOT, check=True, env=environment)
    files: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))["files"]
    return {(ROOT / name).relative_to(package).as_posix(): found for name, found in files.items()}


def facts(files: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What is recorded: counts of each file and of all."""
    rows = [
        {
            "file": name,
            "statements": found["summary"]["num_statements"],
            "branches": found["summary"]["num_branches"],
            "missing_lines": found["missing_lines"],
            "missing_branches": found["missing_branches"],
            "excluded_lines": len(found["excluded_lines"]),
        }
        for name, found in sorted(files.items())
    ]
    size = sum(row["statements"] + row["branches"] for row in rows)
    missing = sum(len(row["missing_lines"]) + len(row["missing_branches"]) for row in rows)
    return {
        "what": "statements and branches taken by the tests",
        "command": "python tools/branch_coverage.py --json benchmarks/results/branch_coverage.json",
        "machine": f"{platform.system()}, {platform.machine()}, Python {platform.python_version()}",
        "seconds": round(seconds),
        "statements": sum(row["statements"] for row in rows),
        "branches": sum(row["branches"] for row in rows),
        "percent": round(100 * (size - missing) / size, 2),
        "files": rows,
    }


def sentence(found: dict[str, Any]) -> str:
    """What the documentation says of a result."""
    share = "All" if found["percent"] == 100 else f"{found['percent']} % of"
    python = re.sub(r".*(Python \d+\.\d+).*", r"\1", found["machine"])
    return (
        f"{share} {found['statements']:,} statements and {found['branches']:,} branches are taken "
        f"(`benchmarks/results/{RESULTS.name}`, {python})."
    )


def write_sentence(page: Path, found: dict[str, Any]) -> None:
    """Put the result between the page's two marks."""
    generated_pages.rewrite(page, {"coverage": sentence(found)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="where the result is written")
    parser.add_argument("--page", type=Path, help="the page to write the result of --json into")
    chosen = parser.parse_args()
    if chosen.page:
        write_sentence(chosen.page, json.loads((chosen.json or RESULTS).read_text(encoding="utf-8")))
        return 0
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = facts(measure(Path(folder)), time.monotonic() - begun)
    for row in found["files"]:
        if row["missing_lines"] or row["missing_branches"]:
            print(f"{row['file']}: lines {row['missing_lines']}, branches {row['missing_branches']}")
    print(f"{found['percent']} % of {found['statements']} statements and {found['branches']} branches")
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(found["percent"] < 100)


if __name__ == "__main__":
    sys.exit(main())

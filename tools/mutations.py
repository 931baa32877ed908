"""Do the tests notice when the code is broken?  Breaks it in listed ways, one at a time, and runs the tests named.

    python tools/mutations.py --json benchmarks/results/mutations.json    run all, write the results
    python tools/mutations.py --only 3 17                                 run some, print
    python tools/mutations.py --page docs/fuzzing.md                      write the table of the results into the page

A mutation replaces a text that stands in a file exactly once.  Tests run in a copy of the tree, kernels as Python; the
same tests pass before anything is broken, otherwise nothing is reported.  A test that never ends counts as noticing.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

import generated_pages

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("dquantcodec", "tests", "formats", "gpu", "docs", "README.md", "pyproject.toml")
RESULTS = ROOT / "benchmarks" / "results" / "mutations.json"
SECONDS = 900


@dataclass(frozen=True)
class Mutation:
    """``old`` becomes ``new`` in ``file``; ``tests`` are pytest arguments, ``what`` is broken."""

    what: str
    file: str
    old: str
    new: str
    tests: str


CHECKS = "tests/test_testing_checks.py -k "
DECODE, ENCODE = CHECKS + "library_decodes_containers", CHECKS + "library_encodes_containers"
PAGES, PAGE_ENCODER = CHECKS + "library_decodes_pages", CHECKS + "library_encodes_pages"
GOLDEN, TABLES, DRIFT = "tests/test_golden.py -k words", "tests/test_tables.py", "tests/test_testing_drift.py"
CRAFTED, GROUPED = "tests/test_file_crafted.py", "tests/test_file_crafted_groupings.py"
MODEL, EDGES = "tests/test_testing_files.py", "tests/test_testing_edges.py"
RANS, PREFIX = "dquantcodec/rans.py", "dquantcodec/prefix.py"

MUTATIONS = (
    # rANS
    Mutation("renormalisation off by one", RANS, ">= f\n    at = at + 1", "> f\n    at = at + 1", ENCODE),
    Mutation("the state's low half is not flushed", RANS,
             "column[1] = np.uint16(state[k] & np.uint32(0xFFFF))", "column[1] = np.uint16(0)", ENCODE),
    Mutation("the state's halves swapped", RANS,
             "state[lane] = pairs[lane] << np.uint32(16) | pairs[lane] >> np.uint32(16)", "state[lane] = pairs[lane]",
             DECODE),
    Mutation("a word is taken from a state that needs none", "dquantcodec/plain_steps.py", "low = x < 1 << 16",
             "low = x <= 1 << 16", DECODE),
    Mutation("the final state is not checked", RANS, "if state[lane] != np.uint32(65536):", "if False:", DECODE),
    Mutation("an overrun of one word goes unseen", RANS, "if used > capacity:", "if used > capacity + 1:", DECODE),
    Mutation("the first word of padding is not checked", RANS, "for word in range(used, capacity):",
             "for word in range(used + 1, capacity):", "tests/test_coders.py -k every_padding_bit"),
    Mutation("the encoder starts from another state", RANS, "w = x = y = z = np.uint32(65536)",
             "w = x = y = z = np.uint32(65537)", ENCODE),
    Mutation("reciprocals rounded down", RANS, "[-(-(1 << 32 + plan.precision) // int(v)) for v in f]",
             "[(1 << 32 + plan.precision) // int(v) for v in f]", ENCODE),
    Mutation("cumulative frequencies include the letter", RANS, "np.cumsum(f, dtype=np.uint32) - f",
             "np.cumsum(f, dtype=np.uint32)", ENCODE),
    Mutation("words stored in the order they were emitted", RANS, "pending[k, emitted[k] - 1 - i]", "pending[k, i]",
             ENCODE),
    # prefix
    Mutation("the pad bit is forgotten", PREFIX, "held = np.uint64(1)", "held = np.uint64(0)", ENCODE),
    Mutation("words rounded down", PREFIX, "needed = (bits + 31) // 32", "needed = bits // 32", ENCODE),
    Mutation("the last word is not flushed", PREFIX, "if held > np.uint64(0):", "if held > np.uint64(16):", ENCODE),
    Mutation("equal lengths in falling order of letters", PREFIX, "np.lexsort((np.arange(len(lengths)), lengths))",
             "np.lexsort((-np.arange(len(lengths)), lengths))", ENCODE),
    Mutation("codes from the least significant bit", PREFIX, 'int(f"{code:0{length}b}"[::-1], 2)', "code", ENCODE),
    Mutation("a full container counts as overrun", PREFIX, "if bit > 32 * capacity:", "if bit >= 32 * capacity:",
             EDGES),
    Mutation("the pad bit is not checked", PREFIX, "if streams[first] & np.uint32(1):", "if False:",
             "tests/test_coders.py -k every_padding_bit"),
    Mutation("unused bits of the last word are not checked", PREFIX,
             "if bit & 31 and streams[first + (bit >> 5)] >> np.uint32(bit & 31):", "if False:", DECODE),
    Mutation("decoding starts at the pad bit", PREFIX, "ends[k] = np.uint64(32 * stride * (lane + k) + 1)",
             "ends[k] = np.uint64(32 * stride * (lane + k))", DECODE),
    # tables and letters
    Mutation("frequencies of zero", "dquantcodec/tables.py", "share = [max(1, w * slots // total)",
             "share = [max(0, w * slots // total)", TABLES),
    Mutation("wrong rounding of frequencies", "dquantcodec/tables.py", "(2 * share[i] + 1)", "(2 * share[i] + 9)",
             TABLES),
    Mutation("package-merge takes one too few", "dquantcodec/tables.py", "taken = 2 * count - 2",
             "taken = 2 * count - 4", TABLES),
    Mutation("costs rounded down", "dquantcodec/tables.py", "np.ceil(np.round(bits * 1024, 6))",
             "np.floor(np.round(bits * 1024, 6))", DRIFT + " -k every_property"),
    Mutation("free symbols make the dearest letter", "dquantcodec/letters.py", "by_completion.argmax(axis=0)",
             "by_completion.argmin(axis=0)", GOLDEN),
    Mutation("symbols of a letter of two swapped", "dquantcodec/letters.py",
             "np.int32(source[j]) + base * np.int32(source[j + 1]))\n",
             "np.int32(source[j + 1]) + base * np.int32(source[j]))\n", ENCODE),
    Mutation("letters span heads", "dquantcodec/letters.py", "per_head = (head_dim + letter - 1) // letter",
             "per_head = max(1, head_dim // letter)", DECODE),
    # drift, plans, grids
    Mutation("the bisection stops early", "dquantcodec/drift.py", "while below + 1 < fits:", "while below + 9 < fits:",
             "tests/test_drift.py -k nearly_fills"),
    Mutation("budgets may be exceeded by a bit", "dquantcodec/drift.py", "if surplus <= 0:", "if surplus <= 1024:",
             EDGES),
    Mutation("thresholds rounded up", "dquantcodec/drift.py", "np.floor(crossing * ONE)", "np.ceil(crossing * ONE + 1)",
             "tests/test_drift.py -k 'tie or brute_force'"),
    Mutation("the fallback repeats the dearest letter", "dquantcodec/drift.py",
             "cheapest=table.levels_of[int(plan.frequencies.argmax())],",
             "cheapest=table.levels_of[int(plan.frequencies.argmin())],", "tests/test_drift.py -k 'no_room'"),
    Mutation("a container one word too small is taken", "dquantcodec/plan.py", "if needed > plan.words:",
             "if needed > plan.words + 1:", "tests/test_drift.py -k 'least_container_holds'"),
    Mutation("container words rounded down", "dquantcodec/profile.py",
             "return max(2, round(self.container * values / REFERENCE_VALUES / self.word_bytes))",
             "return max(2, int(self.container * values / REFERENCE_VALUES / self.word_bytes))",
             "tests/test_profile.py"),
    Mutation("offsets rounded to nearest", "dquantcodec/grid.py", "offset = round_down_half(low)",
             "offset = low.astype(np.float16)", "tests/test_means_grid.py"),
    Mutation("a refit is kept even if it hurts", "dquantcodec/grid.py",
             "np.where(better, candidate[:, 0], offset), np.where(better, candidate[:, 1], scale)",
             "candidate[:, 0], candidate[:, 1]", DRIFT + " -k refit"),
    Mutation("means of 128 steps", "dquantcodec/means.py", "LARGEST = np.float32(127)", "LARGEST = np.float32(128)",
             "tests/test_means_grid.py"),
    Mutation("exponents of the wrong sign", "dquantcodec/encode.py", "np.ldexp(x[page], -exponent)",
             "np.ldexp(x[page], exponent)", PAGE_ENCODER),
    Mutation("streams that are too long stay empty", "dquantcodec/encode.py", "        while over.any():",
             "        while False:", EDGES + " -k too_short"),
    # pages and reconstruction
    Mutation("page heads are not aligned", "dquantcodec/page_layout.py", "head_bytes=-(-at // ALIGNMENT) * ALIGNMENT,",
             "head_bytes=at,", PAGES),
    Mutation("old memory stays in pages", "dquantcodec/codec.py", "                part[:] = 0\n", "", PAGE_ENCODER),
    Mutation("words in the byte order of another machine", "dquantcodec/page.py",
             'fields.words.dtype.newbyteorder("<")', 'fields.words.dtype.newbyteorder(">")', PAGE_ENCODER),
    Mutation("mid-tread grids off by half a step", "dquantcodec/page.py", "np.float32(-(levels - 1) / 2) * scale",
             "np.float32(-levels / 2) * scale", PAGES),
    Mutation("exponents are not undone", "dquantcodec/reconstruct.py", "    if not exponent:\n", "    if True:\n",
             PAGES),
    Mutation("turned back by the wrong matrix", "dquantcodec/reconstruct.py", "rotation.transposed",
             "rotation.matrices", EDGES),
    Mutation("bytes of absent tokens are not checked", "dquantcodec/codec.py",
             "if behind.any() or head.any() or unused_bytes(fields, part.tokens):", "if behind.any() or head.any():",
             EDGES),
    Mutation("NaN scales are taken", "dquantcodec/faults.py", "finite = np.isfinite(fields.affine[tokens]).all(axis=1)",
             "finite = np.ones(tokens.stop - tokens.start, bool)", PAGES),
    # groups and trellis
    Mutation("a trellis takes a wrong turn", "dquantcodec/trellis.py", "4: ((0, 2), (2, 0), (1, 3), (3, 1)),",
             "4: ((0, 2), (2, 0), (1, 3), (1, 3)),", PAGES),
    Mutation("groups may exceed the room", "dquantcodec/group_drift.py", "if dearer <= room:", "if dearer <= room + 4:",
             EDGES + " -k groups_keep"),
    Mutation("paths are joined in different states", "dquantcodec/trellis_drift.py",
             "if fine_state[i] != coarse_state[i] or fine_letters", "if fine_letters",
             EDGES + " -k groups_keep"),
    Mutation("letters of a group in the wrong fields", "dquantcodec/group_prefix.py",
             "down = LENGTH_BITS + shifts[table, f]", "down = LENGTH_BITS + shifts[table, fields - 1 - f]", DECODE),
    # files
    Mutation("record headers without checksum", "dquantcodec/file/structs.py",
             "if magic != RECORD_MAGIC or crc != crc32c(data[:-4]):", "if magic != RECORD_MAGIC:",
             "tests/test_file_damage.py -k 'between_whole'"),
    Mutation("alignment wastes a block", "dquantcodec/file/structs.py", "return -(-size // step) * step",
             "return size // step * step + step", CRAFTED),
    Mutation("reserved header bytes are taken", "dquantcodec/file/header.py",
             'if reserved:\n        raise FormatError("reserved bytes of the header\'s start',
             'if False:\n        raise FormatError("reserved bytes of the header\'s start', CRAFTED),
    Mutation("records of another file are read", "dquantcodec/file/scan.py",
             "return record if record and record.header.salt == rules.header.salt else None", "return record",
             "tests/test_file_damage.py -k another_file"),
    Mutation("a half-written last record is kept", "dquantcodec/file/scan.py",
             "if records and rules.damage(data, records[-1]):", "if False:",
             "tests/test_file_damage.py -k last_record"),
    Mutation("tokens may be missing", "dquantcodec/file/sequences.py",
             "if first != end and not (self._gaps and first > end):", "if first < end and not self._gaps:", CRAFTED),
    Mutation("epochs may fall", "dquantcodec/file/records.py", "self._require(head.epoch >= epoch,",
             "self._require(True,", CRAFTED),
    Mutation("a run of too many windows is taken", "dquantcodec/file/records.py", "windows <= MAX_RUN",
             "windows <= MAX_RUN + 1", EDGES),
    Mutation("the last page is not cut", "dquantcodec/file/runs.py", "layout.bytes_for(used))",
             "layout.page_bytes)", "tests/test_file_specification.py -k both-means"),
    Mutation("page checksums are not compared", "dquantcodec/file/payload.py",
             "if crc32c(stored[offset : offset + size]) != crcs[window]:", "if False:",
             "tests/test_file_damage.py -k names_the_damaged_place"),
    Mutation("planes may be longer than they can be", "dquantcodec/file/rows.py",
             "len(sizes) != dtype.itemsize or max(sizes) > values or", "len(sizes) != dtype.itemsize or", CRAFTED),
    Mutation("one recent token too few stays exact", "dquantcodec/file/writer.py",
             "max(0, pending.waiting - recent)", "max(0, pending.waiting - recent + 1)", MODEL),
    Mutation("deep JSON is parsed", "dquantcodec/file/info.py",
             "if _depth(text) > MAX_JSON_DEPTH:\n                raise", "if False:\n                raise", EDGES),
    Mutation("an index for another length is used", "dquantcodec/file/scan.py",
             "or trailer.file_bytes != data.nbytes or", "or", CRAFTED + " -k lying_trailers"),
    Mutation("padding is not verified", "dquantcodec/file/verify.py",
             "if np.frombuffer(data[record.payload + start : record.payload + stop], np.uint8).any():", "if False:",
             EDGES),
    Mutation("a class may be rarer in the middle", "dquantcodec/grouping.py",
             "            and max(self.weights) == upper[0]\n", "", GROUPED),
)  # fmt: skip


def apply(mutation: Mutation, root: Path) -> str:
    """Break the code below ``root``; returns the file as it was.  Raises ValueError unless the anchor is unique."""
    path = root / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.what}: {text.count(mutation.old)} places in {mutation.file} read {mutation.old!r}")
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    return text


def run_tests(root: Path, tests: str) -> tuple[str, float]:
    """What notices first (a test's name, or that tests cannot be collected), "" if nothing; and the seconds."""
    begun = time.monotonic()
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(root, tests, writer))
    child.start()
    writer.close()
    noticed = "a test that never ends"
    if reader.poll(SECONDS):
        try:
            noticed = reader.recv()
        except EOFError:
            noticed = "a crash"
    if child.is_alive():
        child.join(5)
        child.terminate()
    child.join()
    return noticed, time.monotonic() - begun


def _in_child(root: Path, tests: str, writer: multiprocessing.connection.Connection) -> None:
    """In a process of its own, which already has the libraries but not the package: one run of pytest."""
    import pytest

    os.chdir(root)
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = str(root)
    arguments = [part.strip("'") for part in re.findall(r"'[^']*'|\S+", tests)]
    said = io.StringIO()
    quiet = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    with redirect_stdout(said), redirect_stderr(said):
        status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-W", quiet, *arguments])
    if status == pytest.ExitCode.OK:
        noticed = ""
    elif status == pytest.ExitCode.NO_TESTS_COLLECTED:
        noticed = "NO TESTS"
    else:
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said.getvalue(), re.MULTILINE)
        noticed = failed[1] if failed else f"pytest status {int(status)}"
    writer.send(noticed)
    writer.close()


def run(chosen: Sequence[int], kept: Path | None = None) -> list[dict[str, object]]:
    """Results of the mutations numbered ``chosen`` from 1; tests must pass first on the code as it is.

    Each is added to the file ``kept`` at once, in place of an older one of the same number.
    """
    results = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
            elif source.exists():
                shutil.copy(source, root / name)
        for tests in dict.fromkeys(MUTATIONS[number - 1].tests for number in chosen):
            noticed, seconds = run_tests(root, tests)
            print(f"{seconds:6.1f} s  as it is: {tests}: {noticed or 'passes'}", flush=True)
            if noticed:
                raise SystemExit(f"the tests fail on the code as it is: {tests}: {noticed}")
        for number in chosen:
            mutation = MUTATIONS[number - 1]
            before = apply(mutation, root)
            noticed, seconds = run_tests(root, mutation.tests)
            (root / mutation.file).write_text(before, encoding="utf-8")
            print(f"{seconds:6.1f} s  {number}. {mutation.what}: {noticed or 'NOT NOTICED'}", flush=True)
            results.append({"number": number, **asdict(mutation), "noticed_by": noticed, "seconds": round(seconds, 1)})
            if kept:
                keep(kept, results)
    return results


def keep(path: Path, results: Sequence[dict[str, object]]) -> None:
    """Put ``results`` into the JSON file at ``path``, beside those of other mutations."""
    stored = json.loads(path.read_text(encoding="utf-8"))["mutations"] if path.exists() else []
    by_number = {row["number"]: row for row in [*stored, *results]}
    facts = {
        "what": "mutations of the code and the tests that notice them",
        "command": "python tools/mutations.py --json benchmarks/results/mutations.json",
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "mutations": [by_number[number] for number in sorted(by_number)],
    }
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def table(results: dict[str, object]) -> str:
    """The table of the documentation."""
    rows = results["mutations"]
    assert isinstance(rows, list)
    noticed = sum(bool(row["noticed_by"]) for row in rows)
    lines = [
        f"{noticed} of {len(MUTATIONS)} are noticed "
        f"(`{results['command']}`, {results['machine']}).", "",
        "| | what is broken | in | noticed by |", "|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        by = row["noticed_by"].removeprefix("tests/") or "**nothing**"
        by = re.sub(r"\[.*", "", by)
        where = row["file"].removeprefix("dquantcodec/")
        lines.append(f"| {row['number']} | {row['what']} | `{where}` | `{by}` |")
    return "\n".join(lines)


def write_table(page: Path, results: dict[str, object]) -> None:
    """Put the table between the page's two marks."""
    generated_pages.rewrite(page, {"mutations": table(results)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    chosen = parser.parse_args()
    if chosen.page:
        write_table(chosen.page, json.loads((chosen.json or RESULTS).read_text(encoding="utf-8")))
        return 0
    os.environ["NUMBA_DISABLE_JIT"] = "1"
    os.environ["HYPOTHESIS_PROFILE"] = "mutations"
    # Everything slow to import, once, before the children are made.
    import google_crc32c  # noqa: F401
    import hypothesis
    import ml_dtypes  # noqa: F401
    import numba  # noqa: F401
    import pytest  # noqa: F401
    import safetensors.numpy  # noqa: F401
    import zstandard  # noqa: F401

    # The same cases every time, and no search for a smaller one: that a test fails is all we want to know.
    hypothesis.settings.register_profile(
        "mutations", max_examples=60, derandomize=True, deadline=None, phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    results = run(chosen.only or range(1, len(MUTATIONS) + 1), chosen.json)
    return int(any(not row["noticed_by"] for row in results))


if __name__ == "__main__":
    sys.exit(main())

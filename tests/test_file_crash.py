"""What is left of a file when its writer, its disk or its machine fails.

Promised: everything flushed is there, bit for bit, or opening or reading reports an error; never other data.  Here the
stronger half is asserted, as nothing damages what was synced: everything flushed is there.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash_file import Trace, as_seen, crashed
from file_support import FILE_ID, SMALL, part, tensors

import dquantcodec.file as dqkv
from dquantcodec.errors import DQuantError
from dquantcodec.file import Layer, append, appending, reader, scan
from dquantcodec.file.header import Header, parse_header
from dquantcodec.file.records import RecordRules
from dquantcodec.file.scan import Log, read_log
from dquantcodec.file.sequences import sequences
from dquantcodec.file.structs import Bytes

LAYERS = [Layer(2, 8, "bfloat16", SMALL), Layer(1, 5, "float32", storage="exact")]
PAIRS = [tensors(LAYERS, 400, seed) for seed in (0, 1)]
#: How many crashes are tried at every call of the writer, on the medium and within a call.
CRASHES = 36


def work(writer: Any, done: Callable[[], None]) -> None:
    """A session with everything in it: flushes of few and of many tokens, sealing, rewinds, two sequences, closing."""
    taken = [writer.tokens(0), writer.tokens(1)]

    def take(count: int, number: int = 0) -> None:
        writer.append(*part(PAIRS[number], taken[number], taken[number] + count), number)
        taken[number] += count

    for count in (5, 1, 1, 30):
        take(count)
        writer.flush()
        done()
    take(3, 1)
    take(70)
    writer.flush()
    done()
    for tokens in (90, 40):  # into rows, then into a page
        writer.rewind(tokens)
        done()
        take(33)
    take(40, 1)
    writer.flush()
    done()
    writer.close()
    done()


@dataclass
class Session:
    """One undisturbed session: its trace, the records after it, and what was promised when."""

    trace: Trace
    after: bytes
    log: Log
    rules: RecordRules
    #: (calls made, records that must be there from then on)
    promises: list[tuple[int, int]] = field(default_factory=list)

    def least(self, calls: int) -> int:
        return max((records for made, records in self.promises if made <= calls), default=0)

    def check(self, image: bytes, calls: int, seen: bool = False) -> Log:
        """``image`` holds what was promised after ``calls`` calls and is a state between two records."""
        data = memoryview(image)
        log = read_log(data, self.rules)
        sequences(log.records, log.torn, self.rules)
        assert self.least(calls) <= len(log.records) <= len(self.log.records)
        for record, ideal in zip(log.records, self.log.records):
            assert record == ideal
        end = log.records[-1].payload_end if log.records else self.rules.header.block_bytes
        assert image[:end] == self.after[:end] or self._same_but_padding(data, log)
        return log

    def _same_but_padding(self, data: Bytes, log: Log) -> bool:
        """Only records know what of them is padding; that of the last one may have been garbled unseen."""
        return all(
            data[record.offset : record.payload_end].tobytes() == self.after[record.offset : record.payload_end]
            for record in log.records
        )


def session(path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    trace = Trace(path.read_bytes())
    data = memoryview(trace.before)
    rules = RecordRules(header_of(data))
    promises = [(0, len(read_log(data, rules).records))]
    with monkeypatch.context() as patch:
        patch.setattr(appending, "DiskFile", trace.disk)
        writer = append(path, _record_target=1)
        work(writer, lambda: promises.append((len(trace.calls), len(writer._log.headers))))
    after = path.read_bytes()
    log = read_log(memoryview(after), rules)
    assert log.indexed and promises[-1][1] == len(log.records)
    return Session(trace, after, log, rules, promises)


_headers: dict[bytes, Header] = {}


def header_of(data: Bytes) -> Header:
    """The header, parsed once: what codecs know of a plan is kept by plan, and takes longer to find than a session."""
    block = data[: int.from_bytes(data[12:16], "little")].tobytes()
    if block not in _headers:
        _headers[block] = parse_header(data)
    return _headers[block]


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A closed file of 20 tokens, two sequences."""
    monkeypatch.setattr(reader, "parse_header", header_of)
    path = tmp_path / "x.dqkv"
    with dqkv.create(path, LAYERS, sinks=1, recent=6, sequences=2, _file_id=FILE_ID) as writer:
        writer.append(*part(PAIRS[0], 0, 20))
    return path


def test_a_crash_at_any_call_loses_nothing_flushed(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = session(begun, monkeypatch)
    rng = np.random.default_rng(0)
    schedules, outcomes = 0, set()
    for calls in range(len(one.trace.calls) + 1):
        for attempt in range(CRASHES):
            log = one.check(crashed(one.trace, calls, rng, within=attempt % 2 == 1), calls)
            outcomes.add((calls, len(log.records)))
            schedules += 1
        one.check(as_seen(one.trace, calls, rng), calls)
    assert schedules >= 2000
    # The schedules do differ: the same crash ends before and behind the record under way.
    assert len(outcomes) > 1.2 * len(one.trace.calls)


def test_going_on_after_a_crash_and_crashing_again(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = session(begun, monkeypatch)
    rng = np.random.default_rng(1)
    for calls in rng.integers(0, len(one.trace.calls), 15):
        image = crashed(one.trace, int(calls), rng, within=True)
        log = one.check(image, int(calls))
        begun.write_bytes(image)
        with dqkv.open(begun) as opened:
            before = [sequence.tokens for sequence in opened.sequences]
            rows = [sequence.layers[1].key[:].copy() for sequence in opened.sequences]
            coded = [sequence.layers[0].value[:].copy() for sequence in opened.sequences]
        again = session(begun, monkeypatch)
        assert again.log.records[: len(log.records)] == log.records
        for second in rng.integers(0, len(again.trace.calls) + 1, 9):
            again.check(crashed(again.trace, int(second), rng, within=True), int(second))
        with dqkv.open(begun, mode="strict") as opened:
            assert {finding.code for finding in opened.verify()} <= {"padding-nonzero"}
            for number, sequence in enumerate(opened.sequences):
                kept = min(before[number], 40) if number == 0 else before[number]
                assert (sequence.layers[1].key[:kept] == rows[number][:kept]).all()
                paged = [
                    s for s in sequence.layers[0].stretches if s.paged and s.record.header.number < len(log.records)
                ]
                for stretch in paged:
                    piece = slice(stretch.first, min(stretch.end, kept))
                    assert sequence.layers[0].value[piece].tobytes() == coded[number][piece].tobytes()


@pytest.mark.parametrize("failure", ["short", "full", "write", "sync"])
def test_a_disk_that_fails_at_any_call(begun: Path, monkeypatch: pytest.MonkeyPatch, failure: str) -> None:
    start = begun.read_bytes()
    one = session(begun, monkeypatch)
    rng = np.random.default_rng(2)
    for fail_at in range(one.trace.count):
        begun.write_bytes(start)
        trace = Trace(start, fail_at=fail_at, failure=failure, for_good=bool(fail_at % 2) and failure != "short")
        promises = [0]
        with monkeypatch.context() as patch:
            patch.setattr(appending, "DiskFile", trace.disk)
            try:
                writer = append(begun, _record_target=1)
                work(writer, lambda w=writer, p=promises: p.append(len(w._log.headers)))  # type: ignore[misc]
            except OSError as error:
                assert failure != "short" and error.errno in (5, 28)
        if failure == "short":
            assert begun.read_bytes() == one.after
            continue
        # What the process sees, and what a crash right then leaves, both hold what was promised.
        for image in (begun.read_bytes(), crashed(trace, len(trace.calls), rng)):
            log = read_log(memoryview(image), one.rules)
            assert promises[-1] <= len(log.records)
            # Closing after an error lists what is whole, so an INDEX may stand where a later record would have been.
            same = [a == b for a, b in zip(log.records, one.log.records)]
            assert all(same[:-1]) and (same[-1] or log.records[-1].header.type_name == "INDEX")
        begun.write_bytes(image)
        with append(begun) as writer:
            writer.append(*part(PAIRS[0], 0, 3))
        with dqkv.open(begun, mode="strict") as opened:
            assert opened.log.records[: len(log.records)] == log.records


def test_bytes_behind_the_log_are_covered(begun: Path) -> None:
    """What an interrupted writer left may reach further than the index of the next: nothing is cut, all is zeroed."""
    for tail in (1, 4096, 9000, 3 << 20):
        data = begun.read_bytes()
        begun.write_bytes(data + b"\xff" * tail)
        with dqkv.open(begun) as opened:
            assert opened.torn
            append(begun).close()
            # The mapped file did not shrink: this would end the process otherwise.
            assert {finding.code for finding in opened.verify()} <= {"log-torn"}
        with dqkv.open(begun, mode="strict") as opened:
            assert opened.tokens == 20 and opened.indexed and list(opened.verify()) == []
            assert (opened.log.records[-2].header.type_name == "FILL") == (tail > 4096)
        assert b"\xff" * 64 not in begun.read_bytes()[len(data) :]


def test_a_lost_sync_is_reported(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A medium that lost a record it had reported as synced: an error, or the tokens before it; never other tokens."""
    one = session(begun, monkeypatch)
    rng = np.random.default_rng(3)
    content = [record for record in one.log.records if record.header.type_name != "INDEX"]
    for record in content[2:-1]:
        image = bytearray(one.after)
        image[record.offset : record.end] = rng.bytes(record.end - record.offset)
        with pytest.raises(DQuantError) as caught:
            read_log(memoryview(image[: one.log.records[-1].offset]), one.rules)
        assert caught.value.code == "record-header"


def test_a_reader_that_is_overtaken(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer finishes a record, and the next, after a reader looked for the first: no damage, as it looks again."""
    one = session(begun, monkeypatch)
    record = one.log.records[-3]
    header = one.after[record.offset : record.payload]
    data = memoryview(bytearray(one.after[: one.log.records[-1].offset]))
    data[record.offset : record.payload] = bytes(len(header))
    with pytest.raises(DQuantError):
        read_log(data, one.rules)
    search = scan.later_records

    def slow(*arguments: Any) -> Any:
        found = list(search(*arguments))
        data[record.offset : record.payload] = header
        return iter(found)

    monkeypatch.setattr(scan, "later_records", slow)
    assert read_log(data, one.rules).records == one.log.records[:-1]


WRITER = """
import sys
sys.path[:0] = sys.argv[2:]
from file_support import SMALL, part, tensors
import dquantcodec.file as dqkv
with dqkv.append(sys.argv[1]) as writer:
    first = taken = writer.tokens()
    pairs = tensors([layer for layer in writer._header.layers], 400)
    while True:
        count = 1 + taken % 5
        writer.append(*part(pairs, taken, taken + count))
        taken += count
        writer.flush()
        print(taken, flush=True)
        if taken > first + 110:
            sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no signal that nothing can catch")
def test_killing_a_writer(begun: Path) -> None:
    """``kill -9`` of a real process at any moment, while this one keeps opening the file."""
    rng = np.random.default_rng()
    flushed = 20
    for kill in range(3):
        folders = [str(Path(__file__).parent), *sys.path]
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(begun), *folders],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout
        until = flushed + int(rng.integers(10, 90))
        while flushed < until and (line := process.stdout.readline()):
            flushed = int(line)
            with dqkv.open(begun) as opened:
                assert opened.torn and opened.tokens >= flushed
                check(opened, kill)
        time.sleep(float(rng.uniform(0, 0.01)))
        process.kill()
        rest, complaint = process.communicate()
        assert process.returncode == -signal.SIGKILL, complaint
        flushed = max([flushed, *map(int, rest.split())])
        with dqkv.open(begun) as opened:
            assert opened.torn and opened.tokens >= flushed
            check(opened, kill)
            flushed = opened.tokens
    append(begun).close()
    with dqkv.open(begun, mode="strict") as opened:
        assert opened.tokens == flushed and list(opened.verify()) == []
        check(opened, 3)


def check(opened: Any, epochs: int) -> None:
    """The exact layer is what was given; so are the coded tokens that are not in pages; pages are near it."""
    tokens = opened.tokens
    for layer, pair in zip(opened.layers, PAIRS[0]):
        rows = np.asarray(pair[0])[:tokens]
        read = layer.key[:]
        for stretch in layer.stretches:
            piece = slice(stretch.first, stretch.end)
            if stretch.paged:
                error = read[piece].astype(np.float64) - rows[piece].astype(np.float64)
                assert (error**2).mean() < 0.2
            else:
                assert read[piece].tobytes() == rows[piece].tobytes()
    assert max((record.header.epoch for record in opened.log.records), default=0) <= epochs + 1

"""Edges that random cases seldom meet: full containers, estimates that were too low, the last bits of a budget."""

from __future__ import annotations

import numpy as np
import pytest

from dquantcodec import drift, encode, group_prefix
from dquantcodec.codec import Codec, Pages
from dquantcodec.errors import FormatError, LimitError
from dquantcodec.file.header import parse_header
from dquantcodec.file.info import Info
from dquantcodec.file.records import Record, RecordRules
from dquantcodec.file.structs import MAX_JSON_DEPTH, MAX_RUN, PAGES, RecordHeader
from dquantcodec.group_arrays import group_arrays
from dquantcodec.group_drift import drift_grouped
from dquantcodec.group_grid import grouped_positions, grouped_scale
from dquantcodec.plan import StreamPlan, budget, grouped, make_plan
from dquantcodec.profile import Profile, StreamProfile
from dquantcodec.testing import ContainerPlan, library_decode, plain_decode, plain_encode
from dquantcodec.testing.drifting import DriftCase, drift_by_library, drift_keeps_its_budget
from dquantcodec.testing.files import file_bytes, reader_of
from dquantcodec.testing.pages import decode_page
from dquantcodec.testing.plans import rotated_plan, small_plan
from dquantcodec.testing.tensors import HOSTILE, hostile
from dquantcodec.trellis_drift import drift_dependent


def test_a_container_may_be_full_to_its_last_bit() -> None:
    plan = ContainerPlan("prefix", 2, 1, 8, (128, 128), 1, 63, 2)
    symbols = [1 - i % 2 for i in range(63)]
    data = plain_encode(plan, symbols)
    assert data is not None and data[-1] & 0x80
    assert plain_decode(plan, data) == library_decode(plan, data) == (symbols, None)


def test_streams_that_were_estimated_too_short_are_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The true size decides: with a budget far too generous every container still holds its stream."""
    stream = StreamProfile(6, 300, "rans", precision=12)
    plan = make_plan(Profile(stream, stream, window=32, substreams=1), 2, 20)
    asked = []

    def generous(stream: StreamPlan) -> int:
        asked.append(stream)
        return budget(stream) + 12 * 1024

    monkeypatch.setattr(drift, "budget", generous)
    monkeypatch.setattr(encode, "budget", generous)
    x = np.random.default_rng(0).uniform(-1, 1, (6, 2, 20)).astype(np.float32)
    codec = Codec(plan)
    pages = codec.encode(x, x)
    assert len(asked) == 4, "both kinds were drifted once, and then had streams to shorten"
    assert codec.check(pages) == []
    expected = decode_page(pages.data[0].tobytes(), plan, 6)
    assert codec.decode_kind(pages, "key").tobytes() == expected["key"].tobytes()


@pytest.mark.parametrize("dim", [12, 20, 28])
def test_blocks_of_every_construction_turn_back(dim: int) -> None:
    stream = StreamProfile(8, 560, precision=12)
    codec = Codec(make_plan(Profile(stream, stream, window=32, substreams=1), 1, dim))
    x = np.random.default_rng(dim).standard_normal((3, 1, dim)).astype(np.float32)
    pages = codec.encode(x, x)
    decoded = codec.decode_kind(pages, "value")
    assert decoded.tobytes() == decode_page(pages.data[0].tobytes(), codec.plan, 3)["value"].tobytes()
    assert np.square(decoded - x).sum() < 0.1 * np.square(x).sum()


def test_bytes_of_absent_tokens_are_found() -> None:
    codec = Codec(rotated_plan())
    x = np.random.default_rng(0).standard_normal((5, 2, 8)).astype(np.float32)
    pages = codec.encode(x, x)
    layout = codec.layout
    for at in (layout.key.words_at + 4 * 7, layout.value.affine_at + 4 * 5):
        data = pages.data.copy()
        data[0, layout.head_bytes + at] = 1
        assert "page-unused" in {code for *_, code in codec.check(Pages(data, 5))}, at


def tight(states: int) -> StreamPlan:
    """Keys of the small plan with no word to spare: many hostile streams drift."""
    key = small_plan(states).key
    assert key.grouping is not None
    return grouped(key.words - 1, 1, key.mean, key.step, key.gain, key.grouping)


def positions_of(stream: StreamPlan, kind: str, tokens: int) -> np.ndarray:
    assert stream.grouping is not None
    x = hostile(kind, tokens, 2, 8, 0, small_plan().signs).clip(-60000, 60000).reshape(tokens, -1)
    return grouped_positions(x, grouped_scale(x, stream.step, stream.grouping), stream.grouping)


@pytest.mark.parametrize("states", [1, 4])
def test_groups_keep_their_budget_and_decode_to_the_levels_drift_chose(states: int) -> None:
    stream = tight(states)
    grouping = stream.grouping
    assert grouping is not None
    arrays = group_arrays(grouping)
    tables = [table for _, _, count, table in arrays.groups.tolist() for _ in range(count)]
    channels = arrays.row_channel.reshape(-1)
    coded = channels >= 0
    middle = arrays.middle[channels[coded]].astype(np.int16)
    tokens, drifted = 32, 0
    for kind in HOSTILE:
        position = positions_of(stream, kind, tokens)
        letters, levels, rungs = (drift_grouped if states == 1 else drift_dependent)(position, stream)
        bits = arrays.lengths[arrays.first[tables] + letters.astype(np.int64)].sum(axis=1)
        assert int(bits.max()) <= budget(stream) // 1024
        words = group_prefix.encode(letters, stream)
        found, status = group_prefix.decode_by_token(words, stream, strict=True)
        assert not status[:tokens].any()
        assert (found[:tokens, channels[coded]] == levels[:, coded] + middle).all()
        drifted += int((rungs > 0).sum())
    assert drifted > 32, "there is nothing to see in streams that fit as they are"


@pytest.mark.parametrize("coder", ["rans", "prefix"])
def test_budgets_are_kept_to_the_last_fraction_of_a_bit(coder: str) -> None:
    stream = StreamProfile(6, 400, coder, precision=12)
    plan = make_plan(Profile(stream, stream, window=32, substreams=1), 2, 20)
    position = np.random.default_rng(0).integers(0, 5 << 16, (12, 40)).astype(np.int32)
    for budget_bits in np.linspace(budget(plan.key) / 1024, budget(plan.key) / 1024 + 40, 12):
        case = DriftCase(plan.key, 20, position, int(1024 * budget_bits))
        drift_keeps_its_budget(drift_by_library, case)


def test_json_may_be_nested_sixteen_deep_and_no_deeper() -> None:
    def nested(depth: int) -> bytes:
        return b'{"metadata":{"a":' + b"[" * (depth - 2) + b"]" * (depth - 2) + b"}}"

    assert "a" in Info.parse(nested(MAX_JSON_DEPTH)).metadata
    with pytest.raises(FormatError) as caught:
        Info.parse(nested(MAX_JSON_DEPTH + 1))
    assert caught.value.code == "header-json"


def test_a_record_holds_so_many_windows_and_no_more() -> None:
    rules = RecordRules(parse_header(memoryview(file_bytes(["rotated"], 0))))
    window = rules.run.window

    def check(windows: int) -> None:
        tokens = windows * window
        head = RecordHeader(PAGES, rules.run.payload_bytes(tokens), 0, tokens, 0, 0, rules.header.salt, 0)
        rules.check(Record(4096, head), number=0, epoch=0, end=1 << 40)

    check(MAX_RUN)
    with pytest.raises(LimitError) as caught:
        check(MAX_RUN + 1)
    assert caught.value.code == "limit-run"


def test_verification_finds_padding_that_is_not_zero() -> None:
    data = bytearray(file_bytes(["exact"], 3))
    record = reader_of(bytes(data)).log.records[0]
    data[record.end - 1] = 1
    assert [finding.code for finding in reader_of(bytes(data)).verify()] == ["padding-nonzero"]

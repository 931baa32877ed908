"""Any number of threads: the same bytes, the same results, and of several faults the first."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache
from threading import Event, Lock
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dquantcodec import attend
from dquantcodec.codec import Codec, Pages
from dquantcodec.decode import RowDecoder, decode_levels
from dquantcodec.errors import ChecksumError, FormatError, InputError
from dquantcodec.page import read_kind, tile_words
from dquantcodec.page_layout import KINDS
from dquantcodec.plan import Plan, make_plan
from dquantcodec.profile import Profile, StreamProfile
from dquantcodec.reconstruct import reconstruct
from dquantcodec.shares import by_threads, window_shares
from dquantcodec.testing.plans import rotated_plan, small_plan

THREADS = (2, 3, 16)
#: Windows of 128: none is full, one more than full, fewer and more than threads.
COUNTS = (0, 1, 33, 128, 129, 700, 2500)

MEANS = Profile(StreamProfile(8, 340, "rans", mean=True), StreamProfile(8, 340, "rans", mean=True), window=32)
MIXED = Profile(StreamProfile(8, 340, "rans", mean=True), StreamProfile(6, 300), window=64)


@lru_cache(maxsize=1)
def plans() -> dict[str, Plan]:
    """Both coders and both grids, means of values, both coders in one plan, classes without and with a trellis."""
    named = {name: make_plan(Profile.named(name), 2, 32) for name in ("2.26", "paper-2.26")}
    made = {"means": make_plan(MEANS, 2, 32), "mixed": make_plan(MIXED, 2, 32)}
    return {**named, **made, "rotated": rotated_plan(), "classes": small_plan(), "trellis": small_plan(4)}


NAMES = ("2.26", "paper-2.26", "means", "mixed", "rotated", "classes", "trellis")


def tensors(plan: Plan, tokens: int, seed: int = 0) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, tokens, plan.kv_heads, plan.head_dim)).astype(np.float32)


# --- Sharing out ----------------------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.integers(0, 5000), st.integers(1, 300), st.integers(1, 40))
def test_shares_are_whole_windows_and_all_of_them(start: int, tokens: int, window: int, count: int) -> None:
    stop = start + tokens
    shares = window_shares(start, stop, window, count)
    assert [i for first, last in shares for i in range(first, last)] == [*range(start, stop)]
    assert all(first % window == 0 for first, _ in shares[1:])
    windows = [-(-last // window) - first // window for first, last in shares]
    assert len(shares) == min(count, sum(windows))
    assert not shares or max(windows) - min(windows) <= 1


@pytest.mark.parametrize("threads", [1, *THREADS])
def test_results_come_in_order_and_no_more_threads_are_busy_than_asked_for(threads: int) -> None:
    lock, busy, most = Lock(), 0, 0

    def work(item: int) -> int:
        nonlocal busy, most
        with lock:
            busy += 1
            most = max(most, busy)
        Event().wait(0.001)
        with lock:
            busy -= 1
        return item * item

    assert by_threads(work, range(50), threads) == [i * i for i in range(50)]
    assert 1 <= most <= threads
    assert by_threads(work, [], threads) == []


def test_the_first_of_several_failures_is_raised_and_what_comes_after_it_is_not_begun() -> None:
    failed, begun = Event(), []

    def work(item: int) -> None:
        begun.append(item)
        if item == 0:
            # The later item fails first.
            assert failed.wait(60)
            raise ValueError("first")
        failed.set()
        raise ValueError("second")

    with pytest.raises(ValueError, match="first"):
        by_threads(work, range(9), 2)
    assert sorted(begun) == [0, 1]


def test_work_that_shares_out_its_own_work_does_not_wait_for_itself() -> None:
    def outer(item: int) -> int:
        return sum(by_threads(lambda inner: item * inner, range(5), 3))

    assert by_threads(outer, range(20), 3) == [10 * i for i in range(20)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_finds_threads_of_its_own() -> None:
    code = """
import os, sys
from dquantcodec import shares
square = lambda x: x * x
assert shares.by_threads(square, range(9), 3) == [x * x for x in range(9)]
child = os.fork()
if child == 0:
    inherited = shares._found is not None
    os._exit(inherited or shares.by_threads(square, range(9), 3) != [x * x for x in range(9)])
sys.exit(os.waitpid(child, 0)[1] != 0)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


# --- The same bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", COUNTS)
@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_threads_gives_the_same(name: str, tokens: int) -> None:
    plan = plans()[name]
    x = tensors(plan, tokens)
    # Windows of another exponent among the rest.
    x[0, 130:140] *= 1e6
    query = np.random.default_rng(1).standard_normal((2 * plan.kv_heads, plan.head_dim)).astype(np.float32)
    one = Codec(plan)
    pages = one.encode(*x)
    start, stop = tokens // 7, tokens - tokens // 9
    wide = np.zeros((plan.kv_heads, stop - start, plan.head_dim), np.float16)
    for threads in THREADS:
        many = Codec(plan, threads=threads)
        assert many.encode(*x).data.tobytes() == pages.data.tobytes()
        assert many.encode(*np.asfortranarray(x)).data.tobytes() == pages.data.tobytes()
        for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
            for got, want in zip(
                many.decode(pages, start, stop, dtype=dtype), one.decode(pages, start, stop, dtype=dtype)
            ):
                assert got.tobytes() == want.tobytes()
        many.decode_kind(pages, "value", start, stop, out=wide.transpose(1, 0, 2))
        assert (wide.transpose(1, 0, 2) == one.decode_kind(pages, "value", start, stop, dtype=np.float16)).all()
        for got, want in zip(many.attend(query, pages), one.attend(query, pages)):
            assert got.tobytes() == want.tobytes()
        assert many.check(pages) == []


@pytest.mark.parametrize("name", NAMES)
def test_parts_do_not_change_a_byte(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plans()[name]
    x = tensors(plan, 1000)
    x[1, 300:400] *= 1e5
    codec = Codec(plan)
    pages, decoded = codec.encode(*x), codec.decode(codec.encode(*x), dtype=np.float64)
    for got, put in zip(decoded, x.astype(np.float64)):
        for first in range(0, 1000, plan.window):
            page = slice(first, first + plan.window)
            assert ((got[page] - put[page]) ** 2).sum() < 0.5 * (put[page] ** 2).sum(), "rows of another size"
    for values in (1, 3 * plan.window * plan.values, 1 << 40):
        monkeypatch.setattr("dquantcodec.codec.ENCODED_VALUES", values)
        monkeypatch.setattr("dquantcodec.codec.DECODED_VALUES", values)
        assert codec.encode(*x).data.tobytes() == pages.data.tobytes()
        for got, want in zip(codec.decode(pages, dtype=np.float64), decoded):
            assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_the_stages(name: str) -> None:
    plan = plans()[name]
    codec = Codec(plan)
    tokens, tiles = 5 * plan.window, slice(0, codec.layout.tiles)
    pages = codec.encode(*tensors(plan, tokens))
    for kind in KINDS:
        stream = getattr(plan, kind)
        fields = read_kind(pages.data, plan, kind, tiles)
        levels, status = decode_levels(fields, plan, stream)
        want = reconstruct(fields, levels, plan, stream)
        decoder = RowDecoder(
            read_kind(pages.data, plan, kind, tiles, words=False), tile_words(pages.data, plan, kind), plan, stream
        )
        for start, stop in ((0, tokens), (1, tokens - 1), (31, 33), (40, 41), (64, 96)):
            out = np.empty(want[start:stop].shape, np.float32)
            decoder.rows(start, stop, out)
            assert out.tobytes() == want[start:stop].tobytes()
        assert not decoder.status.any() and not status.any()


@pytest.mark.parametrize("name", NAMES)
def test_attention_over_many_parts_is_that_of_the_stages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plans()[name]
    codec = Codec(plan, threads=2)
    monkeypatch.setattr("dquantcodec.codec.ATTENDED_VALUES", 2 * plan.window * plan.values)
    tokens = 9 * plan.window + 5
    pages = codec.encode(*tensors(plan, tokens))
    query = np.random.default_rng(1).standard_normal((plan.kv_heads, plan.head_dim)).astype(np.float32)
    problem = attend.Problem.of(query, plan, None)
    partial = attend.Partial.empty(problem)
    for part in codec._parts(pages, 0, tokens, 1):
        levels = [
            attend.Levels.of(*codec._levels(pages, kind, part), part.inside, getattr(plan, kind)) for kind in KINDS
        ]
        attend.merge(partial, attend.over_levels(problem, *levels))
    for got, want in zip(codec.attend(query, pages), problem.shaped(*attend.finish(problem, partial, plan))):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_pages_may_lie_anywhere_and_be_read_only(name: str) -> None:
    plan = plans()[name]
    codec = Codec(plan, threads=2)
    pages = codec.encode(*tensors(plan, 300))
    query = np.ones((plan.kv_heads, plan.head_dim), np.float32)
    shifted = np.frombuffer(b"x" + pages.data.tobytes(), np.uint8)[1:].reshape(pages.data.shape)
    spread = np.zeros((len(pages.data), 2 * pages.data.shape[1]), np.uint8)[:, : pages.data.shape[1]]
    spread[:] = pages.data
    # Memory that is not aligned would be another type to Numba, and have every kernel compiled again.
    assert tile_words(shifted, plan, "key").data.flags.aligned
    for data in (shifted, spread):
        for got, want in zip(codec.decode(Pages(data, 300)), codec.decode(pages)):
            assert got.tobytes() == want.tobytes()
        for got, want in zip(codec.attend(query, Pages(data, 300)), codec.attend(query, pages)):
            assert got.tobytes() == want.tobytes()


# --- The first fault ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, *THREADS])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_the_first_page_with_a_number_that_is_none_is_named(threads: int, bad: float) -> None:
    plan = plans()["2.26"]
    x = tensors(plan, 1500)
    # Of one page that of the keys comes first, wherever it is.
    for kind, token in ((0, 1400), (1, 520), (0, 600), (1, 140), (0, 255)):
        x[kind, token, 1, 7] = bad
    with pytest.raises(InputError) as caught:
        Codec(plan, threads=threads).encode(*x)
    assert caught.value.where == {"kind": "key", "token": 255, "head": 1, "channel": 7}
    x[0, 255] = 0
    with pytest.raises(InputError) as caught:
        Codec(plan, threads=threads).encode(*x)
    assert caught.value.where == {"kind": "value", "token": 140, "head": 1, "channel": 7}


def broken(codec: Codec, pages: Pages, faults: dict[tuple[str, int], str]) -> Pages:
    """A copy with a fault at a token of a kind: its scale, or its words."""
    data, plan, layout = pages.data.copy(), codec.plan, codec.layout
    for (kind, token), fault in faults.items():
        stream, at = getattr(plan, kind), getattr(layout, kind)
        page, row = divmod(token, plan.window)
        tile = data[page, layout.head_bytes :].reshape(layout.tiles, -1)[row // 32]
        if fault == "scale":
            tile[at.affine_at : at.end].view("<u2").reshape(32, stream.affine)[row % 32, 0] = 0x7C00
        else:
            words = tile[at.words_at : at.affine_at].view(f"<u{stream.word_bytes}").reshape(-1, 32)
            words[:, row % 32] ^= words.dtype.type(0x5555)
    return Pages(data, pages.tokens)


@pytest.mark.parametrize("threads", [1, *THREADS])
def test_the_first_page_that_does_not_check_out_is_named(threads: int) -> None:
    plan = plans()["paper-2.26"]
    codec = Codec(plan, threads=threads)
    pages = Codec(plan).encode(*tensors(plan, 1500))
    query = np.ones((plan.kv_heads, plan.head_dim), np.float32)

    def found(faults: dict[tuple[str, int], str], call: Any) -> tuple[type, Any]:
        with pytest.raises((FormatError, ChecksumError)) as caught:
            call(broken(codec, pages, faults))
        where = caught.value.where
        return caught.type, (where["kind"], where["token"])

    # Fields are looked at before any word is, but an earlier page with wrong words comes first.
    faults = {("key", 1300): "scale", ("key", 700): "words", ("key", 720): "words", ("value", 10): "scale"}
    assert found(faults, codec.decode) == (ChecksumError, ("key", 700))
    assert found(faults, lambda p: codec.decode(p, 710, 1500)) == (ChecksumError, ("key", 720))
    assert found(faults, lambda p: codec.decode(p, 721, 1500)) == (FormatError, ("key", 1300))
    assert found(faults, lambda p: codec.decode_kind(p, "value")) == (FormatError, ("value", 10))
    assert found(faults, lambda p: codec.attend(query, p)) == (FormatError, ("value", 10))
    assert found({("value", 500): "words", ("key", 700): "words"}, codec.decode) == (ChecksumError, ("key", 700))
    words = {("key", 700): "words", ("key", 720): "words", ("value", 600): "words", ("value", 730): "words"}
    assert found(words, lambda p: codec.decode(p, 710, 1500)) == (ChecksumError, ("key", 720))
    assert found(words, lambda p: codec.decode(p, 721, 1500)) == (ChecksumError, ("value", 730))
    assert found(words, lambda p: codec.decode_kind(p, "value", 610)) == (ChecksumError, ("value", 730))
    # Attention goes page by page through both.
    faults = {("value", 500): "words", ("key", 700): "words"}
    assert found(faults, lambda p: codec.attend(query, p)) == (ChecksumError, ("value", 500))
    faults = {("value", 500): "words", ("key", 511): "words"}
    assert found(faults, lambda p: codec.attend(query, p)) == (ChecksumError, ("key", 511))
    # A fault of a token that nobody asks for is none.
    codec.decode(broken(codec, pages, {("key", 700): "words", ("value", 700): "scale"}), 701, 1500)

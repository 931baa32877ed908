"""Letters and both coders: kernels against oracles, byte for byte, in both directions, and on any bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dquantcodec import letters as letter_stage
from dquantcodec import prefix, rans, tables
from dquantcodec.plan import StreamPlan
from dquantcodec.status import OK, OVERRUN, PADDING, REASONS, STATE

CODERS: dict[str, ModuleType] = {"rans": rans, "prefix": prefix}
TILE = oracles.TILE


@dataclass(frozen=True, eq=False)
class Case:
    """A stream plan with room for its symbols uint8 ``[T, n]``, and the true words of every sub-stream."""

    plan: StreamPlan
    head_dim: int
    symbols: NDArray[np.uint8]
    expected: list[list[list[int]]]

    @property
    def coder(self) -> ModuleType:
        return CODERS[self.plan.coder]

    @property
    def letters(self) -> NDArray[np.uint16]:
        packed = letter_stage.pack(self.symbols, self.plan, self.head_dim)
        return packed.reshape(len(self.symbols), self.plan.substreams, -1)

    @property
    def count(self) -> int:
        return int(self.letters.shape[2])

    def container(self, words: NDArray[np.generic], token: int, substream: int) -> list[int]:
        column = words[token // TILE, substream, :, token % TILE]
        return [int(w) for w in column]


def table(draw: st.DrawFn, coder: str, count: int, p: int) -> NDArray[np.uint16]:
    """Random frequencies: even, skewed, or one letter with nearly all slots and the rest with one."""
    shape = draw(st.sampled_from(["even", "skewed", "one", "random"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if shape == "even":
        weights = [1] * count
    elif shape == "skewed":
        weights = [max(1, int(2.0 ** (60 - 1.7 * abs(i - count / 3)))) for i in range(count)]
    elif shape == "one":
        weights = [1] * count
        weights[draw(st.integers(0, count - 1))] = 2**60
    else:
        weights = [int(w) for w in rng.integers(1, 10**6, count)]
    build = tables.frequencies if coder == "rans" else tables.prefix_frequencies
    return build(weights, p)


@st.composite
def plans(draw: st.DrawFn, coder: str, most_letters: int = 600) -> tuple[StreamPlan, int, int]:
    """A plan of two words, heads and head_dim; levels, letters, precision, sub-streams and table at random."""
    levels = draw(st.sampled_from([2, 3, 5, 6, 8, 17, 64]))
    p = draw(st.integers(8, 15))
    letter = draw(st.sampled_from([k for k in (1, 2, 3, 4) if levels**k <= min(most_letters, 2**p)]))
    substreams = draw(st.sampled_from([1, 2, 4]))
    plan = StreamPlan(
        coder=coder, levels=levels, letter=letter, precision=p, words=2, substreams=substreams, mean=False,
        frequencies=table(draw, coder, levels**letter, p),
    )  # fmt: skip
    return plan, substreams * draw(st.integers(1, 2)), draw(st.integers(1, 20))


def with_room(plan: StreamPlan, head_dim: int, symbols: NDArray[np.uint8], spare: int) -> Case:
    size = symbols.shape[1] // plan.substreams
    frequencies = tuple(plan.frequencies.tolist())
    expected = [
        [
            oracles.ENCODERS[plan.coder](
                oracles.pack(row[j * size : (j + 1) * size].tolist(), head_dim, plan.levels, plan.letter, frequencies),
                frequencies,
                plan.precision,
            )
            for j in range(plan.substreams)
        ]
        for row in symbols
    ]
    longest = max(len(words) for token in expected for words in token)
    return Case(replace(plan, words=max(2, longest + spare)), head_dim, symbols, expected)


@st.composite
def cases(draw: st.DrawFn, coder: str | None = None, tokens: int = 40) -> Case:
    coder = coder or draw(st.sampled_from(["rans", "prefix"]))
    plan, heads, head_dim = draw(plans(coder))
    count = draw(st.integers(1, tokens))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (count, heads * head_dim)
    kind = draw(st.sampled_from(["uniform", "likely", "constant"]))
    if kind == "uniform":
        symbols = rng.integers(0, plan.levels, shape)
    elif kind == "constant":
        symbols = np.full(shape, draw(st.integers(0, plan.levels - 1)))
    else:
        share = plan.frequencies.astype(float).reshape((plan.levels,) * plan.letter).sum(tuple(range(1, plan.letter)))
        symbols = rng.choice(plan.levels, shape, p=share / share.sum())
    return with_room(plan, head_dim, symbols.astype(np.uint8), draw(st.integers(0, 3)))


# --- Letters --------------------------------------------------------------------------------------------------------


@given(cases(tokens=4))
def test_letters_equal_the_oracle_and_unpack_to_the_symbols(case: Case) -> None:
    plan = case.plan
    packed = letter_stage.pack(case.symbols, plan, case.head_dim)
    for row, letters in zip(case.symbols.tolist(), packed.tolist()):
        assert letters == oracles.pack(row, case.head_dim, plan.levels, plan.letter, plan.frequencies.tolist())
        assert oracles.unpack(letters, case.head_dim, plan.levels, plan.letter) == row
    assert (letter_stage.unpack(packed, plan, case.head_dim) == case.symbols).all()


@given(cases(tokens=1))
def test_free_symbols_of_a_last_letter_never_make_it_dearer(case: Case) -> None:
    plan, head_dim = case.plan, case.head_dim
    real = head_dim % plan.letter
    letter_table = letter_stage.letter_table(plan, head_dim)
    last = case.letters.reshape(-1, letter_table.per_head)[:, -1]
    for letter in last.tolist():
        start = letter % plan.levels**real if real else letter
        step = plan.levels**real if real else plan.levels**plan.letter
        rivals = range(start, plan.levels**plan.letter, step)
        assert letter_table.costs[letter] == min(letter_table.costs[other] for other in rivals)


def test_letters_of_heads_do_not_mix() -> None:
    frequencies = tables.frequencies([9, 5, 3, 1, 1, 1, 1, 1], 8)
    plan = StreamPlan("rans", 2, 3, 8, 9, 1, False, frequencies)
    symbols = np.array([[1, 0, 1, 1, 0, 1, 1, 1]], np.uint8)
    # Cheapest letters whose first symbol is 1: letter 1 (1, 0, 0), frequency 5 of 22.
    assert letter_stage.pack(symbols, plan, 4).tolist() == [[5, 1, 6, 1]]


# --- Round trips ----------------------------------------------------------------------------------------------------


@given(cases())
def test_decoding_gives_back_what_was_encoded(case: Case) -> None:
    words, used = case.coder.encode(case.letters, case.plan)
    assert words.dtype == (np.uint16 if case.plan.coder == "rans" else np.uint32)
    assert words.shape == (-(-len(case.symbols) // TILE), case.plan.substreams, case.plan.words, TILE)
    assert (used <= case.plan.words).all()
    symbols, status = case.coder.decode(words, case.plan, case.head_dim, case.count, strict=True)
    tokens = len(case.symbols)
    assert (symbols[:tokens] == case.symbols).all()
    assert (status[:tokens] == OK).all()


@given(cases())
def test_words_are_the_oracles_and_what_is_left_over_is_zero(case: Case) -> None:
    words, used = case.coder.encode(case.letters, case.plan)
    for t, token in enumerate(case.expected):
        for j, expected in enumerate(token):
            assert used[t, j] == len(expected)
            padding = [0] * (case.plan.words - len(expected))
            assert case.container(words, t, j) == expected + padding
    unused = len(case.symbols) % TILE
    assert not unused or not words[-1, :, :, unused:].any()


@given(cases(tokens=33))
def test_the_oracle_decodes_what_the_kernel_encodes(case: Case) -> None:
    words, _ = case.coder.encode(case.letters, case.plan)
    for t in range(len(case.symbols)):
        for j in range(case.plan.substreams):
            decoded = oracles.DECODERS[case.plan.coder](
                case.container(words, t, j), case.count, tuple(case.plan.frequencies.tolist()), case.plan.precision
            )
            assert decoded.finding is None
            assert decoded.letters == case.letters[t, j].tolist()


@given(cases(tokens=33))
def test_the_kernel_decodes_what_the_oracle_encodes(case: Case) -> None:
    plan = case.plan
    dtype = np.uint16 if plan.coder == "rans" else np.uint32
    words = np.zeros((-(-len(case.symbols) // TILE), plan.substreams, plan.words, TILE), dtype)
    for t, token in enumerate(case.expected):
        for j, column in enumerate(token):
            words[t // TILE, j, : len(column), t % TILE] = column
    symbols, status = case.coder.decode(words, plan, case.head_dim, case.count, strict=True)
    assert (symbols[: len(case.symbols)] == case.symbols).all()
    assert (status[: len(case.symbols)] == OK).all()


@given(cases(tokens=3), st.integers(1, 3))
def test_a_stream_too_long_for_its_container_is_left_zero_and_its_length_is_told(case: Case, short: int) -> None:
    words_needed = max(len(w) for token in case.expected for w in token)
    small = replace(case.plan, words=max(2, words_needed - short))
    words, used = case.coder.encode(case.letters, small)
    for t, token in enumerate(case.expected):
        for j, expected in enumerate(token):
            assert used[t, j] == len(expected)
            column = case.container(words, t, j)
            if len(expected) > small.words:
                assert not any(column)
            else:
                assert column[: len(expected)] == expected


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("p", [8, 12, 15])
@pytest.mark.parametrize("common", [0, 1])
def test_one_letter_with_nearly_all_slots(coder: str, p: int, common: int) -> None:
    build = tables.frequencies if coder == "rans" else tables.prefix_frequencies
    weights = [2**60 if i == common else 1 for i in range(2)]
    plan = StreamPlan(coder, 2, 1, p, 2, 1, False, build(weights, p))
    if coder == "rans":
        assert plan.frequencies.max() == 2**p - 1
    symbols = np.full((5, 300), common, np.uint8)
    symbols[1] = 1 - common
    symbols[2, 17] = 1 - common
    symbols[3, -1] = 1 - common
    symbols[4, 0] = 1 - common
    case = with_room(plan, 300, symbols, 0)
    test_words_are_the_oracles_and_what_is_left_over_is_zero.hypothesis.inner_test(case)
    test_decoding_gives_back_what_was_encoded.hypothesis.inner_test(case)


@pytest.mark.parametrize("coder", CODERS)
def test_every_letter_of_the_largest_table(coder: str) -> None:
    build = tables.frequencies if coder == "rans" else tables.prefix_frequencies
    weights = tables.letter_weights(tables.level_weights(64, 1024, 1.4), 2)
    plan = StreamPlan(coder, 64, 2, 15, 2, 2, False, build(weights, 15))
    symbols = np.stack(np.divmod(np.arange(4096), 64), axis=1).astype(np.uint8).reshape(32, 256)
    case = with_room(plan, 128, symbols, 1)
    test_words_are_the_oracles_and_what_is_left_over_is_zero.hypothesis.inner_test(case)
    test_decoding_gives_back_what_was_encoded.hypothesis.inner_test(case)


@given(cases(coder="rans", tokens=4))
def test_rans_words_follow_from_the_cost_of_the_letters(case: Case) -> None:
    # The coder starts from a state worth 16 bits, so a cost of L bits takes 2 + floor(L / 16) words, save for the
    # rounding of states, which may add a word.
    costs = letter_stage.letter_table(case.plan, case.head_dim).costs
    _, used = case.coder.encode(case.letters, case.plan)
    bits = costs[case.letters].sum(axis=2) / 1024
    # States are at least 2**16, frequencies at most 2**p: one letter's rounding is below log2(1 + 2**(p - 16)) bits.
    worst = case.count * np.log2(1 + 2.0 ** (case.plan.precision - 16))
    assert (used <= 2 + (bits + worst) // 16).all()
    assert (used >= 2 + (bits - case.count * (2**-10 + 2 * worst / case.count) - 1) // 16).all()


@given(cases(coder="prefix", tokens=4))
def test_prefix_words_follow_exactly_from_the_cost_of_the_letters(case: Case) -> None:
    costs = letter_stage.letter_table(case.plan, case.head_dim).costs
    _, used = case.coder.encode(case.letters, case.plan)
    bits = 1 + costs[case.letters].sum(axis=2) // 1024
    assert (used == -(-bits // 32)).all()


def test_prefix_codes_are_canonical_and_the_window_knows_them_all() -> None:
    plan = StreamPlan("prefix", 6, 1, 8, 2, 1, False, tables.prefix_frequencies([1, 3, 9, 9, 3, 1], 8))
    lengths = tables.code_lengths(plan.frequencies, 8).tolist()
    codes = oracles.canonical_codes(tuple(plan.frequencies.tolist()), 8)
    ordered = sorted(range(6), key=lambda letter: (lengths[letter], letter))
    assert [codes[letter] for letter in ordered] == sorted(codes)
    for letter, code in enumerate(prefix.prefix_table(plan).codes.tolist()):
        assert code >> 16 == lengths[letter]
        assert format(code & 0xFFFF, f"0{lengths[letter]}b")[::-1] == codes[letter]


# --- Any bytes ------------------------------------------------------------------------------------------------------


@st.composite
def garbage(draw: st.DrawFn) -> tuple[StreamPlan, int, int, NDArray[np.generic]]:
    """A plan, head_dim, letters of a sub-stream, and one tile of words that nobody encoded."""
    plan, heads, head_dim = draw(plans(draw(st.sampled_from(["rans", "prefix"]))))
    plan = replace(plan, words=draw(st.integers(2, 24)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = np.uint16 if plan.coder == "rans" else np.uint32
    shape = (1, plan.substreams, plan.words, TILE)
    words = rng.integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)
    kind = draw(st.sampled_from(["random", "random", "zeros", "ones", "sparse"]))
    if kind == "zeros":
        words[:] = 0
    elif kind == "ones":
        words[:] = np.iinfo(dtype).max
    elif kind == "sparse":
        words *= rng.random(shape) < 0.2
    return plan, head_dim, heads // plan.substreams * -(-head_dim // plan.letter), words


@given(garbage(), st.booleans())
def test_any_words_decode_to_symbols_in_range_and_the_status_of_the_definition(
    case: tuple[StreamPlan, int, int, NDArray[np.generic]], strict: bool
) -> None:
    plan, head_dim, count, words = case
    symbols, status = CODERS[plan.coder].decode(words, plan, head_dim, count, strict)
    assert symbols.max() < plan.levels
    size = symbols.shape[1] // plan.substreams
    for lane in range(0, TILE, 3):
        for j in range(plan.substreams):
            column = [int(w) for w in words[0, j, :, lane]]
            decoded = oracles.DECODERS[plan.coder](column, count, tuple(plan.frequencies.tolist()), plan.precision)
            expected = None if decoded.finding == REASONS[PADDING] and not strict else decoded.finding
            assert REASONS.get(int(status[lane, j])) == expected
            if decoded.letters is not None:
                row = oracles.unpack(decoded.letters, head_dim, plan.levels, plan.letter)
                assert symbols[lane, j * size : (j + 1) * size].tolist() == row


@given(garbage(), st.integers(0, 31), st.integers(0, 2**32))
def test_a_container_is_decoded_from_its_own_words_alone(
    case: tuple[StreamPlan, int, int, NDArray[np.generic]], lane: int, seed: int
) -> None:
    plan, head_dim, count, words = case
    decode = CODERS[plan.coder].decode
    symbols, status = decode(words, plan, head_dim, count, True)
    rng = np.random.default_rng(seed)
    j = seed % plan.substreams
    size = symbols.shape[1] // plan.substreams
    # Every other word of the tile and of the tiles before and after it, in one block of memory, is replaced.
    around = rng.integers(0, np.iinfo(words.dtype).max, (3, *words.shape[1:]), dtype=words.dtype, endpoint=True)
    around[1, j, :, lane] = words[0, j, :, lane]
    for tiles in (around, around[1:2]):
        again, verdict = decode(tiles, plan, head_dim, count, True)
        at = (TILE if len(tiles) == 3 else 0) + lane
        assert (again[at, j * size : (j + 1) * size] == symbols[lane, j * size : (j + 1) * size]).all()
        assert verdict[at, j] == status[lane, j]


def small_case(coder: str) -> Case:
    """Three heads of 20 values, letters of three: an odd number of letters, the last of a head partial."""
    build = tables.frequencies if coder == "rans" else tables.prefix_frequencies
    weights = tables.letter_weights(tables.level_weights(6, 128, 1.4), 3)
    plan = StreamPlan(coder, 6, 3, 12, 2, 1, False, build(weights, 12))
    symbols = np.array([[(v + 128) * 6 // 256 for v in oracles.integers(60, seed)] for seed in range(3)], np.uint8)
    return with_room(plan, 20, symbols, 2)


def flips(words: NDArray[np.generic], container: int) -> list[tuple[int, int]]:
    return [(w, bit) for w in range(container) for bit in range(words.dtype.itemsize * 8)]


def test_a_flipped_bit_of_rans_is_detected_or_leaves_another_valid_stream() -> None:
    case = small_case("rans")
    words, _ = rans.encode(case.letters, case.plan)
    undetected, total = 0, 0
    for w, bit in flips(words, case.plan.words):
        flipped = words.copy()
        flipped[0, 0, w, 0] ^= np.uint16(1 << bit)
        symbols, status = rans.decode(flipped, case.plan, 20, case.count, strict=True)
        total += 1
        assert symbols.max() < 6
        assert (symbols[1:3] == case.symbols[1:]).all(), "other tokens must not notice"
        if status[0, 0] != OK:
            continue
        undetected += 1
        column = case.container(flipped, 0, 0)
        decoded = oracles.rans_decode(column, case.count, tuple(case.plan.frequencies.tolist()), 12)
        assert decoded.finding is None
        assert decoded.letters is not None
        assert oracles.unpack(decoded.letters, 20, 6, 3) == symbols[0].tolist()
        # The coder is one to one between states from 2**16 on: these words are what an encoder would have written.
        if column[0]:
            again = oracles.rans_encode(decoded.letters, tuple(case.plan.frequencies.tolist()), 12)
            assert again + [0] * (len(column) - len(again)) == column
            assert decoded.letters != case.letters[0, 0].tolist()
    # How many go undetected depends on the letters alone: a letter of one slot carries no redundancy.
    print(f"{undetected} of {total} bit flips undetected")
    assert undetected < total


def test_a_flipped_bit_of_a_prefix_code_keeps_symbols_in_range_and_other_tokens_whole() -> None:
    case = small_case("prefix")
    words, _ = prefix.encode(case.letters, case.plan)
    for w, bit in flips(words, case.plan.words):
        flipped = words.copy()
        flipped[0, 0, w, 0] ^= np.uint32(1 << bit)
        symbols, status = prefix.decode(flipped, case.plan, 20, case.count, strict=True)
        assert symbols.max() < 6
        assert (symbols[1:3] == case.symbols[1:]).all()
        assert (status[1:3] == OK).all()
        # A prefix code has no state: a changed code changes symbols, a changed pad bit is found.
        assert status[0, 0] != OK or (symbols[0] != case.symbols[0]).any() or case.head_dim % case.plan.letter


@pytest.mark.parametrize("coder", CODERS)
def test_the_strict_check_finds_every_padding_bit_and_reading_ignores_it(coder: str) -> None:
    case = small_case(coder)
    words, used = CODERS[coder].encode(case.letters, case.plan)
    bits = words.dtype.itemsize * 8
    for token in range(3):
        filled = int(used[token, 0]) * bits
        padding = list(range(filled, case.plan.words * bits))
        if coder == "prefix":
            costs = letter_stage.letter_table(case.plan, 20).costs
            padding = [0, *range(1 + int(costs[case.letters[token, 0]].sum()) // 1024, case.plan.words * bits)]
        assert padding
        for bit in padding:
            changed = words.copy()
            changed[0, 0, bit // bits, token] |= words.dtype.type(1 << bit % bits)
            for strict, expected in ((True, PADDING), (False, OK)):
                symbols, status = CODERS[coder].decode(changed, case.plan, 20, case.count, strict)
                assert status[token, 0] == expected
                assert (symbols[:3] == case.symbols).all()
                assert (np.delete(status[:3, 0], token) == OK).all()


def test_a_wrong_final_state_and_an_overrun_are_told_apart() -> None:
    case = small_case("rans")
    words, used = rans.encode(case.letters, case.plan)
    seen = set()
    for w, bit in flips(words, 3):
        wrong = words.copy()
        wrong[0, 0, w, 0] ^= np.uint16(1 << bit)
        _, status = rans.decode(wrong, case.plan, 20, case.count)
        seen.add(int(status[0, 0]))
    assert STATE in seen
    cut = replace(case.plan, words=int(used[0, 0]) - 1)
    _, status = rans.decode(np.ascontiguousarray(words[:, :, : cut.words]), cut, 20, case.count)
    assert status[0, 0] == OVERRUN
    other = prefix.encode(small_case("prefix").letters, replace(small_case("prefix").plan, words=40))[1]
    prefix_case = small_case("prefix")
    short = replace(prefix_case.plan, words=int(other[0, 0]) - 1)
    coded, _ = prefix.encode(prefix_case.letters, prefix_case.plan)
    _, status = prefix.decode(np.ascontiguousarray(coded[:, :, : short.words]), short, 20, prefix_case.count)
    assert status[0, 0] == OVERRUN


def test_a_stream_that_asks_for_far_more_words_than_there_are_is_read_to_its_end() -> None:
    for coder, module in CODERS.items():
        build = tables.frequencies if coder == "rans" else tables.prefix_frequencies
        plan = StreamPlan(coder, 4, 1, 15, 2, 1, False, build([1, 1, 1, 1], 15))
        words = np.zeros((1, 1, 2, TILE), np.uint16 if coder == "rans" else np.uint32)
        words[:] = np.random.default_rng(0).integers(2**15, 2**16, words.shape)
        symbols, status = module.decode(words, plan, 1024, 16384, strict=True)
        assert symbols.shape == (TILE, 16384)
        assert symbols.max() <= 3
        assert (status == OVERRUN).all()


@pytest.mark.parametrize("precision", [8, 11, 12, 13, 15])
def test_reciprocals_divide_every_reachable_state_exactly(precision: int) -> None:
    slots = 1 << precision
    random = np.random.default_rng(precision).integers(1, slots, 40).tolist()
    for f in sorted({1, 2, 3, 7, slots // 2, slots - 2, slots - 1, *random}):
        reciprocal = -(-(1 << 32 + precision) // f)
        most = (f << 32 - precision) - 1
        quotients = {1, 2, 3, most // f, most // f - 1, *np.linspace(1, most // f, 50).astype(int).tolist()}
        for x in {x for q in quotients for x in (q * f - 1, q * f, q * f + f - 1)} | {most, 1 << 16}:
            if x <= most:
                assert x * reciprocal < 1 << 64
                assert x * reciprocal >> 32 + precision == x // f

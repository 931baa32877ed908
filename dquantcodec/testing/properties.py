"""What holds of every coder of this format, one function a property.

A property takes the implementation under test and one case, and raises :class:`AssertionError` with a sentence if it
does not hold.  :func:`dquantcodec.testing.check_decoder` and its kind run them on thousands of cases; tests of the
library call them directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..page_layout import KINDS, PageLayout
from ..plan import Plan, StreamPlan
from . import coders, groups, trellises
from .containers import Decode, Encode, plain_decode, plain_words, words_of
from .pages import TILE, PageError, container_words, decode_page
from .strategies import ContainerCase, PageCase, TensorCase

#: ``decode(plan, page, tokens)``: float32 keys and values ``[tokens, H, D]`` of a page's bytes, or a ValueError.
DecodePage = Callable[[Plan, bytes, int], tuple[NDArray[np.float32], NDArray[np.float32]]]
#: ``encode(plan, keys, values)``: the bytes of a page of float32 keys and values ``[tokens, H, D]``.
EncodePage = Callable[[Plan, NDArray[np.float32], NDArray[np.float32]], bytes]


def require(holds: object, message: str) -> None:
    """An assertion that ``python -O`` keeps."""
    if not holds:
        raise AssertionError(message)


# --- Decoders of containers -----------------------------------------------------------------------------------------


def symbols_come_back(decode: Decode, case: ContainerCase) -> None:
    """A sound container decodes to the symbols that were encoded, without a finding."""
    found, finding = decode(case.plan, case.data)
    require(finding is None, f"a sound container has the finding {finding!r}")
    require(found is not None and list(map(int, found)) == case.symbols, _difference(found, case.symbols))


def any_bytes_decode_as_specified(decode: Decode, case: ContainerCase) -> None:
    """Any bytes whatever have the finding, and without overrun or wrong state the symbols, of the specification."""
    expected, code = plain_decode(case.plan, case.data)
    found, finding = decode(case.plan, case.data)
    require(finding == code, f"the finding is {finding!r}, the specification says {code!r}")
    if code in (None, "container-padding"):
        require(found is not None and list(map(int, found)) == expected, _difference(found, expected))


def padding_does_not_matter(decode: Decode, case: ContainerCase) -> None:
    """A decoder that leaves padding to verification reads the symbols whatever stands there, and finds nothing."""
    expected, code = plain_decode(case.plan, case.data)
    found, finding = decode(case.plan, case.data)
    wanted = None if code == "container-padding" else code
    require(finding == wanted, f"the finding is {finding!r}, the specification says {wanted!r}")
    if wanted is None:
        require(found is not None and list(map(int, found)) == expected, _difference(found, expected))


def decoding_repeats(decode: Decode, case: ContainerCase) -> None:
    """Decoding the same bytes again, with another container in between, gives the same."""
    first = decode(case.plan, case.data)
    decode(case.plan, bytes(byte ^ 0xFF for byte in case.data))
    again = decode(case.plan, case.data)
    same = first[1] == again[1] and (first[0] is None or (again[0] is not None and list(first[0]) == list(again[0])))
    require(same, f"decoding again gives {again!r} after {first!r}")


def _difference(found: Sequence[int] | None, expected: Sequence[int] | None) -> str:
    if found is None or expected is None or len(found) != len(expected):
        return f"{None if found is None else len(found)} symbols, not {None if expected is None else len(expected)}"
    for at, (a, b) in enumerate(zip(found, expected)):
        if int(a) != b:
            return f"symbol {at} is {int(a)}, the specification says {b}"
    return "the same"


# --- Encoders of containers -----------------------------------------------------------------------------------------


def containers_hold_the_symbols(encode: Encode, case: ContainerCase) -> None:
    """What fits is encoded: all bytes of the container, which the specification reads as the same symbols."""
    assert case.symbols is not None
    data = encode(case.plan, list(case.symbols))
    if data is None:
        shortest = len(plain_words(case.plan, case.symbols))
        require(shortest > case.plan.words, f"{shortest} words are enough, the container has {case.plan.words}")
        return
    require(len(data) == case.plan.bytes, f"{len(data)} bytes, the container has {case.plan.bytes}")
    found, finding = plain_decode(case.plan, bytes(data))
    require(finding is None, f"the container has the finding {finding!r}")
    require(found == case.symbols, _difference(found, case.symbols))


def what_does_not_fit_is_refused(encode: Encode, case: ContainerCase) -> None:
    """Symbols that need a word more than there are give None and never a cut container."""
    assert case.symbols is not None
    needed = len(plain_words(case.plan, case.symbols))
    if needed > 2:
        data = encode(replace(case.plan, words=needed - 1), list(case.symbols))
        require(data is None, f"{needed} words went into {needed - 1}")


def words_follow_from_the_rate(encode: Encode, case: ContainerCase) -> None:
    """A stream takes the words that its letters' shares account for, in exact rational arithmetic.

    For rANS this says that no state under- or overflowed: a state that left ``[2**16, 2**32)`` would lose or win bits.
    """
    plan = case.plan
    assert case.symbols is not None
    data = encode(plan, list(case.symbols))
    if data is None or plan.grouping is not None:
        return
    words = words_of(plan, data)
    decoded = coders.DECODERS[plan.coder](words, plan.letters, plan.frequencies, plan.precision)
    require(decoded.letters is not None, "the container is overrun")
    letters = decoded.letters or []
    if plan.coder == "prefix":
        exact = coders.prefix_words(letters, plan.frequencies, plan.precision)
        require(decoded.used == exact, f"{decoded.used} words, the letters account for {exact}")
    else:
        fits = coders.rans_words_fit_the_rate(decoded.used, letters, plan.frequencies, plan.precision)
        require(fits, f"{decoded.used} words are not what the letters account for")


def encoding_repeats(encode: Encode, case: ContainerCase) -> None:
    """The same symbols give the same bytes."""
    assert case.symbols is not None
    one, two = (encode(case.plan, list(case.symbols)) for _ in range(2))
    require(one == two, "encoding the same symbols twice gives two containers")


# --- Decoders of pages ----------------------------------------------------------------------------------------------


def pages_decode_to_the_specified_numbers(decode: DecodePage, case: PageCase) -> None:
    """Keys and values equal those of the specification bit for bit; what it calls an error is a ValueError."""
    try:
        expected = decode_page(case.page, case.plan, case.tokens)
    except PageError as error:
        try:
            decode(case.plan, case.page, case.tokens)
        except ValueError:
            return
        raise AssertionError(f"the page is taken, the specification says {error}") from None
    try:
        found = decode(case.plan, case.page, case.tokens)
    except ValueError as error:
        raise AssertionError(f"a sound page is refused: {error}") from error
    for kind, numbers in zip(KINDS, found):
        wanted = expected[kind]
        numbers = np.asarray(numbers)
        require(
            numbers.dtype == np.float32 and numbers.shape == wanted.shape,
            f"{kind}s are {numbers.dtype} {numbers.shape}, not float32 {wanted.shape}",
        )
        differs = np.argwhere(numbers.view(np.uint32) != wanted.view(np.uint32))
        if len(differs):
            place = tuple(int(i) for i in differs[0])
            raise AssertionError(
                f"{kind} {place} (token, head, channel) is {numbers[place]!r}, the specification says {wanted[place]!r}"
            )


def tokens_decode_alone(decode: DecodePage, case: PageCase) -> None:
    """A page cut after some tokens decodes to the same numbers, whatever its later bytes are."""
    tokens = -(-case.tokens // 2)
    used = PageLayout.of(case.plan).bytes_for(tokens)
    try:
        whole = decode(case.plan, case.page, case.tokens)
    except ValueError:
        return
    cut = decode(case.plan, case.page[:used] + b"\xa5" * (len(case.page) - used), tokens)
    for kind, one, other in zip(KINDS, whole, cut):
        same = np.asarray(one)[:tokens].tobytes() == np.asarray(other).tobytes()
        require(same, f"{kind}s of {tokens} tokens alone differ")


# --- Encoders of pages ----------------------------------------------------------------------------------------------


def every_token_fits(encode: EncodePage, case: TensorCase) -> None:
    """The hard budget: whatever finite numbers go in, a page of the right size comes out, all of it sound."""
    page = encode(case.plan, case.keys.copy(), case.values.copy())
    size = PageLayout.of(case.plan).page_bytes
    require(len(page) == size, f"{len(page)} bytes, a page has {size}")
    found = page_findings(bytes(page), case.plan, len(case.keys))
    require(not found, f"the page has the findings {found[:3]}")


def numbers_come_back_finite(encode: EncodePage, case: TensorCase) -> None:
    """Decoded keys and values are finite and no further off than the range of their page."""
    page = encode(case.plan, case.keys.copy(), case.values.copy())
    decoded = decode_page(bytes(page), case.plan, len(case.keys))
    for kind, x in zip(KINDS, (case.keys, case.values)):
        require(np.isfinite(decoded[kind]).all(), f"a {kind} is not finite")
        reach = 2 * np.sqrt(case.plan.head_dim) * float(np.abs(x).max())
        distance = float(np.abs(decoded[kind].astype(np.float64) - x).max())
        require(distance <= reach, f"a {kind} is {distance} off, the page reaches {reach}")


def pages_repeat(encode: EncodePage, case: TensorCase) -> None:
    """The same numbers give the same page, and are left as they were."""
    keys, values = case.keys.copy(), case.values.copy()
    first = bytes(encode(case.plan, keys, values))
    require(keys.tobytes() == case.keys.tobytes(), "the encoder changed its keys")
    require(values.tobytes() == case.values.tobytes(), "the encoder changed its values")
    require(first == bytes(encode(case.plan, keys, values)), "encoding again gives another page")


def page_findings(page: bytes, plan: Plan, tokens: int) -> list[tuple[str, int, str]]:
    """``(kind, token, reason code)`` of all that verification finds in a page, in plain Python (clause 9.3)."""
    layout = PageLayout.of(plan)
    found: list[tuple[str, int, str]] = []
    if any(page[layout.used_head_bytes : layout.head_bytes]) or any(page[layout.bytes_for(tokens) :]):
        found.append(("key", tokens - 1, "page-unused"))
    try:
        decode_page(page, plan, tokens)
    except PageError as error:
        found.append((error.kind, error.token, error.code))
    for kind in KINDS:
        stream, at = getattr(plan, kind), getattr(layout, kind)
        for tile in range(-(-tokens // TILE)):
            first = layout.head_bytes + tile * layout.tile_bytes
            for lane in range(TILE):
                token = tile * TILE + lane
                affine = page[first + at.affine_at + 2 * stream.affine * lane :][: 2 * stream.affine]
                for j in range(stream.substreams):
                    words = container_words(page, first + at.words_at, lane, j, stream)
                    if token >= tokens:
                        if any(words) or any(affine):
                            found.append((kind, token, "page-unused"))
                    elif container_finding(words, stream, plan, j) == "container-padding":
                        found.append((kind, token, "container-padding"))
    return found


def container_finding(words: list[int], stream: StreamPlan, plan: Plan, substream: int) -> str | None:
    """What verification finds in one container of a page."""
    if stream.grouping is not None:
        coder: Any = groups if stream.grouping.states == 1 else trellises
        part = groups.parts(stream.grouping, stream.substreams)[substream]
        return coder.decode(words, stream.grouping, part).finding  # type: ignore[no-any-return]
    count = plan.kv_heads // stream.substreams * -(-plan.head_dim // stream.letter)
    frequencies = tuple(stream.frequencies.tolist())
    return coders.DECODERS[stream.coder](words, count, frequencies, stream.precision).finding

"""Letters and both coders in plain Python, written from the specification, clauses 6.1 to 6.3, and exact rates.

Integers, fractions and strings of bits; nothing here comes from the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import product
from math import prod

# --- Letters --------------------------------------------------------------------------------------------------------


def letter_id(symbols: Sequence[int], levels: int) -> int:
    """First symbol least significant."""
    return sum(m * levels**i for i, m in enumerate(symbols))


def letter_symbols(letter: int, levels: int, k: int) -> list[int]:
    return [letter // levels**i % levels for i in range(k)]


def pack(row: Sequence[int], head_dim: int, levels: int, k: int, frequencies: Sequence[int]) -> list[int]:
    """Letters of one row of symbols; symbols past a head's end make the most frequent letter, then the lowest."""
    letters = []
    for head in range(0, len(row), head_dim):
        for at in range(head, head + head_dim, k):
            real = [int(m) for m in row[at : min(at + k, head + head_dim)]]
            free = k - len(real)
            candidates = sorted(letter_id([*real, *extra], levels) for extra in product(range(levels), repeat=free))
            letters.append(max(candidates, key=lambda letter: frequencies[letter]))
    return letters


def unpack(letters: Sequence[int], head_dim: int, levels: int, k: int) -> list[int]:
    per_head = -(-head_dim // k)
    row: list[int] = []
    for head in range(0, len(letters), per_head):
        symbols = [m for letter in letters[head : head + per_head] for m in letter_symbols(letter, levels, k)]
        row += symbols[:head_dim]
    return row


# --- rANS -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoded:
    """Letters (None after an overrun) and the reason code of what is wrong, or None."""

    letters: list[int] | None
    finding: str | None
    used: int = 0


@lru_cache(maxsize=8)
def cumulative(frequencies: tuple[int, ...]) -> list[int]:
    below = [0]
    for f in frequencies:
        below.append(below[-1] + f)
    return below


@lru_cache(maxsize=8)
def slots(frequencies: tuple[int, ...]) -> list[int]:
    return [letter for letter, f in enumerate(frequencies) for _ in range(f)]


def rans_encode(letters: Sequence[int], frequencies: tuple[int, ...], p: int) -> list[int]:
    """All 16-bit words of one container, without padding."""
    below = cumulative(frequencies)
    x = 1 << 16
    emitted: list[int] = []
    for letter in reversed(letters):
        f = frequencies[letter]
        while x >= f << (32 - p):
            emitted.append(x & 0xFFFF)
            x >>= 16
        x = (x // f << p) + x % f + below[letter]
        assert 1 << 16 <= x < 1 << 32
    return [x >> 16, x & 0xFFFF, *reversed(emitted)]


def rans_decode(words: Sequence[int], count: int, frequencies: tuple[int, ...], p: int) -> Decoded:
    letter_of, below = slots(frequencies), cumulative(frequencies)
    x = words[0] << 16 | words[1]
    at = 2
    letters = []
    for _ in range(count):
        slot = x & ((1 << p) - 1)
        letter = letter_of[slot]
        letters.append(letter)
        x = frequencies[letter] * (x >> p) + slot - below[letter]
        if x < 1 << 16:
            if at == len(words):
                return Decoded(None, "container-overrun")
            x = x << 16 | words[at]
            at += 1
    if x != 1 << 16:
        return Decoded(letters, "container-state", at)
    return Decoded(letters, "container-padding" if any(words[at:]) else None, at)


# --- Prefix code ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def canonical_codes(frequencies: tuple[int, ...], p: int) -> list[str]:
    """Codes as strings of bits, first bit first: counted up within a length, doubled between lengths (RFC 1951)."""
    lengths = [p - f.bit_length() + 1 for f in frequencies]
    codes = [""] * len(lengths)
    code = 0
    for length in range(1, p + 1):
        code <<= 1
        for letter, own in enumerate(lengths):
            if own == length:
                codes[letter] = format(code, f"0{length}b")
                code += 1
    return codes


def prefix_encode(letters: Sequence[int], frequencies: tuple[int, ...], p: int) -> list[int]:
    """All 32-bit words of one container, without padding words."""
    codes = canonical_codes(frequencies, p)
    bits = "0" + "".join(codes[letter] for letter in letters)
    bits += "0" * (-len(bits) % 32)
    return [int(bits[i : i + 32][::-1], 2) for i in range(0, len(bits), 32)]


def prefix_decode(words: Sequence[int], count: int, frequencies: tuple[int, ...], p: int) -> Decoded:
    letter_of = {code: letter for letter, code in enumerate(canonical_codes(frequencies, p))}
    bits = "".join(format(word, "032b")[::-1] for word in words)
    at = 1
    letters = []
    for _ in range(count):
        code = ""
        while code not in letter_of:
            if at == len(bits):
                return Decoded(None, "container-overrun")
            code += bits[at]
            at += 1
        letters.append(letter_of[code])
    spare = bits[0] + bits[at:]
    return Decoded(letters, "container-padding" if "1" in spare else None, -(-at // 32))


Encoder = Callable[[Sequence[int], tuple[int, ...], int], list[int]]
Decoder = Callable[[Sequence[int], int, tuple[int, ...], int], Decoded]

ENCODERS: dict[str, Encoder] = {"rans": rans_encode, "prefix": prefix_encode}
DECODERS: dict[str, Decoder] = {"rans": rans_decode, "prefix": prefix_decode}


# --- Exact rates ----------------------------------------------------------------------------------------------------


def rate(letters: Sequence[int], frequencies: Sequence[int], p: int) -> Fraction:
    """One over the product of the letters' shares: ``log2`` of it is what an ideal coder would spend, in bits.

    >>> rate([0, 1, 1], [4, 12], 4)
    Fraction(64, 9)
    """
    return Fraction((1 << p) ** len(letters), prod(frequencies[letter] for letter in letters))


def rans_words_fit_the_rate(words: int, letters: Sequence[int], frequencies: Sequence[int], p: int) -> bool:
    """Whether a rANS stream of ``letters`` may take so many words; rational arithmetic alone.

    Let the coder end in state ``x`` after ``k = words - 2`` words, and ``e = 2**(p - 16)``.  Coding a letter turns x
    into ``x * 2**p / f`` up to a factor within ``1 - e`` and ``1 + e``, because x is at least ``f * 2**(16 - p)`` once
    words were taken off; taking off a word loses less than a part ``e``.  Coding starts from 2**16 and ends between
    2**16 and 2**32, so that ``2**(16 k) <= rate * (1 + e)**n`` and ``2**(16 (k + 1)) > rate * (1 - e)**(2 n)``.
    """
    ideal, e, n = rate(letters, frequencies, p), Fraction(1, 1 << (16 - p)), len(letters)
    above = 1 << 16 * (words - 2) <= ideal * (1 + e) ** n
    return above and 1 << 16 * (words - 1) > ideal * (1 - e) ** (2 * n)


def prefix_words(letters: Sequence[int], frequencies: Sequence[int], p: int) -> int:
    """Words of a prefix stream: the pad bit and the lengths of the codes, rounded up; the rate is exact here."""
    ideal = rate(letters, frequencies, p)
    bits = ideal.numerator.bit_length() - 1
    assert ideal == 1 << bits
    return -(-(1 + bits) // 32)


def cost_is_enough(cost: int, frequency: int, p: int) -> bool:
    """Whether ``cost`` in 1/1024 bit is at least ``p - log2(frequency)``, decided in integers.

    >>> [cost_is_enough(cost, 3, 4) for cost in (2472, 2473)]
    [False, True]
    """
    return (frequency**1024) << cost >= 1 << (1024 * p)

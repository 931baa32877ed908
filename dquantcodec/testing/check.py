"""Putting an implementation through all properties, and a failing one through the least case that shows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from . import properties, strategies
from .containers import Decode, Encode
from .properties import DecodePage, EncodePage
from .vectors import Case, read_vector, write_vector

Property = Callable[[Any, Any], None]


class CheckFailed(AssertionError):  # noqa: N818 (an outcome that is asked for, as pytest's)
    """An implementation does not hold a property; ``property`` names it, ``vector`` is the file of the least case."""

    def __init__(self, name: str, why: str, vector: Path) -> None:
        super().__init__(f"{name}: {why}\nThe least failing case is in {vector}; dquantcodec.testing.replay runs it.")
        self.property, self.why, self.vector = name, why, vector


def check_decoder(
    decode: Decode,
    *,
    examples: int = 200,
    strict: bool = True,
    coders: Sequence[str] = strategies.CODERS,
    vector: str | Path = "failing-decoder.json",
    seed: int | None = None,
) -> list[str]:
    """Put ``decode(plan, data)``, a decoder of single containers, through every property of decoders.

    See :mod:`dquantcodec.testing.containers` for what it gets and returns.  ``strict=False`` is for decoders that do
    not look at padding.  ``coders`` limits the kinds of plans (of ``"prefix"``, ``"rans"``, ``"grouped"``,
    ``"trellis"``) and ``examples`` bounds the cases of each property.  Returns the names of the properties.  Raises
    :class:`CheckFailed` after writing the least failing case to the file ``vector``.

    >>> from dquantcodec.testing import check_decoder, library_decode
    >>> check_decoder(library_decode, examples=5)[0]
    'symbols_come_back'
    """
    sound = strategies.containers(coders)
    damaged = strategies.containers(coders, "corrupted")
    some = st.one_of(damaged, strategies.containers(coders, "random"))
    second = properties.any_bytes_decode_as_specified if strict else properties.padding_does_not_matter
    checks: list[tuple[Property, st.SearchStrategy[Any]]] = [
        (properties.symbols_come_back, sound),
        (second, some),
        (properties.decoding_repeats, damaged),
    ]
    return _check(decode, checks, examples, strict, Path(vector), seed)


def check_encoder(
    encode: Encode,
    *,
    examples: int = 200,
    coders: Sequence[str] = strategies.CODERS,
    vector: str | Path = "failing-encoder.json",
    seed: int | None = None,
) -> list[str]:
    """Put ``encode(plan, symbols)``, an encoder of single containers, through every property of encoders.

    As :func:`check_decoder`.
    """
    sound = strategies.containers(coders)
    checks: list[tuple[Property, st.SearchStrategy[Any]]] = [
        (properties.containers_hold_the_symbols, sound),
        (properties.what_does_not_fit_is_refused, sound),
        (properties.words_follow_from_the_rate, sound),
        (properties.encoding_repeats, sound),
    ]
    return _check(encode, checks, examples, True, Path(vector), seed)


def check_page_decoder(
    decode: DecodePage,
    *,
    examples: int = 60,
    coders: Sequence[str] = strategies.CODERS,
    vector: str | Path = "failing-page-decoder.json",
    seed: int | None = None,
) -> list[str]:
    """Put ``decode(plan, page, tokens)``, a decoder of whole pages, through every property.

    It gets a :class:`dquantcodec.plan.Plan`, the bytes of one page and how many tokens it holds, and returns float32
    keys and values ``[tokens, H, D]``, or raises a ValueError for a page that no encoder wrote (clauses 6.2 to 6.4;
    padding need not be checked).  Numbers are compared bit for bit.  As :func:`check_decoder`.
    """
    sound, damaged = strategies.pages(coders), strategies.pages(coders, "corrupted")
    some = st.one_of(damaged, strategies.pages(coders, "random"))
    checks: list[tuple[Property, st.SearchStrategy[Any]]] = [
        (properties.pages_decode_to_the_specified_numbers, sound),
        (properties.pages_decode_to_the_specified_numbers, some),
        (properties.tokens_decode_alone, sound),
    ]
    return _check(decode, checks, examples, True, Path(vector), seed)


def check_page_encoder(
    encode: EncodePage,
    *,
    examples: int = 60,
    coders: Sequence[str] = strategies.CODERS,
    vector: str | Path = "failing-page-encoder.json",
    seed: int | None = None,
) -> list[str]:
    """Put ``encode(plan, keys, values)``, an encoder of whole pages, through every property.

    It gets float32 keys and values ``[tokens, H, D]`` of up to a window of tokens, among them hostile ones, and returns
    the bytes of a page.  Any page whose containers decode is right; how close it comes is not judged.  As
    :func:`check_decoder`.
    """
    tensors = strategies.page_tensors(coders)
    checks: list[tuple[Property, st.SearchStrategy[Any]]] = [
        (properties.every_token_fits, tensors),
        (properties.numbers_come_back_finite, tensors),
        (properties.pages_repeat, tensors),
    ]
    return _check(encode, checks, examples, True, Path(vector), seed)


def replay(path: str | Path, implementation: Callable[..., Any]) -> None:
    """Run the case of a vector file again.  Raises :class:`CheckFailed` if ``implementation`` still fails it."""
    name, _, case = read_vector(Path(path))
    try:
        getattr(properties, name)(implementation, case)
    except Exception as error:
        raise CheckFailed(name, _why(error), Path(path)) from error


def _check(
    implementation: Any,
    checks: Sequence[tuple[Property, st.SearchStrategy[Any]]],
    examples: int,
    strict: bool,
    vector: Path,
    seed: int | None,
) -> list[str]:
    for holds, cases in checks:
        failed = _least_failing(holds, implementation, cases, examples, seed)
        if failed is not None:
            case, error = failed
            write_vector(vector, holds.__name__, _why(error), strict, case)
            raise CheckFailed(holds.__name__, _why(error), vector) from error
    return list(dict.fromkeys(holds.__name__ for holds, _ in checks))


def _why(error: Exception) -> str:
    """What went wrong; an error of the implementation's own with its kind."""
    return str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"


def _least_failing(
    holds: Property, implementation: Any, cases: st.SearchStrategy[Any], examples: int, seed: int | None
) -> tuple[Case, Exception] | None:
    """The least case that Hypothesis finds to fail, and how it failed."""
    last: list[tuple[Case, Exception]] = []

    @settings(
        max_examples=examples,
        derandomize=seed is None,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        print_blob=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def run(case: Case) -> None:
        try:
            holds(implementation, case)
        except Exception as error:
            last[:] = [(case, error)]
            raise

    if seed is not None:
        from hypothesis import seed as with_seed

        run = with_seed(seed)(run)
    try:
        run()
    except Exception:
        if not last:
            raise
        return last[0]
    return None

"""Recognising which tensors are the keys and values of which layer, from the names people save them under.

A *template* is a name with ``{layer}`` for the layer number (``{layer:02}`` where numbers are zero-padded), so that one
template for keys and one for values restore every name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import InputError

#: Words for the two kinds; the first of a pair means keys.
KIND_WORDS = (
    ("key", "value"),
    ("keys", "values"),
    ("k", "v"),
    ("key_cache", "value_cache"),
    ("k_cache", "v_cache"),
    ("key_states", "value_states"),
    ("cached_key", "cached_value"),
)
QUERY_WORDS = ("query", "queries", "q", "query_states")

_PATH = r"(?:[^\W\d]\w*[./])*"
_LAYER = r"(?P<layer>\d+)"

#: Shapes of names, tried in this order; ``KIND`` stands for one of the words above; other words may lead (``model.``)
PATTERNS = (
    # layers.3.key  past_key_values.3.key  3.k  model.layers.3.self_attn.k  layer_3_key  layer3.k
    rf"{_PATH}(?:\w*[^\W\d])?{_LAYER}[_./]{_PATH}(?:\w*_)??KIND",
    # key_cache.3  keys/3  key_3  k3  past_key_3  cache_k_3
    rf"{_PATH}(?:\w*_)??KIND[_./]?{_LAYER}",
    # past_key_values.3.0 and .1  (also 3.0 and 3.1: a list of pairs, flattened)
    rf"(?:{_PATH}(?:past_key_values|past|present|cache|kv_cache|kv|layers|layer)[./])?{_LAYER}[./]PAIR",
)
#: Names without a number, the tensors of one layer: key and value.
SINGLE_PATTERN = rf"{_PATH}(?:\w*_)??KIND"

#: Longer names are left unknown: matching takes time that grows with the square of the length.
MAX_NAME = 300

OPTIONS = "give --key PATTERN and --value PATTERN with {layer} for the layer number"


@dataclass(frozen=True)
class Naming:
    """Which tensor is what.

    ``layers`` maps layer numbers, ascending, to the names of keys and values; ``key`` and ``value`` are the templates
    that restore those names.
    """

    key: str
    value: str
    layers: Mapping[int, tuple[str, str]]


@dataclass(frozen=True)
class _Hit:
    name: str
    layer: int | None
    kind: int
    family: str
    digits: str
    start: int


def spell(template: str, layer: int) -> str:
    """The name that ``template`` gives layer ``layer``.

    >>> spell("layers.{layer}.key", 7), spell("k_{layer:03}", 7)
    ('layers.7.key', 'k_007')
    """
    return re.sub(r"\{layer(?::0(\d+))?\}", lambda found: str(layer).zfill(int(found[1] or 0)), template)


def recognise(names: Iterable[str]) -> Naming:
    """Find keys and values by the table above.

    Raises :class:`InputError`: ``names-unknown`` if nothing matches, ``names-ambiguous`` if more than one way of naming
    does (nothing is guessed), ``names-unpaired`` and ``names-duplicate`` for layers that are not one key and one value.
    """
    names = list(names)
    words = [word for pair in KIND_WORDS for word in pair]
    hits = _hits(names, PATTERNS, words) or _hits(names, (SINGLE_PATTERN,), words)
    if not hits:
        raise InputError(
            f"no names of keys and values are recognised among {len(names)} tensors; {OPTIONS}" + listing(names),
            code="names-unknown",
        )
    families = sorted({hit.family for hit in hits})
    if len(families) > 1:
        shown = [f"{family} ({sum(hit.family == family for hit in hits)} tensors)" for family in families]
        raise InputError(f"several names look like keys and values; {OPTIONS}" + listing(shown), code="names-ambiguous")
    return _pair(hits)


def match(names: Iterable[str], key: str, value: str) -> Naming:
    """Find keys and values by patterns of the caller, each with ``{layer}`` once (or neither, for a single layer)."""
    names = list(names)
    if key == value:
        raise InputError("the patterns for keys and for values are the same", code="pattern-same")
    if ("{layer}" in key) != ("{layer}" in value):
        raise InputError("only one of the patterns for keys and for values has {layer}", code="pattern-layer")
    hits = [
        _Hit(name, int(digits) if digits else None, kind, "", digits, start)
        for kind, pattern in enumerate((key, value))
        for name, digits, start in _matches(names, pattern)
    ]
    for kind, pattern in enumerate((key, value)):
        if not any(hit.kind == kind for hit in hits):
            raise InputError(
                f"no tensor is called {pattern}; the file has {len(names)}" + listing(names), code="names-unknown"
            )
    return _pair(hits)


def recognise_queries(names: Iterable[str]) -> dict[int, str]:
    """Layer numbers and names of query tensors (``layers.{layer}.query`` and the like); empty if there are none."""
    hits = _hits(list(names), PATTERNS, QUERY_WORDS)
    families = sorted({hit.family for hit in hits})
    if len(families) > 1:
        raise InputError("several names look like queries" + listing(families), code="names-ambiguous")
    return {hit.layer: hit.name for hit in hits if hit.layer is not None}


def listing(names: Iterable[str], limit: int = 8) -> str:
    """``names`` as indented lines to end a message with, the first ``limit`` of them."""
    names = list(names)
    lines = [f"\n  {name}" for name in names[:limit]]
    if len(names) > limit:
        lines.append(f"\n  ... and {len(names) - limit} more")
    return ":" + "".join(lines)


def _hits(names: list[str], patterns: Iterable[str], words: Iterable[str]) -> list[_Hit]:
    alternatives = "|".join(sorted(words, key=len, reverse=True))
    kind = rf"(?P<kind>{alternatives})"
    # A pair index after a word for a kind is not a kind: key_cache.0.1 stays unknown rather than be misread.
    expressions = [
        re.compile(pattern.replace("KIND", kind).replace("PAIR", r"(?P<kind>[01])"), re.IGNORECASE)
        for pattern in patterns
        if "query" not in words or "PAIR" not in pattern
    ]
    hits = []
    for name in (name for name in names if len(name) <= MAX_NAME):
        found = next((hit for hit in (expression.fullmatch(name) for expression in expressions) if hit), None)
        if found is not None:
            hits.append(_hit(name, found))
    return hits


def _hit(name: str, found: re.Match[str]) -> _Hit:
    word = found["kind"]
    pairs = (*KIND_WORDS, ("0", "1"))
    pair, kind = next(
        ((pair, pair.index(word.lower())) for pair in pairs if word.lower() in pair), ((word.lower(), ""), 0)
    )
    digits = found.groupdict().get("layer") or ""
    spans = {found.span("kind"): "|".join(pair).rstrip("|")}
    if digits:
        spans[found.span("layer")] = "{layer}"
    family = name
    for (start, stop), text in sorted(spans.items(), reverse=True):
        family = family[:start] + text + family[stop:]
    start = found.start("layer") if digits else 0
    return _Hit(name, int(digits) if digits else None, kind, family, digits, start)


def _matches(names: Iterable[str], pattern: str) -> Iterable[tuple[str, str, int]]:
    parts = [re.escape(part) for part in pattern.split("{layer}")]
    if len(parts) > 2:
        raise InputError(f"the pattern {pattern} has {{layer}} more than once", code="pattern-layer")
    expression = re.compile(r"(\d+)".join(parts))
    for name in names:
        if found := expression.fullmatch(name):
            yield (name, found[1], found.start(1)) if len(parts) == 2 else (name, "", 0)


def _pair(hits: list[_Hit]) -> Naming:
    layers: dict[int, list[_Hit | None]] = {}
    for hit in hits:
        slot = layers.setdefault(hit.layer or 0, [None, None])
        twin = slot[hit.kind]
        if twin is not None:
            raise InputError(
                f"layer {hit.layer or 0} has two tensors of the same kind: {twin.name} and {hit.name}",
                code="names-duplicate",
            )
        slot[hit.kind] = hit
    lone = [
        f"layer {layer} has {'a key' if pair[0] else 'a value'} ({(pair[0] or pair[1]).name}) "  # type: ignore[union-attr]
        f"but no {'value' if pair[0] else 'key'}"
        for layer, pair in sorted(layers.items())
        if None in pair
    ]
    if lone:
        raise InputError("every layer needs one key and one value" + listing(lone), code="names-unpaired")
    templates = [_template([pair[kind] for pair in layers.values()]) for kind in (0, 1)]
    named = {layer: (pair[0].name, pair[1].name) for layer, pair in sorted(layers.items()) if pair[0] and pair[1]}
    return Naming(templates[0], templates[1], named)


def _template(hits: list[_Hit | None]) -> str:
    """The template that restores the names of ``hits``, all of one kind."""
    present = [hit for hit in hits if hit is not None]
    width = len(present[0].digits) if any(hit.digits[:1] == "0" and len(hit.digits) > 1 for hit in present) else 0
    holder = f"{{layer:0{width}}}" if width else "{layer}"
    first = present[0]
    if first.layer is None:
        return first.name
    template = first.name[: first.start] + holder + first.name[first.start + len(first.digits) :]
    if all(spell(template, hit.layer or 0) == hit.name for hit in present):
        return template
    raise InputError(
        "the names do not follow one pattern" + listing(hit.name for hit in present), code="names-irregular"
    )

"""dquantcodec.testing: sound implementations pass, faulty ones fail with the least case in a vector file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from dquantcodec.codec import Codec, Pages
from dquantcodec.errors import FormatError
from dquantcodec.plan import Plan
from dquantcodec.testing import (
    CheckFailed,
    ContainerPlan,
    check_decoder,
    check_encoder,
    check_page_decoder,
    check_page_encoder,
    library_decode,
    library_encode,
    plain_decode,
    plain_encode,
    properties,
    replay,
    strategies,
)
from dquantcodec.testing.vectors import pack_case, unpack_case


def decode_page(plan: Plan, page: bytes, tokens: int) -> tuple[Any, Any]:
    return Codec(plan).decode(Pages(np.frombuffer(page, np.uint8)[None], tokens))


def encode_page(plan: Plan, keys: Any, values: Any) -> bytes:
    return Codec(plan).encode(keys, values).data.tobytes()


def test_the_library_decodes_containers(tmp_path: Path) -> None:
    names = check_decoder(library_decode, examples=50, coders=["prefix", "rans"], vector=tmp_path / "v.json")
    assert (
        check_decoder(library_decode, examples=20, coders=["grouped", "trellis"], vector=tmp_path / "v.json") == names
    )
    assert names == ["symbols_come_back", "any_bytes_decode_as_specified", "decoding_repeats"]
    assert not (tmp_path / "v.json").exists()


def test_the_library_encodes_containers(tmp_path: Path) -> None:
    assert len(check_encoder(library_encode, examples=50, coders=["prefix", "rans"], vector=tmp_path / "v.json")) == 4
    check_encoder(library_encode, examples=12, coders=["grouped", "trellis"], vector=tmp_path / "v.json")


def test_the_library_decodes_pages(tmp_path: Path) -> None:
    assert len(check_page_decoder(decode_page, examples=12, vector=tmp_path / "v.json")) == 2


@pytest.mark.parametrize("name", ["negative-scale-groups", "negative-scale-trellis"])
def test_pages_that_were_decoded_differently_once(name: str) -> None:
    """Found by the checks: no encoder writes a negative scale, and channels that are not coded are then -0."""
    replay(Path(__file__).parent / "found" / f"{name}.json", decode_page)


def test_the_library_encodes_pages(tmp_path: Path) -> None:
    assert len(check_page_encoder(encode_page, examples=8, vector=tmp_path / "v.json")) == 3


def without_padding(plan: ContainerPlan, data: bytes) -> Any:
    symbols, finding = plain_decode(plan, data)
    return symbols, None if finding == "container-padding" else finding


def test_a_decoder_that_leaves_padding_to_others_is_checked_as_such(tmp_path: Path) -> None:
    check_decoder(without_padding, examples=20, strict=False, vector=tmp_path / "v.json")
    with pytest.raises(CheckFailed, match="container-padding"):
        check_decoder(without_padding, examples=300, coders=["prefix"], vector=tmp_path / "v.json")


def wrong_high_half(plan: ContainerPlan, data: bytes) -> Any:
    return plain_decode(plan, data[2:4] + data[:2] + data[4:] if plan.coder == "rans" else data)


def ignores_the_state(plan: ContainerPlan, data: bytes) -> Any:
    symbols, finding = plain_decode(plan, data)
    return symbols, None if finding == "container-state" else finding


def crashes_on_overrun(plan: ContainerPlan, data: bytes) -> Any:
    symbols, finding = plain_decode(plan, data)
    if symbols is None:
        raise MemoryError("read beyond the container")
    return symbols, finding


def forgets_the_last_head(plan: ContainerPlan, data: bytes) -> Any:
    symbols, finding = plain_decode(plan, data)
    return (
        symbols if symbols is None or plan.heads == 1 else [*symbols[: -plan.head_dim], *[0] * plan.head_dim]
    ), finding


FAULTY: list[tuple[Callable[..., Any], str]] = [
    (wrong_high_half, "symbols_come_back"),
    (ignores_the_state, "any_bytes_decode_as_specified"),
    (crashes_on_overrun, "any_bytes_decode_as_specified"),
    (forgets_the_last_head, "symbols_come_back"),
]


@pytest.mark.parametrize(("decode", "name"), FAULTY)
def test_faulty_decoders_fail_with_a_vector_that_replays(decode: Callable[..., Any], name: str, tmp_path: Path) -> None:
    vector = tmp_path / "least.json"
    with pytest.raises(CheckFailed) as caught:
        check_decoder(decode, examples=200, coders=["rans", "prefix"], vector=vector)
    assert caught.value.property == name and str(vector) in str(caught.value)
    stored = json.loads(vector.read_text())
    assert stored["plan"]["heads"] * stored["plan"]["head_dim"] <= 4, "the least case is a small one"
    with pytest.raises(CheckFailed, match=name):
        replay(vector, decode)
    replay(vector, library_decode)
    replay(vector, plain_decode)


def test_faulty_encoders_fail(tmp_path: Path) -> None:
    def unflushed(plan: ContainerPlan, symbols: list[int]) -> bytes | None:
        data = plain_encode(plan, symbols)
        return None if data is None else data[:-1] + b"\1"

    def cut(plan: ContainerPlan, symbols: list[int]) -> bytes | None:
        whole = plain_encode(plan, symbols)
        return bytes(plan.bytes) if whole is None else whole

    for encode, name in ((unflushed, "containers_hold_the_symbols"), (cut, "what_does_not_fit_is_refused")):
        with pytest.raises(CheckFailed) as caught:
            check_encoder(encode, examples=100, coders=["rans"], vector=tmp_path / "e.json")
        assert caught.value.property == name
        with pytest.raises(CheckFailed):
            replay(tmp_path / "e.json", encode)
        replay(tmp_path / "e.json", plain_encode)


def test_faulty_page_coders_fail(tmp_path: Path) -> None:
    def means_lost(plan: Plan, page: bytes, tokens: int) -> tuple[Any, Any]:
        at = Codec(plan).layout.used_head_bytes
        return decode_page(plan, page[:4] + bytes(at - 4) + page[at:], tokens)

    def old_memory(plan: Plan, keys: Any, values: Any) -> bytes:
        return encode_page(plan, keys, values)[:-1] + b"\1"

    with pytest.raises(CheckFailed, match="specification says"):
        check_page_decoder(means_lost, examples=40, vector=tmp_path / "p.json")
    replay(tmp_path / "p.json", decode_page)
    with pytest.raises(CheckFailed, match="page-unused"):
        check_page_encoder(old_memory, examples=20, vector=tmp_path / "t.json")
    replay(tmp_path / "t.json", encode_page)


@settings(max_examples=15)
@given(strategies.containers() | strategies.pages() | strategies.page_tensors())
def test_vectors_hold_their_case(case: Any) -> None:
    again = unpack_case(json.loads(json.dumps(pack_case(case))))
    if isinstance(case, strategies.ContainerCase):
        assert plain_decode(again.plan, again.data) == plain_decode(case.plan, case.data)  # type: ignore[union-attr]
        assert library_decode(again.plan, again.data) == (case.symbols, None)  # type: ignore[union-attr]
    elif isinstance(case, strategies.PageCase):
        assert (again.page, again.tokens) == (case.page, case.tokens)  # type: ignore[union-attr]
        properties.pages_decode_to_the_specified_numbers(decode_page, again)  # type: ignore[arg-type]
    else:
        assert again.keys.tobytes() == case.keys.tobytes()  # type: ignore[union-attr]
        assert encode_page(again.plan, again.keys, again.values) == encode_page(case.plan, case.keys, case.values)  # type: ignore[union-attr]


def test_other_files_are_no_vectors(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"format": "other"}')
    with pytest.raises(FormatError) as caught:
        replay(tmp_path / "x.json", library_decode)
    assert caught.value.code == "vector-format"


def test_without_hypothesis_one_line_says_what_to_install() -> None:
    script = "import sys; sys.modules['hypothesis'] = None; import dquantcodec.testing"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == (
        "ImportError: dquantcodec.testing needs Hypothesis: pip install 'dquantcodec[testing]'"
    )


GUIDE = Path(__file__).parent.parent / "docs" / "fuzzing.md"


def test_the_guide_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every example of docs/fuzzing.md runs, and prints what stands indented behind it."""
    monkeypatch.chdir(tmp_path)
    parts = re.split(r"```python\n(.*?)```\n", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, Any] = {}
    for code, text in zip(parts[1::2], parts[2::2]):
        exec(compile(code, str(GUIDE), "exec"), names)
        printed = capsys.readouterr().out
        if printed:
            shown = "".join(line[4:] + "\n" for line in text.strip("\n").split("\n\n")[0].split("\n"))
            assert printed == shown
    assert (tmp_path / "failing.json").exists()

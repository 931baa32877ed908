"""The frozen vectors in ``formats/vectors``: library, plain reader and Kaitai parser agree on all of them."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from file_support import FORMATS, load_source
from file_support import plain_reader as plain

import dquantcodec.file as dqkv
from dquantcodec import errors
from dquantcodec.cli.info import collect

VECTORS = FORMATS / "vectors"
MANIFEST: dict[str, Any] = json.loads((VECTORS / "manifest.json").read_text("utf-8"))
VALID, INVALID = MANIFEST["valid"], MANIFEST["invalid"]
ABSENT = 3


def path_of(side: str, name: str) -> Path:
    return VECTORS / side / f"{name}.dqkv"


def digest(values: Any) -> str:
    """As the manifest has it: FP32, little-endian, one bit pattern for NaN."""
    values = np.where(np.isnan(values), np.float32("nan"), values).astype("<f4")
    return hashlib.sha256(values.tobytes()).hexdigest()


def classes_of_codes() -> dict[str, set[str]]:
    """The classes of every reason code, from the table of clause 9.4."""
    text = (FORMATS / "dqkv.md").read_text("utf-8")
    table = text[text.index("### 9.4 Reason codes") : text.index("### 9.5")]
    found: dict[str, set[str]] = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        codes = re.findall(r"`([a-z0-9-]+)`", cells[0]) if len(cells) == 3 else []
        kinds = cells[1].split(", ") if codes else []
        for place, code in enumerate(codes):
            found.setdefault(code, set()).add(kinds[min(place, len(kinds) - 1)])
    return found


CLASSES = classes_of_codes()


def test_the_vectors_are_those_of_the_manifest() -> None:
    assert len(VALID) >= 60 and len(INVALID) >= 40
    for side in ("valid", "invalid"):
        assert {path.stem for path in (VECTORS / side).iterdir()} == set(MANIFEST[side])
        for name, entry in MANIFEST[side].items():
            data = path_of(side, name).read_bytes()
            assert hashlib.sha256(data).hexdigest() == entry["sha256"], f"{name} is frozen; add another vector instead"
            assert len(data) <= 65536


@pytest.mark.parametrize("name", VALID)
def test_valid(name: str) -> None:
    entry = VALID[name]
    with dqkv.open(path_of("valid", name)) as reader:
        assert {str(n): s.tokens for n, s in enumerate(reader.sequences) if s.tokens} == entry["tokens"]
        assert sorted({finding.code for finding in reader.verify()}) == entry["findings"]
        found = {}
        for number, sequence in enumerate(reader.sequences):
            for place, layer in enumerate(sequence.layers if sequence.tokens else ()):
                if layer.spec.storage != "absent":
                    for kind in ("key", "value"):
                        found[f"{number}/{place}/{kind}"] = digest(getattr(layer, kind).read())
        assert found == entry["values"]


def read_plainly(file: Any) -> dict[str, str]:
    found = {}
    for number, sequence in enumerate(file.sequences):
        for place, layer in enumerate(file.header.layers if sequence.tokens else ()):
            if layer.storage != ABSENT:
                for kind in ("key", "value"):
                    rows = np.array(plain.read_tokens(file, place, kind, number), np.float32)
                    found[f"{number}/{place}/{kind}"] = digest(rows)
    return found


@pytest.mark.parametrize("name", VALID)
def test_valid_in_plain_python(name: str) -> None:
    entry = VALID[name]
    file = plain.open_file(path_of("valid", name).read_bytes())
    assert {str(n): s.tokens for n, s in enumerate(file.sequences) if s.tokens} == entry["tokens"]
    assert sorted(set(plain.verify(file))) == entry["findings"]
    assert read_plainly(file) == entry["values"]


@pytest.mark.parametrize("name", INVALID)
def test_invalid(name: str) -> None:
    """Refused by its code, as the class that the specification gives the code, and in little memory."""
    entry = INVALID[name]
    path = path_of("invalid", name)
    at = "verify"
    findings: list[str] = []
    tracemalloc.start()
    try:
        with dqkv.open(path) as reader:
            at = "read"
            collect(str(path), reader)
            findings = sorted({finding.code for finding in reader.verify()})
            for sequence in reader.sequences:
                for layer in sequence.layers if sequence.tokens else ():
                    if layer.spec.storage != "absent":
                        assert len(layer.key.read()) == len(layer.value.read()) == sequence.tokens
            at = "verify"
    except errors.DQuantError as error:
        at = "open" if at == "verify" else at
        assert error.code == entry["code"]
        assert type(error).__name__.removesuffix("Error").lower() in CLASSES[error.code]
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert at == entry["at"] and findings == entry["findings"]
    assert at == "open" or entry["code"] in findings
    assert peak < 64 << 20


@pytest.mark.parametrize("name", INVALID)
def test_invalid_in_plain_python(name: str) -> None:
    entry = INVALID[name]
    data = path_of("invalid", name).read_bytes()
    try:
        file = plain.open_file(data)
    except plain.RefusedError as refused:
        assert (entry["at"], entry["code"]) == ("open", refused.code)
        return
    assert sorted(set(plain.verify(file))) == entry["findings"]
    if entry["at"] == "verify":
        read_plainly(file)
        return
    with pytest.raises(plain.RefusedError) as caught:
        read_plainly(file)
    assert (entry["at"], entry["code"]) == ("read", caught.value.code)


def test_codes_are_those_of_the_specification() -> None:
    assert {entry["code"] for entry in INVALID.values()} <= set(CLASSES)
    assert set().union(*CLASSES.values()) == {"format", "unsupported", "checksum", "truncated", "limit", "identity"}


# --- Kaitai Struct and file(1) --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kaitai(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The parser that the compiler makes of ``dqkv.ksy``."""
    pytest.importorskip("kaitaistruct")
    node = shutil.which("node")
    packages = "kaitai-struct-compiler", "js-yaml"
    resolve = "; ".join(f"require.resolve('{package}')" for package in packages)
    if node is None or subprocess.run([node, "-e", resolve], capture_output=True).returncode:
        pytest.skip("needs node with kaitai-struct-compiler and js-yaml")
    out = tmp_path_factory.mktemp("kaitai")
    script = Path(__file__).with_name("compile_ksy.js")
    subprocess.run([node, str(script), str(FORMATS / "dqkv.ksy"), "python", str(out)], check=True)
    return load_source("dqkv_kaitai", out / "dqkv.py").Dqkv


def test_the_kaitai_parser_reads_every_valid_vector(kaitai: Any) -> None:
    for name, entry in VALID.items():
        data = path_of("valid", name).read_bytes()
        theirs, mine = kaitai.from_bytes(data), plain.open_file(data)
        head, own = theirs.header, mine.header
        assert (head.start.num_sequences, head.window) == (own.sequences, own.window)
        assert json.loads(head.json) == own.info
        assert [(x.storage.value, x.dtype.value, x.heads, x.head_size, x.number) for x in head.layers] == [
            (x.storage, x.dtype, x.heads, x.dim, x.number) for x in own.layers
        ]
        for their, profile in zip(head.profiles, own.profiles, strict=True):
            for kind in ("key", "value"):
                a, b = getattr(their, kind), getattr(profile, kind)
                assert (a.coder.value, a.grid.value, a.words, a.substreams) == (b.coder, b.grid, b.words, b.substreams)
                if b.grouping:
                    grouping = head.groupings[a.grouping]
                    assert tuple(grouping.head_order) == b.grouping.order
                    assert [tuple(row.places) for row in grouping.channels] == b.grouping.channels
                    assert list(grouping.table_of_group) == b.grouping.choice
                else:
                    assert tuple(head.tables[a.table].frequencies) == b.table.frequencies
        records = [item.record for item in theirs.log if item.is_record]
        assert len(records) >= len(mine.records) and (entry["findings"] or len(records) == len(mine.records))
        for record, known in zip(records, mine.records):
            assert (record.header.first_token, record.header.num_tokens, record.header.number) == (
                known.first, known.tokens, known.number,
            )  # fmt: skip
            payload = data[known.payload : known.payload_end]
            if known.type == plain.PAGES:
                assert tuple(record.payload.crcs) == plain.page_crcs(payload, known, own)
            elif known.type == plain.ROWS:
                blocks = plain.row_blocks(payload, known, own)
                assert [entry.crc for entry in record.payload.entries] == [block.crc for block in blocks]
                assert [block.stored for block in record.payload.blocks] == [
                    payload[block.at : block.at + block.size] for block in blocks
                ]
            elif known.type == plain.INDEX:
                assert [row.number for row in record.payload.headers] == list(range(known.number))


@pytest.mark.skipif(shutil.which("file") is None, reason="needs file(1)")
def test_file_names_every_valid_vector() -> None:
    paths = [str(path_of("valid", name)) for name in VALID]
    for options, expected in (
        ([], r"D-Quant KV cache, format 1\.\d+, \d+ layers, \d+ sequences"),
        (["--mime-type"], "application/vnd.dquant.kv"),
    ):
        command = ["file", "--brief", *options, "--magic-file", str(FORMATS / "dqkv.magic"), *paths]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        assert len(lines) == len(paths) and all(re.fullmatch(expected, line) for line in lines), lines
    newlines = path_of("invalid", "signature-newlines")
    command = ["file", "--brief", "--magic-file", str(FORMATS / "dqkv.magic"), str(newlines)]
    assert "D-Quant" not in subprocess.run(command, check=True, capture_output=True, text=True).stdout

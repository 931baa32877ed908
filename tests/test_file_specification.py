"""``formats/reader.py``, written from ``formats/dqkv.md`` alone, gets the library's bits out of files."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from file_support import plain_reader as plain
from file_support import tensors, write

import dquantcodec.file as dqkv
from dquantcodec.file import Layer
from dquantcodec.profile import PROFILES, Profile, StreamProfile


def test_checksum() -> None:
    assert plain.crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("r", sorted(plain.PALEY))
def test_paley_matrices(r: int) -> None:
    p = np.array(plain.paley(r))
    assert len(p) == 4 * r and (p @ p.T == 4 * r * np.eye(4 * r)).all()


BOTH_MEANS = Profile(
    key=StreamProfile(5, 600, "rans", precision=11, letter=2, mean=True),
    value=StreamProfile(4, 500, precision=9, letter=3, mean=True),
    window=64,
    substreams=4,
    name="both means",
)


#: Values rotated, and pages of another length.
FOUR = replace(
    PROFILES["2.26"], substreams=4, window=128, value=replace(PROFILES["2.26"].value, classes=None), name="four"
)


@pytest.mark.parametrize(
    ("layers", "factor"),
    [
        ([Layer(2, 64, "bfloat16", "2.26"), Layer(1, 3, "float32", storage="exact"), Layer(1, 1, storage="absent")], 1),
        ([Layer(3, 40, "float16", "paper-2.26"), Layer(3, 40, "float16", "paper-1.96")], 1),
        ([Layer(1, dim, "float32", BOTH_MEANS) for dim in (1, 7, 12, 80, 100)], 1),
        ([Layer(1, dim, "float32", BOTH_MEANS) for dim in (28, 36, 44, 60)], 1e9),
        ([Layer(2, 64, "bfloat16", "2.26"), Layer(4, 20, "float32", FOUR), Layer(3, 80, "float16", "1.96")], 1),
        ([Layer(4, 64, "bfloat16", "2.26", head_groups=2), Layer(4, 80, "float16", "paper-2.26", head_groups=4)], 1),
        ([Layer(1, 300, "float32", "3.0"), Layer(1, 256, "bfloat16", "1.96"), Layer(5, 7, "float32", "1.96")], 1e9),
        ([Layer(2, 64, "bfloat16", "2.26-t"), Layer(2, 80, "float32", "1.96-t")], 1),
    ],
    ids=["prefix", "rans", "both-means", "odd-orders", "fitted", "head-groups", "fitted-wide", "trellis"],
)
def test_the_specification_is_enough(tmp_path: Path, layers: list[Layer], factor: float) -> None:
    fitted = [layer for layer in layers if layer.storage == "coded" and layer.fitted_profile]
    pairs = tensors(layers, 80)
    if fitted:
        pairs = [
            pair
            if pair[0] is None
            else tuple((array * np.geomspace(0.1, 4, array.shape[2])).astype(array.dtype) for array in pair)  # type: ignore[misc, union-attr]
            for pair in pairs
        ]
    if factor != 1:
        pairs = [tuple((array * np.float32(factor)).astype(array.dtype) for array in pair) for pair in pairs]  # type: ignore[misc, union-attr]
    data = write(tmp_path / "x.dqkv", layers, pairs, sinks=3, recent=9, _record_target=1)
    mine = plain.open_file(data)
    assert plain.verify(mine) == []
    with dqkv.open(tmp_path / "x.dqkv") as reader:
        grouped = [plan for layer in reader.layers for plan in layer.plans if plan.key.grouping]
        assert len(grouped) >= len(fitted) - 1 and (not fitted or grouped)
        for place, layer in enumerate(layers):
            if layer.storage == "absent":
                continue
            for kind in ("key", "value"):
                theirs = getattr(reader.layers[place], kind).read()
                rows = [struct.pack(f"<{len(row)}f", *row) for row in plain.read_tokens(mine, place, kind)]
                assert b"".join(rows) == theirs.tobytes()

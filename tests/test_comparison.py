"""The comparison with other formats: blocks and coders are those of the quality harness, the page is the result's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / "benchmarks" / "comparison"
RESULT = REPOSITORY / "benchmarks" / "results" / "peers.json"
if not FOLDER.is_dir():
    pytest.skip("the benchmarks are not part of this distribution", allow_module_level=True)
sys.path[:0] = [str(FOLDER), str(REPOSITORY / "benchmarks" / "quality")]

import blocks  # noqa: E402
import comparison_page  # noqa: E402
import contenders  # noqa: E402
from peers import ggml, kivi  # noqa: E402


@pytest.mark.parametrize("kind", blocks.CODERS)
def test_compiled_blocks_are_those_of_the_quality_harness(kind: str) -> None:
    numbers = np.random.default_rng(0).standard_normal((500, blocks.BLOCK)).astype(np.float32)
    numbers[3] = 0
    numbers[4, 7] = -numbers[4].max() - 9
    numbers[5] = np.arange(blocks.BLOCK) * np.float32(127 / 62)  # halves
    encode, decode = blocks.CODERS[kind]
    scales, codes = encode(numbers)
    pack, unpack = ggml.TYPES[kind]
    np.testing.assert_array_equal(
        np.concatenate([scales[:, None].view(np.uint8), codes.view(np.uint8)], axis=1), pack(numbers)
    )
    np.testing.assert_array_equal(decode((scales, codes)), unpack(pack(numbers)))


@pytest.mark.parametrize(("bits", "group"), [(2, 32), (4, 128)])
def test_packed_kivi_is_that_of_the_quality_harness(bits: int, group: int) -> None:
    keys, values = np.random.default_rng(0).standard_normal((2, 256, 2, 64)).astype(np.float32)
    ours, theirs = (
        contenders.kivi(keys, values, bits=bits, group=group).code(),
        kivi.code(keys, values, bits=bits, group=group),
    )
    np.testing.assert_array_equal(ours.keys, theirs.keys)
    np.testing.assert_array_equal(ours.values, theirs.values)
    assert (ours.key_bytes, ours.value_bytes) == (theirs.key_bytes, theirs.value_bytes)


def test_the_page_is_what_the_result_says() -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    page = REPOSITORY / "docs" / "comparison.md"
    assert page.read_text(encoding="utf-8") == comparison_page.page(result)

"""docs/sharding.md says what benchmarks/results/quality/head_groups.json says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks" / "quality"))

import head_groups  # noqa: E402
from captures import Capture, CapturedLayer  # noqa: E402


def test_the_table_is_the_result() -> None:
    result = json.loads((ROOT / "benchmarks/results/quality/head_groups.json").read_text(encoding="utf-8"))
    assert head_groups.markdown(result) in (ROOT / "docs/sharding.md").read_text(encoding="utf-8")
    assert {(row["profile"], row["groups"]) for row in result["rows"] if row["heads"] == 8} == {
        (profile, groups) for profile in head_groups.PROFILES_SHOWN for groups in head_groups.GROUPS
    }


def test_streams_join_heads_with_their_queries() -> None:
    """Logits of every head stay what they were, whatever its layer's loudness."""
    rng = np.random.default_rng(0)
    layers = tuple(
        CapturedLayer(
            number,
            (rng.standard_normal((9, 3, 4)) * 10.0**number).astype(np.float32),
            rng.standard_normal((9, 3, 4)).astype(np.float32),
            rng.standard_normal((6, 2, 4)).astype(np.float32),
        )
        for number in range(3)
    )
    (stream,) = head_groups.joined(Capture("x", {}, layers, 0))
    assert stream.keys.shape == (9, 8, 4) and stream.queries is not None and stream.queries.shape == (2, 16, 4)
    for head in range(8):
        layer = layers[head // 3]
        assert layer.queries is not None
        for query in (2 * head, 2 * head + 1):
            logits = stream.queries[:, query] @ stream.keys[:, head].T
            wanted = layer.queries[query % 6] @ layer.keys[:, head % 3].T
            np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4 * float(np.abs(wanted).max()))

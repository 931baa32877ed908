"""Profiles beside the paper's codec at equal bytes: the comparison, its page, and the limits of classes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / "benchmarks" / "quality"
if not FOLDER.is_dir():
    pytest.skip("the benchmarks are not part of this distribution", allow_module_level=True)
sys.path.insert(0, str(FOLDER))
pytest.importorskip("torch")
pytest.importorskip("transformers")

import beyond  # noqa: E402
import class_limits  # noqa: E402
import page_beyond  # noqa: E402

from dquantcodec import PROFILES, encode, fit, table_choice, trellis_classes  # noqa: E402
from dquantcodec.group_grid import grouped_scale  # noqa: E402

TEXTS = ("novel", "law", "python")


def row(method: str, document: str, kl: float, bits: float) -> dict[str, Any]:
    return {
        "model": "smollm2", "window": {"context": 1152}, "method": method, "document": document, "kl_mean": kl,
        "bits_per_value": bits, "top1": 0.9, "key_nmse": 0.01, "value_nmse": 0.1, "perplexity": 11.0,
        "perplexity_full": 10.0,
    }  # fmt: skip


def rows(method: str, kls: tuple[float, ...], bits: float) -> list[dict[str, Any]]:
    return [row(method, document, kl, bits) for document, kl in zip(TEXTS, kls)]


def test_ratios_are_those_of_the_papers_codec_at_equal_bytes() -> None:
    found = beyond.compared(
        rows("dquantcodec 2.26", (0.01, 0.02, 0.01), 2.3)
        + rows("dquantcodec 1.96", (0.02, 0.02, 0.02), 2.0)
        + rows("dquantcodec 3.0", (0.001, 0.001, 0.001), 3.0)
        + rows("dquantcodec paper as large as 2.26", (0.1, 0.16, 0.1), 2.3)
        + rows("dquantcodec paper as large as 1.96", (0.3, 0.3, 0.3), 2.0)
        + rows("TurboQuant 3 bits", (0.2, 0.01, 0.2), 3.25)
        + rows("KIVI 2 bits", (0.001, 0.001, 0.001), 1.9)
    )
    by_method = {r["method"]: r for r in found}
    ours = by_method["dquantcodec 2.26"]
    assert ours["kl_ratio_to_paper"] == pytest.approx((10 * 8 * 10) ** (1 / 3))
    assert ours["unseen"][0] == pytest.approx((8 * 10) ** (1 / 2)), "the novel was looked at"
    assert ours["ci"][0] <= ours["kl_ratio_to_paper"] <= ours["ci"][1]
    assert ours["perplexity_ratio"] == pytest.approx(1.1)
    assert ours["worse_than_a_peer"] == ["law"], "a smaller peer does not count"
    assert by_method["dquantcodec 1.96"]["kl_ratio_to_paper"] == pytest.approx(15)
    assert by_method["dquantcodec paper as large as 1.96"]["kl_ratio_to_paper"] == pytest.approx(1)
    assert "dquantcodec 3.0" not in by_method, "nothing of the paper's is as large"


def test_the_page_is_what_the_results_say() -> None:
    results = page_beyond.load(REPOSITORY / "benchmarks" / "results")
    assert (REPOSITORY / "docs" / "beyond.md").read_text(encoding="utf-8") == page_beyond.page(results)


def test_a_variant_changes_what_it_names_and_nothing_afterwards() -> None:
    x = np.random.default_rng(0).standard_normal((2, 256, 2, 64)) * np.geomspace(0.05, 4, 64)
    keys, values = x.astype(np.float32)
    usual = fit.fit_plan("2.26", keys, values)

    def plan(variant: class_limits.Variant) -> Any:
        with class_limits.designed(variant):
            return fit.fit_plan(variant.profile(), keys, values)

    same = plan(class_limits.Variant("as it is"))
    assert (same.key.step, same.key.grouping.tables) == (usual.key.step, usual.key.grouping.tables)
    farther = plan(class_limits.Variant("farther", reach=6.0, field_bits=12))
    assert max(c.most for c in farther.key.grouping.classes) > max(c.most for c in usual.key.grouping.classes)
    small = plan(class_limits.Variant("small", table_bytes=8 << 10))
    assert sum(2 << t.precision for t in small.key.grouping.tables) <= 8 << 10
    with class_limits.designed(class_limits.Variant("clipped", clip=True)):
        assert encode.grouped_scale is not grouped_scale
    assert encode.grouped_scale is grouped_scale
    assert table_choice.dependent_classes is trellis_classes.dependent_classes
    again = fit.fit_plan("2.26", keys, values)
    assert again.key.step == usual.key.step
    assert PROFILES["2.26"].key.classes is not None and PROFILES["2.26"].key.classes.field_bits == 10

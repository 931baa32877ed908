"""Profiles beside the paper's codec at equal bytes: the comparison, its page, and the limits of classes."""

from __future__ import annotations

import json
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
import earlier  # noqa: E402
import ours  # noqa: E402
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
    alone = beyond.compared(
        rows("dquantcodec 2.26", (0.01,), 2.3) + rows("dquantcodec paper as large as 2.26", (0.1,), 2.3)
    )
    assert [r["worse_than_a_peer"] for r in alone] == [None, None], "nobody to compare with"
    assert page_beyond.PEERS == beyond.PEERS


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


def test_values_beyond_the_last_level_are_listed_and_exact() -> None:
    x = np.random.default_rng(1).standard_normal((2, 256, 2, 64)) * np.geomspace(0.05, 4, 64)
    keys, values = x.astype(np.float32)
    keys[200, 1, 7] = 100
    variants = [class_limits.Variant("clipped", clip=True), class_limits.Variant("listed", clip=True, listed=True)]
    clipped, listed = (class_limits.method(v, class_limits.Letters()).code(keys, values) for v in variants)
    assert abs(clipped.keys[200, 1, 7] - 100) > 10
    assert listed.keys[200, 1, 7] == 100
    changed = np.count_nonzero(listed.keys != clipped.keys)
    assert listed.key_bytes == clipped.key_bytes + 5 * changed
    assert 1 <= changed < keys.size / 100
    others = np.delete((listed.keys - keys)[200].ravel(), 64 + 7)
    usual = np.delete((class_limits.ours.named("2.26")(keys, values).keys - keys)[200].ravel(), 64 + 7)
    assert np.square(others).sum() < np.square(usual).sum(), "neither step nor scale follow what is listed"


def test_eight_states_take_as_many_bytes_and_twice_the_tables() -> None:
    x = np.random.default_rng(2).standard_normal((2, 128, 2, 64)) * np.geomspace(0.05, 4, 64)
    keys, values = x.astype(np.float32)
    plan = fit.fit_plan(ours.eight_states("2.26-t"), keys, values)
    four = fit.fit_plan("2.26-t", keys, values)
    assert (plan.key.grouping.states, plan.key.words) == (8, four.key.words)
    assert 48 << 10 < sum(8 * (2 << t.precision) for t in plan.key.grouping.tables) <= 96 << 10


def result(rows: dict[str, tuple[float, int]], **fields: Any) -> dict[str, Any]:
    """Rows by method: KL and number of documents."""
    found = [{"model": "m", "method": m, "documents": n, "kl": kl, "family": "old"} for m, (kl, n) in rows.items()]
    return {
        "baseline": "base",
        "documents": {"novel": "0"},
        "models": {"m": "1"},
        "versions": {},
        "rows": found,
    } | fields


def test_a_result_keeps_the_rows_that_a_later_run_lacks(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result({"more": (0.3, 10), "base": (0.1, 10), "kept": (0.2, 10), "again": (0.4, 10)})))
    methods = [class_limits.Method(name, "new", "", ours.named("2.26")) for name in ("again", "new", "base")]

    def join(rows: dict[str, tuple[float, int]], **fields: Any) -> list[tuple[str, float, str]]:
        found = earlier.joined(result(rows, **fields), path, ("model", "method"), methods, ["base"])
        return [(row["method"], row["kl"], row["family"]) for row in found["rows"]]

    assert join({"base": (0.1001, 10), "new": (0.5, 10), "again": (0.45, 10), "more": (0.9, 3)}) == [
        ("again", 0.45, "new"),
        ("new", 0.5, "new"),
        ("base", 0.1001, "new"),
        ("more", 0.3, "old"),
        ("kept", 0.2, "old"),
    ]
    with pytest.raises(ValueError, match=r"KL 0.100000 for \('m', 'base'\), not 0.120000"):
        join({"base": (0.12, 10)})
    with pytest.raises(ValueError, match="other texts novel"):
        join({"base": (0.1, 10)}, documents={"novel": "changed"})
    with pytest.raises(ValueError, match="another baseline"):
        join({"base": (0.1, 10)}, baseline="other")

"""The page on quality is what the results say, and plots can be drawn of whatever was measured."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / "benchmarks" / "quality"
if not FOLDER.is_dir():
    pytest.skip("the benchmarks are not part of this distribution", allow_module_level=True)
sys.path.insert(0, str(FOLDER))

import page  # noqa: E402
import page_hard_cases  # noqa: E402
import page_models  # noqa: E402
import page_parts  # noqa: E402
import result_files  # noqa: E402

MODELS = ("smollm2", "gemma3")
IMAGE = re.compile(r"!\[[^]]+\]\(images/quality/([^)]+)\.svg\)")


def model_row(model: str, method: str, family: str, bits: float, kl: float, ratio: Any = None) -> dict[str, Any]:
    return {
        "model": model, "method": method, "family": family, "documents": 3, "kl": kl, "kl_ratio": ratio,
        "perplexity_ratio": 1 + kl, "bits_per_value": bits, "top1": 0.75, "key_nmse": 0.02, "value_nmse": 0.13,
        "equal_share": 0.5,
    }  # fmt: skip


def made_up_models() -> dict[str, Any]:
    """Two models; a third family that no style knows, a KL of 0 and an interval without end."""
    rows = []
    for model in MODELS:
        rows += [
            model_row(model, "dquantcodec 2.26", "dquantcodec profiles", 2.375, 0.08, ratio(1, 1, 1)),
            model_row(model, "dquantcodec prefix 2.25", "dquantcodec prefix", 2.375, 0.079, ratio(1.01, 0.99, 1.03)),
            model_row(model, "dquantcodec prefix 3.00", "dquantcodec prefix", 3.125, 0.02, ratio(4, 3.5, 5)),
            model_row(model, "fixed width 6/3 levels", "fixed width", 2.25, 0.16, ratio(0.5, 0.4, 0.625)),
            model_row(model, "fixed width 8/4 levels", "fixed width", 2.75, 0.04, ratio(2, 1.5, 2.5)),
            model_row(model, "TurboQuant 2 bits", "TurboQuant", 2.25, 0.06, ratio(1.33, 1.1, 1.5)),
            model_row(model, "KIVI 2 bits", "KIVI, groups of 128", 2.375, 0.076, ratio(1.05, 0.9, 1.2)),
            model_row(model, "new", "nobody knows", 4.5, 0.01, ratio(8, 7, float("inf"))),
            model_row(model, "exact", "exact", 16.0, 0.0, ratio(float("inf"), float("inf"), float("inf"))),
        ]
    return {
        "baseline": "dquantcodec 2.26",
        "window": {"context": 2048, "recent": 128, "scored": 256, "continuation": 64},
        "documents": {"novel": "0", "law": "1", "python": "2"},
        "rows": rows,
    }


def ratio(mean: float, low: float, high: float) -> dict[str, float]:
    return {"mean": mean, "low": low, "high": high}


def made_up_methods() -> dict[str, Any]:
    rows = [
        {
            "method": f"{family} {bits}", "family": family, "source": "", "bits_per_value": float(bits),
            "key_nmse": 0.1 / 4**bits, "key_centred_nmse": scale / 4**bits, "value_nmse": scale / 3**bits,
            "attention_error": None,
        }
        for family, scale in (("dquantcodec prefix", 1.0), ("fixed width", 2.0), ("QuaRot", 5.0))
        for bits in (2, 3, 4)
    ]  # fmt: skip
    return {
        "capture": "made-up.safetensors", "layers": 1, "tokens": 9, "kv_heads": 2, "head_dim": 64, "rows": rows,
    }  # fmt: skip


def made_up_retrieval() -> dict[str, Any]:
    rows = [
        {
            "model": model, "kind": kind, "method": "dquantcodec 2.26", "bits_per_value": 2.375, "tried": 9, "kept": 8,
            "asked": 8, "right": 7,
        }
        for model in MODELS
        for kind in ("needle", "pairs")
    ]  # fmt: skip
    return {"recent": 128, "rows": rows}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder with every result: the committed reproduction, and small made-up ones of models."""
    folder = tmp_path / "results"
    folder.mkdir()
    for name in result_files.NAMES:
        if (committed := result_files.RESULTS / f"{name}.json").exists():
            shutil.copy(committed, folder)
    made_up = {"models": made_up_models(), "methods": made_up_methods(), "retrieval": made_up_retrieval()}
    for name, result in made_up.items():
        (folder / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    return folder


def test_the_committed_page_is_what_the_committed_results_make() -> None:
    written = page.PAGE.read_text(encoding="utf-8")
    assert written == page.page(result_files.load(result_files.RESULTS)), "run python benchmarks/quality page"


def test_every_image_of_the_committed_page_is_committed() -> None:
    names = IMAGE.findall(page.PAGE.read_text(encoding="utf-8"))
    assert names
    for name in names:
        path = page.PAGE.parent / "images" / "quality" / f"{name}.svg"
        assert path.is_file(), f"{path.name} is missing: run python benchmarks/quality plots"
        assert b"<dc:date>" not in path.read_bytes()


def test_lines_are_short_and_the_page_is_not_long(results: Path) -> None:
    for text in (page.PAGE.read_text(encoding="utf-8"), page.page(result_files.load(results))):
        lines = text.splitlines()
        assert len(lines) < 250
        assert not [line for line in lines if len(line) > 120 and not line.startswith(("|", "!"))]


def test_the_page_takes_its_figures_from_the_results(results: Path) -> None:
    before = page.page(result_files.load(results))
    path = results / "models.json"
    models = json.loads(path.read_text(encoding="utf-8"))
    models["rows"][0] |= {"kl": 0.0937, "top1": 0.4321}
    path.write_text(json.dumps(models), encoding="utf-8")
    after = page.page(result_files.load(results))
    assert "| 0.094 |" in after and "| 43.2 % |" in after
    assert "| 0.094 |" not in before and "| 43.2 % |" not in before


@pytest.mark.parametrize("name", result_files.NAMES)
def test_a_section_without_its_result_says_so(results: Path, name: str) -> None:
    missing = f"`{name}.json` is not among the results"
    assert missing not in page.page(result_files.load(results))
    (results / f"{name}.json").unlink()
    assert missing in page.page(result_files.load(results))


def test_all_sections_stand_without_any_result(tmp_path: Path) -> None:
    text = page.page(result_files.load(tmp_path))
    assert all(f"`{name}.json`" in text for name in result_files.NAMES)
    assert not IMAGE.search(text)


def test_methods_are_called_better_or_worse_only_where_the_interval_says_so() -> None:
    text = page_models.verdict(made_up_models(), "gemma3")
    assert "better than dquantcodec 2.26: TurboQuant 2 bits." in text
    assert "Not told apart: KIVI 2 bits." in text
    assert "Worse: 1 of them" in text, "fixed width"
    assert page_models.near_methods(made_up_models())[0] == "TurboQuant 2 bits"


def test_bits_for_equal_divergence_lie_on_the_line_between_neighbours() -> None:
    # From 0.16 at 2.25 bits to 0.04 at 2.75: a factor of two, as the baseline's 0.08 asks, is half the way.
    assert page_models.equal_kl_bits(made_up_models(), "smollm2") == pytest.approx(2.5 - 2.375)


def test_a_ratio_turned_round_keeps_its_order() -> None:
    assert result_files.inverse(ratio(0.5, 0.4, 0.625)) == pytest.approx((2, 1.6, 2.5))


def test_cases_count_as_silent_only_without_a_warning() -> None:
    def row(error: float | None, warned: bool = False) -> dict[str, Any]:
        return {"2.26 (default)": {"attention_error": error, "warned": warned}}

    cases = {"unchanged": row(0.3), "near": row(0.31), "bad": row(0.5), "loud": row(0.9, True), "zero": row(None)}
    assert [case for case in cases if page_hard_cases.listed(cases, case)] == ["unchanged", "bad", "loud"]
    text = " ".join(page_hard_cases.remarks(cases).split())
    assert "without a warning: near." in text
    assert "warns in 1 of 5 cases and stays silent in 1 whose error" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.3, "0.30"), (0.0964, "0.096"), (0.0999, "0.10"), (1.14, "1.1"), (12.3, "12"), (1e-7, "0.00000010"), (0, "0"),
     (None, "-")],
)  # fmt: skip
def test_numbers_have_two_significant_digits_and_no_exponent(value: float | None, text: str) -> None:
    assert page_parts.significant(value) == text


def test_lists_with_commas_in_them_stay_readable() -> None:
    assert page_parts.joined([]) == "none"
    assert page_parts.joined(["a", "b", "c"]) == "a, b and c"
    assert page_parts.joined(["a, b", "c", "d"]) == "a, b; c; and d"


# --- Plots ----------------------------------------------------------------------------------------------------------


def test_plots_of_all_results_are_those_the_page_shows(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import plots

    assert plots.main(["--results", str(results), "--out", str(tmp_path / "out")]) == 0
    drawn = {path.stem: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert set(drawn) == set(IMAGE.findall(page.page(result_files.load(results))))
    assert all(b"<svg" in picture and b"nan" not in picture.lower() for picture in drawn.values())


def test_plots_of_models_alone_are_the_same_every_time(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    import plots

    for name in set(result_files.NAMES) - {"models"}:
        (results / f"{name}.json").unlink(missing_ok=True)
    drawn = []
    for run in ("one", "two"):
        assert plots.main(["--results", str(results), "--out", str(tmp_path / run)]) == 0
        drawn.append({path.stem: path.read_bytes() for path in (tmp_path / run).iterdir()})
    assert set(drawn[0]) == {"rate-kl-smollm2", "rate-kl-gemma3", "kl-ratios"}
    assert drawn[0] == drawn[1]
    assert "not measured, not drawn: methods.json" in capsys.readouterr().err


def test_no_result_no_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import plots

    assert plots.main(["--results", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out").exists()


def test_error_bars_are_the_interval_of_the_ratio() -> None:
    pytest.importorskip("matplotlib")
    import plots

    below, above = plots.relative_interval(model_row("", "", "", 2, 0.16, ratio(0.5, 0.4, 0.8)))
    assert (0.16 - below, 0.16 + above) == pytest.approx((0.08 / 0.8, 0.08 / 0.4))
    assert plots.relative_interval(model_row("", "", "", 2, 0.16)) == (0, 0)
    assert plots.relative_interval(model_row("", "", "", 2, 0.16, ratio(8, 7, float("inf")))) == (0, 0)


def test_labels_lie_within_the_axes_and_not_on_each_other() -> None:
    pytest.importorskip("matplotlib")
    import plot_labels
    import plot_style

    figure, (axes,) = plot_style.figure(5, 4)
    x = [1.0, 2.0, 3.0, 4.0]
    curves = [plot_labels.Curve(f"curve number {i}", "#0072B2", x, [i + a / 10 for a in x], "o") for i in range(6)]
    # Two in the same corner: without care their labels would leave the axes, or cover each other.
    curves += [plot_labels.Curve(f"corner {i}", "#000000", [5.0], [0.0], "o", joined=False) for i in range(2)]
    for curve in curves:
        axes.plot(curve.x, curve.y)
    axes.set_xlim(0, 5)
    axes.set_ylim(0, 6)
    plot_labels.label_curves(figure, [(axes, curves)])
    figure.canvas.draw()
    boxes = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert set(boxes) == {curve.label for curve in curves}
    frame = axes.get_window_extent()
    for label, box in boxes.items():
        assert frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
        assert not [other for other in boxes if other != label and boxes[other].overlaps(box)]

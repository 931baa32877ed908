"""The page's sections on the paper's tables beside ours, and on hard cases."""

from __future__ import annotations

from page_models import equal_kl_bits, missing
from page_parts import fixed, image, interval, joined, paragraph, percent, significant, table
from result_files import (
    FIXED_WIDTH,
    PAPER_LEVELS_MOVED,
    PAPER_TABLE_4,
    Result,
    Results,
    inverse,
    method_row,
    model_name,
    models_of,
)

TABLE_2_LEVELS = (4, 6, 7, 8, 10, 11, 12, 14)
PAPER_PROFILE = "paper-2.26"


def paper(results: Results) -> str:
    text = """The paper measures Qwen3-8B and Llama-3.1-8B. Models of that size were not run here, so the same is
        measured on other data: independent normal numbers, which stand for perfect preprocessing, and the captured keys
        and values of SmolLM2-135M in the package's sample, whose streams are shorter."""
    parts = ["## The paper's tables beside ours", paragraph(text)]
    return "\n\n".join([*parts, table_1(results), table_2(results), drift(results), table_4(results)])


def table_1(results: Results) -> str:
    head = "### Table 1: rotation and mean removal"
    if "preprocessing" not in results:
        return f"{head}\n\n{missing('preprocessing')}"
    result = results["preprocessing"]
    rows = []
    for row in result["rows"]:
        other = row["paper"]
        pairs = [
            (percent(row["nmse"]), percent(other["nmse"])),
            (fixed(row["mean_over_rms"], 3), fixed(other["mean_over_rms"], 3)),
            (fixed(row["normal_gap"], 4), fixed(other["normal_gap"], 4)),
            (fixed(row["coding_gain"]), fixed(other["coding_gain"])),
        ]
        rows.append([f"{row['kind']}, {row['stage']}", *(f"{ours} / {theirs}" for ours, theirs in pairs)])
    names = ("ours / paper", "NMSE", "mean / RMS", "normal gap, bits", "coding gain, bits")
    return f"{head}\n\n{table(names, rows)}\n\n{paragraph(result['why_otherwise'])}"


def table_2(results: Results) -> str:
    head = "### Table 2: levels at fixed storage"
    if "alphabet" not in results:
        return f"{head}\n\n{missing('alphabet')}"
    result = results["alphabet"]
    rows = []
    for kind in ("key", "value"):
        known = result["paper_per_cent"][kind]
        rows.append([f"{kind}s, paper", *(fixed(known.get(str(m))) for m in TABLE_2_LEVELS)])
        for row in result["rows"]:
            if (row["kind"], row["coder"]) == (kind, "rans") and row["data"] in ("normal", "captured"):
                scaled = [
                    None if row["nmse"].get(str(m)) is None else 100 * row["nmse"][str(m)] for m in TABLE_2_LEVELS
                ]
                rows.append([f"{kind}s, {row['data']}, {row['stream_values']} values", *(fixed(x) for x in scaled)])
    names = ("NMSE, %; levels:", *(str(m) for m in TABLE_2_LEVELS))
    picture = image("levels", "error over the number of levels, keys and values")
    note = f"A dash: no encoder exists, since even the cheapest symbols do not fit. {result['why_otherwise']}"
    return f"{head}\n\n{table(names, rows)}\n\n{picture}\n\n{paragraph(note)}"


def _drift_row(result: Result, data: str, kind: str) -> Result:
    found = (row for row in result["rows"] if (row["data"], row["profile"], row["kind"]) == (data, PAPER_PROFILE, kind))
    return next(found)


def drift(results: Results) -> str:
    head = "### Figure 6: drift, the analytic model, and levels that a payload supports"
    return "\n\n".join([head, drift_statistics(results), payload(results)])


def drift_statistics(results: Results) -> str:
    if "drift_statistics" not in results:
        return missing("drift_statistics")
    result = results["drift_statistics"]
    rows = []
    for kind in ("key", "value"):
        theirs = result["paper"][kind]
        excess = fixed(theirs["analytic_excess"], 4)
        rows.append([f"{kind}s, paper", percent(theirs["changed"], 2), str(PAPER_LEVELS_MOVED), excess, "-", "-"])
        for data in ("normal", "captured"):
            row = _drift_row(result, data, kind)
            rows.append(
                [
                    f"{kind}s, {data}, {row['stream_values']} values",
                    percent(row["changed"], 2),
                    str(row["most_levels_moved"]),
                    fixed(row["analytic_excess"], 4),
                    percent(row["fill_before"]["over_budget"]),
                    percent(row["fill_after"]["over_budget"]),
                ]
            )
    names = (
        f"profile {PAPER_PROFILE}",
        "symbols changed",
        "levels moved, at most",
        "model excess, bits",
        "over budget before",
        "after",
    )
    pictures = (
        f"{image('symbols', 'shares of symbols beside the analytic and the sharpened model')}\n"
        f"{image('fill', 'cost of symbols over the budget before and after drift')}"
    )
    return f"{table(names, rows)}\n\n{paragraph(result['why_otherwise'])}\n\n{pictures}"


def payload(results: Results) -> str:
    if "payload" not in results:
        return missing("payload")
    result = results["payload"]
    needs = joined(
        [
            f"{point['levels']} levels of {point['kind']}s need {point['normal_entropy']:.2f} of "
            f"{point['payload']:.2f} bits"
            for point in result["operating_points"]
        ]
    )
    text = f"""The paper does not define its curves of levels over payloads. Here a payload supports the most levels
        whose entropy on normal numbers fits, so that the average stream needs no drift. At the paper's operating
        points, {needs}."""
    return f"{image('payload', 'most levels over the payload')}\n\n{paragraph(text)}"


def table_4(results: Results) -> str:
    head = "### Table 4: against fixed width in the same containers"
    if "models" not in results:
        return f"{head}\n\n{missing('models')}"
    models = results["models"]
    rows = []
    for model in models_of(models):
        base, other = method_row(models, model, models["baseline"]), method_row(models, model, FIXED_WIDTH)
        if not base or not other or not other["kl_ratio"]:
            continue
        more = equal_kl_bits(models, model)
        rows.append(
            [
                model_name(model),
                f"{significant(base['kl'])} / {significant(other['kl'])}",
                interval(*inverse(other["kl_ratio"])),
                *(f"{percent(base[name])} / {percent(other[name])}" for name in ("key_nmse", "value_nmse")),
                "-" if more is None else f"{more:+.2f}",
            ]
        )
    for name, known in PAPER_TABLE_4.items():
        rows.append(
            [
                f"{name}, paper",
                " / ".join(significant(kl) for kl in known.kl),
                interval(*known.ratio),
                *(" / ".join(f"{nmse:.1f} %" for nmse in pair) for pair in (known.key, known.value)),
                f"{known.more_bits:+.2f}",
            ]
        )
    names = ("entropy-coded / fixed width", "KL", "ratio of KL [95 %]", "key NMSE", "value NMSE", "bits to equal KL")
    text = f"""Ours is {models["baseline"]} against {FIXED_WIDTH} (keys/values). The last column is what fixed width
        needs more for the same KL, read off its curve. This differs from the paper in models and texts, in shorter
        streams, which pay more for metadata, and in that unused room in containers counts for us but not for fixed
        width."""
    picture = image("kl-ratios", "KL of fixed width over KL of entropy-coded containers, ours and the paper's")
    return f"{head}\n\n{table(names, rows)}\n\n{picture}\n\n{paragraph(text)}"

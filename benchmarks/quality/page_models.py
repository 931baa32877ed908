"""The page's sections on real models: predictions, methods at about equal bits, and errors on a capture."""

from __future__ import annotations

from math import log
from statistics import fmean

import numpy as np
from page_parts import fixed, image, interval, joined, paragraph, percent, significant, table
from result_files import Result, Results, method_row, model_name, models_of, on_all_texts

#: Methods are about equal in size within this many bits per value.
NEAR = 0.2
PROFILES = ("dquantcodec profiles", "dquantcodec trellis", "dquantcodec paper profiles")
#: Left out of tables at about equal bits, where they are the named profiles over again.
OWN_FAMILIES = tuple(f"dquantcodec {kind}" for kind in ("classes", "prefix", "rans", "rotated"))
DEFAULT = "dquantcodec 2.26"
#: One curve: rates of variance classes, and the named profiles between them.
CURVE = ("dquantcodec classes", "dquantcodec profiles")

#: What the models of the harness are.
DESCRIPTIONS = {
    "smollm2": "SmolLM2-135M-Instruct (30 layers, 3 KV heads of 64 channels, weights in Q4_1)",
    "gemma3": "Gemma 3 270M (18 layers, 1 KV head of 256, 15 of the layers with a sliding window; weights in Q4_K_M)",
}


def missing(name: str) -> str:
    return paragraph(f"This has not been measured yet: `{name}.json` is not among the results.")


def how(results: Results) -> str:
    parts = ["## What was measured, and how"]
    if models := results.get("models"):
        window = models["window"]
        names = [DESCRIPTIONS.get(model, model_name(model)) for model in models_of(models)]
        documents = list(models["documents"])
        parts.append(
            paragraph(
                f"""**Models.** {joined(names)}, computed in float32. **Texts.** {len(documents)} passages of different
                kinds ({joined(documents)}), the same on every machine. **Window.** A model reads {window["context"]}
                tokens in full precision. Then all but the newest {window["recent"]} tokens of every layer's cache are
                replaced by what a method gives back. The next {window["scored"]} tokens are read one after another, and
                the predictions after each are compared with those of the full-precision model: KL(full || coded) in
                nats, and how often the most probable token is the same (top-1). Equal tokens are those that both models
                write greedily before the first difference, as a share of {window["continuation"]}. The newest
                {window["recent"]} tokens stay exact for every method, as in the paper, and bits per value count the
                coded tokens alone."""
            )
        )
    parts.append(
        paragraph(
            """**Bits count every stored byte**: code words and unused room in containers, scales, offsets, means with
            their padding, exact outliers. Only constants of a method (codebooks, rotation signs, probability tables)
            are free. A profile's name states the bits for 1024 values a stream; small models pay more for metadata. For
            fixed width, a symbol costs the ideal log2 of its levels, as in the paper, and unused room is not counted.
            Other methods are our own code after their papers and formats, except turbo-attn, which is the package
            without calibration. Exact windows and outlier channels that some of them add are left out.
            **Intervals** are 95 % bootstrap intervals over documents, paired between methods; they say nothing about
            other models."""
        )
    )
    return "\n\n".join(parts)


def headline(models: Result) -> str:
    """The default profile beside the baseline, all models in one sentence."""
    parts = []
    for method in (DEFAULT, models["baseline"]):
        rows = [row for model in models_of(models) if (row := method_row(models, model, method))]
        if not rows:
            continue
        bits, top1, perplexity = (
            joined([show(row) for row in rows])
            for show in (
                lambda row: fixed(row["bits_per_value"]),
                lambda row: percent(row["top1"]),
                lambda row: fixed(row["perplexity_ratio"], 3),
            )
        )
        models_named = joined([model_name(row["model"]) for row in rows])
        verb = "finds" if len(rows) == 1 else "find"
        parts.append(
            f"With {method}, at {bits} bits, {models_named} {verb} the same token most probable at {top1} of the "
            f"positions, with perplexity times {perplexity}."
            if not parts
            else f"With {method}, at {bits} bits, it is {top1} and times {perplexity}."
        )
    return " ".join(parts)


def _main_cells(row: Result) -> list[str]:
    return [
        fixed(row["bits_per_value"]),
        f"{16 / row['bits_per_value']:.1f}x",
        significant(row["kl"]),
        percent(row["top1"]),
        fixed(row["perplexity_ratio"], 3),
        percent(row["equal_share"], 0),
    ]


def below_our_curve(models: Result, model: str) -> list[str]:
    """Other methods with less KL than our curve of variance classes has at their bits, linear in both logarithms."""
    mine = [row for row in models["rows"] if row["model"] == model and row["kl"] > 0]
    own = sorted((log(row["bits_per_value"]), log(_kl(models, row))) for row in mine if row["family"] in CURVE)
    if not own:
        return []
    x, y = zip(*own)
    others = [row for row in mine if not row["family"].startswith("dquantcodec")]
    return [
        row["method"]
        for row in others
        if x[0] <= log(row["bits_per_value"]) and log(_kl(models, row)) < np.interp(log(row["bits_per_value"]), x, y)
    ]


def _kl(models: Result, row: Result) -> float:
    return float(on_all_texts(models, row)["kl"])


def curve_remark(models: Result) -> str:
    found = [(model_name(model), below_our_curve(models, model)) for model in models_of(models)]
    if not any(row["family"] in CURVE for row in models["rows"]):
        return ""
    listed = "; ".join(f"{joined(methods)} ({model})" for model, methods in found)
    return f"Methods with less KL than our curve, or its end, at their bits: {listed}."


def fewer_texts(models: Result) -> str:
    """What was measured on some of the texts alone, and how plots show it."""
    families: dict[str, set[int]] = {}
    for row in models["rows"]:
        if row["documents"] < len(models["documents"]):
            families.setdefault(row["family"].removeprefix("dquantcodec "), set()).add(row["documents"])
    if not families:
        return ""
    count = "/".join(map(str, sorted(set().union(*families.values()))))
    return f"On {count} texts only, and plotted by their ratio to the baseline there: {joined(list(families))}."


def main_result(results: Results) -> str:
    parts = ["## Main result"]
    if "models" not in results:
        return "\n\n".join([*parts, missing("models")])
    models = results["models"]
    names = models_of(models)
    profiles = dict.fromkeys(row["method"] for row in models["rows"] if row["family"] in PROFILES)
    body = []
    for profile in profiles:
        mine = [method_row(models, model, profile) for model in names]
        cells = [_main_cells(row) if row else ["-"] * 6 for row in mine]
        body.append([named(models, profile).removeprefix("dquantcodec "), *map(" / ".join, zip(*cells))])
    head = ("profile", "bits/value", "smaller than FP16", "KL, nats", "top-1", "perplexity ratio", "equal")
    parts.append(paragraph(headline(models)))
    parts.append(table(head, body))
    parts.append(
        "\n".join(
            image(f"rate-kl-{model}", f"KL divergence over stored bits, {model_name(model)}")
            for model in models_of(models)
        )
    )
    parts.append(
        paragraph(
            f"""Cells are those of {" / ".join(map(model_name, names))}. Profiles whose names begin with `paper` are the
            paper's codec; the others have variance classes, and keep the first token exact. In the plots, both axes
            logarithmic, lower and further left is better; bars are the intervals of a method's ratio to
            {models["baseline"]}. Variance classes have levels up to 127; wide channels would need more from about 5.5
            bits on, where bits help less. {curve_remark(models)} {fewer_texts(models)}"""
        )
    )
    return "\n\n".join(parts)


def near_methods(models: Result) -> list[str]:
    """Methods within :data:`NEAR` bits of the baseline in some model, those of least KL first.

    Our own families are left out: at these rates they are the named profiles over again.
    """
    kl: dict[str, list[float]] = {}
    for model in models_of(models):
        base = method_row(models, model, models["baseline"])
        for row in models["rows"] if base else []:
            close = abs(row["bits_per_value"] - base["bits_per_value"]) <= NEAR
            if row["model"] == model and close and row["family"] not in OWN_FAMILIES:
                kl.setdefault(row["method"], []).append(max(row["kl"], 1e-300))
    return sorted(kl, key=lambda method: fmean(map(log, kl[method])))


def verdict(models: Result, model: str) -> str:
    """Which other methods at about equal bits are better or worse than the baseline, as far as intervals tell."""
    groups: dict[str, list[str]] = {"better": [], "worse": [], "open": []}
    for method in near_methods(models):
        row = method_row(models, model, method)
        if row and row["kl_ratio"] and not row["family"].startswith("dquantcodec"):
            low, high = row["kl_ratio"]["low"], row["kl_ratio"]["high"]
            groups["better" if low > 1 else "worse" if high < 1 else "open"].append(method)
    return (
        f"**{model_name(model)}.** Of the other methods, better than {models['baseline']}: {joined(groups['better'])}. "
        f"Not told apart: {joined(groups['open'])}. Worse: {len(groups['worse'])} of them."
    )


def named(models: Result, method: str) -> str:
    """The method, and on how many texts it was measured if not on all."""
    counts = sorted({row["documents"] for row in models["rows"] if row["method"] == method})
    return method if counts == [len(models["documents"])] else f"{method} ({', '.join(map(str, counts))} texts)"


def near(results: Results) -> str:
    parts = ["## Methods at about equal bits"]
    if "models" not in results:
        return "\n\n".join([*parts, missing("models")])
    models = results["models"]
    names = models_of(models)
    body = []
    for method in near_methods(models):
        mine = [method_row(models, model, method) for model in names]
        bits = " / ".join(fixed(row["bits_per_value"]) if row else "-" for row in mine)
        body.append([named(models, method), bits, *(cell for row in mine for cell in _near_cells(row))])
    parts.append(
        paragraph(
            f"""All methods within {NEAR} bits of {models["baseline"]}, best first. The ratio is KL of
            {models["baseline"]} over KL of the method: above 1 the method is better. It does not correct for the bits
            by which two methods still differ."""
        )
    )
    head = [part for model in names for part in (f"{model_name(model)}: KL", "ratio [95 %]", "top-1")]
    parts.append(table(("method", "bits", *head), body))
    parts.append(paragraph(" ".join(verdict(models, model) for model in names)))
    return "\n\n".join(parts)


def _near_cells(row: Result | None) -> list[str]:
    if row is None:
        return ["-", "-", "-"]
    ratio = row["kl_ratio"]
    shown = interval(*(ratio[name] for name in ("mean", "low", "high"))) if ratio else "-"
    return [significant(row["kl"]), shown, percent(row["top1"])]


def capture(results: Results) -> str:
    parts = ["## Errors of keys and values"]
    if "methods" not in results:
        return "\n\n".join([*parts, missing("methods")])
    methods = results["methods"]
    parts.append(image("rate-nmse", "relative squared error of keys and of values over stored bits"))
    parts.append(
        paragraph(
            f"""Relative squared errors on captured keys and values ({methods["layers"]} layers, {methods["tokens"]}
            tokens, {methods["kv_heads"]} KV heads of {methods["head_dim"]}). Keys are compared after each channel's
            mean over 128 tokens is removed, because a constant moves all logits of a query alike and attention hardly
            sees it. Such errors know nothing of what attention looks at, so they need not order methods as KL does."""
        )
    )
    return "\n\n".join(parts)


def equal_kl_bits(models: Result, model: str) -> float | None:
    """Bits per value more that fixed width needs for the KL of the baseline: on its curve, linear in log KL."""
    base = method_row(models, model, models["baseline"])
    points = sorted(
        (row["bits_per_value"], row["kl"])
        for row in models["rows"]
        if (row["model"], row["family"]) == (model, "fixed width")
    )
    if base is None:
        return None
    for (bits, kl), (more_bits, less_kl) in zip(points, points[1:]):
        if less_kl <= base["kl"] < kl and less_kl > 0:
            share = (log(kl) - log(base["kl"])) / (log(kl) - log(less_kl))
            return bits + share * (more_bits - bits) - base["bits_per_value"]
    return None

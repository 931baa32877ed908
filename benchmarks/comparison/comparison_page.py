"""Writes the page "How it compares" from one result file, every figure and every ranking in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from page_parts import bullet, joined, paragraph, significant, table

#: What a reader compares the others with.
OURS = "dquantcodec 2.26"


def named(result: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in result["rows"] if row["name"] == name)


def others(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["family"] not in ("dquantcodec", "the paper's profile")]


def number(row: dict[str, Any], what: str) -> float:
    """A figure of a row; missing errors count as endless, so they win nothing."""
    value = row[what]
    return float("inf") if value is None else float(value)


def cells(row: dict[str, Any]) -> list[str]:
    mark = "**" if row["family"] == "dquantcodec" else ""
    texts = [
        row["name"],
        f"{row['bits_per_value']:.2f}",
        *(significant(row[name]) for name in ("key_centred_nmse", "value_nmse", "attention_error")),
        *(significant(row[name]["median"]) for name in ("encode", "decode") if name in row),
        row["runs"],
    ]
    return [f"{mark}{texts[0]}{mark}", *texts[1:]]


def table_of(result: dict[str, Any]) -> str:
    head = ("", "bits a value", "key NMSE", "value NMSE", "attention error", "encode", "decode", "speed of")
    return table(head, [cells(row) for row in sorted(result["rows"], key=lambda row: -row["bits_per_value"])])


def rivals(result: dict[str, Any]) -> str:
    """Which others are at least as near as ours in attention, and what they need for it."""
    ours = named(result, OURS)
    near = [row for row in others(result) if number(row, "attention_error") <= number(ours, "attention_error")]
    text = (
        f"**Error at a given size.** `{OURS}` stores {ours['bits_per_value']:.2f} bits a value and leaves an attention "
        f"error of {significant(ours['attention_error'])}. "
    )
    if not near:
        return text + "No other method of the table comes as near."
    least = min(near, key=lambda row: row["bits_per_value"])
    return (
        f"{text}Of the others, {least['name']} is the smallest that comes as near, with "
        f"{least['bits_per_value']:.2f} bits (error {significant(least['attention_error'])})."
    )


def smaller(result: dict[str, Any]) -> str:
    ours = named(result, OURS)
    below = [row for row in others(result) if row["bits_per_value"] < ours["bits_per_value"] + 0.5]
    if not below:
        return "No other method of the table stores less than half a bit more."
    best = min(below, key=lambda row: number(row, "attention_error"))
    return (
        f"Of the others with at most half a bit more than ours, {best['name']} ({best['bits_per_value']:.2f} bits) "
        f"is nearest, with an error of {significant(best['attention_error'])}."
    )


def fastest(rows: Sequence[dict[str, Any]], what: str) -> dict[str, Any]:
    return max(rows, key=lambda row: row[what]["median"])


SIMPLICITY = """**Simplicity**: FP8 is a cast and one scale, the block formats are a page of code; both need neither
plans nor windows, and can be written token by token. Ours needs a window of 128 tokens before it writes a page, and a
plan of a layer to be at its best."""
ENGINES = """**In an engine**: FP8, transformers' caches, llama.cpp's types and turbo-attn run in what serves models, on
GPUs. What our adapters were run against is said in the guides."""


def peers_win(result: dict[str, Any]) -> list[str]:
    ours, rest = named(result, OURS), others(result)
    found = []
    for what in ("encode", "decode"):
        bar = ours[what]["median"]
        ahead = sorted((row for row in rest if row[what]["median"] > bar), key=lambda row: -row[what]["median"])
        if ahead:
            times = significant(ahead[0][what]["median"] / bar)
            verb = "is" if len(ahead) == 1 else "are"
            names = joined([row["name"] for row in ahead])
            text = f"faster than `{OURS}` {verb} {names}, the first {times} times as fast"
        else:
            text = f"none of them was faster than `{OURS}` as it runs here"
        found.append(f"**To {what}**: {text}.")
    nearest = min(rest, key=lambda row: number(row, "attention_error"))
    found.append(
        f"**Least error**: with {nearest['bits_per_value']:.2f} bits {nearest['name']} leaves an attention error of "
        f"{significant(nearest['attention_error'])}. Who has the room should take it, or an exact cache."
    )
    return [*found, SIMPLICITY, ENGINES]


def trellis(result: dict[str, Any]) -> str:
    plain, dearer = named(result, OURS), named(result, f"{OURS}-t")
    times = plain["encode"]["median"] / dearer["encode"]["median"]
    return (
        f"`{OURS}-t` takes {significant(times)} times as long to encode as `{OURS}` and leaves "
        f"{significant(dearer['value_nmse'])} of the values' energy instead of {significant(plain['value_nmse'])}."
    )


def about(result: dict[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    return paragraph(
        f"""**What was run**: `{result["command"]}`, on `{result["capture"]}`: {result["layers"]} layers of
        SmolLM2-135M-Instruct reading a novel, {result["tokens"]} tokens, {result["kv_heads"]} heads of
        {result["head_dim"]}, queries of the last {result["query_positions"]} positions. Processor:
        {machine["processor"]}. Versions: {packages}."""
    )


NOTES = (
    """**Same input**: keys after RoPE and values, the numbers of a float16 cache, all tokens coded. The windows of
    exact recent tokens that ours, KIVI, transformers and turbo-attn keep are left out, for all alike; the one leading
    token that our profiles keep exact is counted.""",
    """**Everything counts**: codes, scales, zero points, norms, means, plans. Arrays are counted at the size at which
    the package keeps them. The group of transformers' caches is 64, along axis 1 for hqq and 0 for quanto.""",
    """**Key NMSE** is relative to the energy left after each channel's mean of 128 tokens, which attention hardly sees,
    is removed; value NMSE to all energy. The attention error is that of the output's norm, over the captured queries.
    All are means over layers.""",
    """**Speed** is million values a second of processor time, one thread, median of {repetitions} interleaved
    repetitions, keys and values together. Other programs used the machine too (load {load} at the end), and repetitions
    of one method differ by up to a factor of {spread}: read it as an order of magnitude. "Numba" is compiled code,
    "PyTorch" the package's own path on a CPU, "own code" a format written anew here: llama.cpp's hand-written loops and
    every GPU kernel are much faster than that. Ours does not
    count fitting a plan, which is done once per layer of a model.""",
    """**One small model, one text, short streams** ({values} values a token): larger models have longer streams, for
    which our scales and means weigh less. What coding does to a model's answers is on the page
    [How good is it](quality.md), with more methods.""",
)


def spread(result: dict[str, Any]) -> float:
    """The most by which the fastest repetition of a method differs from its slowest."""
    return max(float(row[what]["high"] / row[what]["low"]) for row in result["rows"] for what in ("encode", "decode"))


def page(result: dict[str, Any]) -> str:
    facts = {
        "repetitions": result["repetitions"],
        "spread": f"{spread(result):.1f}",
        "load": "unknown" if not result["load_average"] else f"{result['load_average'][0]:.0f}",
        "values": result["kv_heads"] * result["head_dim"],
    }
    parts = [
        "# How it compares",
        paragraph(
            """Other ways to store a KV cache beside this codec, all in one run on the same keys and values. The page is
            written by `python benchmarks/comparison`, its figures are those of `benchmarks/results/peers.json`."""
        ),
        table_of(result),
        paragraph(f"{rivals(result)} {smaller(result)} {trellis(result)}"),
        "## Where the others are better",
        "\n".join(bullet(text) for text in peers_win(result)),
        "## How to read it",
        "\n".join(bullet(text.format(**facts)) for text in NOTES),
        about(result),
    ]
    if result["not_run"]:
        parts.append("## Not run")
        reasons = [f"{row['name']} (`{row['package']}`): {row['reason']}" for row in result["not_run"]]
        parts.append("\n".join(bullet(text) for text in reasons))
    return "\n\n".join(parts) + "\n"

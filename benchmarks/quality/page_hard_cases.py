"""The page's section on hard cases: what they do to attention, what the command says, what helps."""

from __future__ import annotations

from page_models import missing
from page_parts import bullet, joined, paragraph, significant, table
from result_files import Result, Results

DEFAULT, LARGER, EXACT, SINKS, NO_MEANS = (
    "2.26 (default)",
    "larger budget",
    "exact layer",
    "4 exact sinks",
    "no mean removal",
)
#: A case is listed if its attention error is so many times that of the unchanged layer or more, or the reverse.
APART = 1.1
#: From here on a case without a warning is counted.
WORSE = 1.2

Cases = dict[str, dict[str, Result]]


def by_case(result: Result) -> Cases:
    """Rows by case and remedy."""
    found: Cases = {}
    for row in result["rows"]:
        found.setdefault(row["case"], {})[row["remedy"]] = row
    return found


def error(cases: Cases, case: str, remedy: str = DEFAULT) -> float | None:
    """Attention error; none where attention has no energy."""
    value: float | None = cases[case][remedy]["attention_error"]
    return value


def listed(cases: Cases, case: str) -> bool:
    """Whether a case differs from the unchanged layer."""
    found, usual = error(cases, case), error(cases, "unchanged")
    if found is None or not usual:
        return False
    return case == "unchanged" or cases[case][DEFAULT]["warned"] or not 1 / APART < found / usual < APART


def warns(row: Result) -> str:
    return "yes" if row["warned"] else "no"


def hard_cases(results: Results) -> str:
    head = "## Hard cases, and what to do"
    if "hard_cases" not in results:
        return f"{head}\n\n{missing('hard_cases')}"
    result = results["hard_cases"]
    cases = by_case(result)
    columns = (DEFAULT, LARGER, EXACT)
    bits = [f"{name}, {cases['unchanged'][name]['bits_per_value']:.2f} bits" for name in columns]
    rows = [
        [case, *(significant(error(cases, case, name)) for name in columns), warns(cases[case][DEFAULT])]
        for case in cases
        if listed(cases, case)
    ]
    text = f"""Inputs made from layer {result["layer"]} of {result["input"]["capture"]} ({result["input"]["tokens"]}
        tokens). The error is that of the attention output of the real queries, relative to its norm. Those queries were
        not trained with the changed keys, so it says how far attention moves, not what a model would answer. The last
        column is what `dqkv compress` says of the default profile: it estimates the error without queries and names
        layers that stand out."""
    parts = [head, paragraph(text), table(("attention error", *bits, "warns"), rows), paragraph(remarks(cases))]
    return "\n\n".join([*parts, "\n".join(advice(cases))])


def remarks(cases: Cases) -> str:
    usual = error(cases, "unchanged") or 0.0
    quiet = [case for case in cases if not listed(cases, case) and error(cases, case) is not None]
    warned = [case for case in cases if cases[case][DEFAULT]["warned"]]
    silent = [case for case in cases if case not in warned and (error(cases, case) or 0) > WORSE * usual]
    return f"""As the unchanged layer within {100 * (APART - 1):.0f} %, and without a warning: {joined(quiet)}. In all,
        `dqkv compress` warns in {len(warned)} of {len(cases)} cases and stays silent in {len(silent)} whose error is
        more than {WORSE} times the usual {significant(usual)}. Few tokens take more bits than the head of the table
        says, since a page holds whole tiles of 32. What to do:"""


def advice(cases: Cases) -> list[str]:
    sinks = [case for case in cases if SINKS in cases[case]]
    before, after = (joined([significant(error(cases, case, name), 3) for case in sinks]) for name in (DEFAULT, SINKS))
    slow = [case for case in cases if case.startswith("key bias") and "slow" in case]
    worst = max(slow, key=lambda case: error(cases, case, NO_MEANS) or 0, default="unchanged")
    return [
        bullet(
            """**A layer is named in a warning.** Keep it exact: `--exact-layers N`, at 16 bits per value for that
            layer. Between the two lies a larger `Profile(...)` in Python."""
        ),
        bullet(
            f"""**Key biases**, as in Qwen2.5. Means over 128 tokens take them away in channels that RoPE turns slowly:
            without mean removal the error of the largest is {significant(error(cases, worst, NO_MEANS))}, with it
            {significant(error(cases, worst))}. In channels that turn fast they do not; variance classes give those
            channels more levels. A plan without data rotates and has to span the bias with one grid."""
        ),
        bullet(
            f"""**Attention sinks.** `--sinks 4` keeps the first tokens exact. Here the error goes from {before} to
            {after}. Models that lean on their first token may gain more, which was not measured."""
        ),
        bullet(
            """**One channel far larger than the rest, or very large keys.** Classes give the channel levels of its
            own, which takes bits from the others. Large keys make attention pick single tokens, so small relative
            errors count. Only a larger budget or an exact layer helps."""
        ),
        bullet(
            """**One token far larger than the rest.** Whether a query picks it hangs on a single logit, so the error
            differs widely from token to token and from fit to fit, and an estimate over all tokens does not show it:
            no warning. Leading ones are kept exact by `--sinks`."""
        ),
    ]

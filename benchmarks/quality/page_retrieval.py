"""The page's section on facts that a model finds in its context."""

from __future__ import annotations

from page_models import missing
from page_parts import fixed, joined, paragraph, table
from result_files import Result, Results, model_name

#: The table takes no more; the others are in the results.
MOST_METHODS = 12


def retrieval_methods(rows: list[Result]) -> list[str]:
    """The :data:`MOST_METHODS` nearest in bits to the first method, which is ours, in the order of the results.

    Profiles without classes are left out: they are an earlier stage of the same profiles.
    """
    bits = {row["method"]: row["bits_per_value"] for row in reversed(rows) if not row["method"].endswith(" rotated")}
    own = rows[0]["bits_per_value"]
    chosen = sorted(bits, key=lambda method: abs(bits[method] - own))[:MOST_METHODS]
    return [method for method in dict.fromkeys(row["method"] for row in rows) if method in chosen]


def retrieval(results: Results) -> str:
    parts = ["## Finding facts in the context"]
    if "retrieval" not in results:
        return "\n\n".join([*parts, missing("retrieval")])
    found = results["retrieval"]
    parts.append(
        paragraph(
            f"""`needle` hides one sentence with a number in prose; `pairs` is a list of keys and numbers of which one
            is asked for. The context is read in full precision, all but its newest {found["recent"]} tokens are coded,
            and only then the question is read. Only cases that the full-precision model answers are asked. Cells are
            right answers of cases asked."""
        )
    )
    rows: list[Result] = found["rows"]
    columns = list(dict.fromkeys((row["model"], row["kind"]) for row in rows))
    cells = {(row["model"], row["kind"], row["method"]): row for row in rows}
    body = []
    for method in retrieval_methods(rows):
        mine = [cells.get((*column, method)) for column in columns]
        bits = list(dict.fromkeys(fixed(row["bits_per_value"]) for row in mine if row))
        body.append([method, " / ".join(bits), *(f"{row['right']}/{row['asked']}" if row else "-" for row in mine)])
    parts.append(table(["method", "bits", *(f"{model_name(model)}, {kind}" for model, kind in columns)], body))
    tried = [
        f"{row['kept']} of {row['tried']} ({model_name(model)}, {kind})"
        for model, kind in columns
        for row in [max((r for r in rows if (r["model"], r["kind"]) == (model, kind)), key=lambda r: r["kept"])]
    ]
    parts.append(
        paragraph(
            f"""Kept of the cases tried: {joined(tried)}; rows of fewer cases have the first of them. Small differences
            mean nothing."""
        )
    )
    return "\n\n".join(parts)

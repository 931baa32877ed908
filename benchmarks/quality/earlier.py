"""Results that grow: rows of an earlier result stay beside those measured since.

A result has one row a method, over all its documents, so a ratio is paired with the baseline of its own run.  Both runs
must therefore have measured the same: that is checked by the rows of baselines, which every run has.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from method import Method
from records import Row

#: KL of one method on the same documents differs between versions of PyTorch by less than this part.
SAME = 0.01


def joined(
    new: dict[str, Any], path: Path, key: Sequence[str], methods: Sequence[Method], baselines: Sequence[str] = ()
) -> dict[str, Any]:
    """``new`` with those rows of the result at ``path`` that it lacks, in the order of models and of ``methods``.

    ``key`` are the fields that tell rows apart.  Of two rows of one key that of more documents (or cases asked) stays,
    or the new one.  Raises ``ValueError`` where documents, window or baseline differ, or one of ``baselines`` has
    another KL now.
    """
    if not path.exists():
        return new
    old = json.loads(path.read_text(encoding="utf-8"))
    for field in ("window", "baseline", "chosen_on", "recent"):
        if field in new and json.loads(json.dumps(new[field])) != old[field]:
            raise ValueError(f"{path.name} has another {field}: {old[field]}, not {new[field]}")
    texts: dict[str, str] = new.get("documents", {})
    known: dict[str, str] = old.get("documents", {})
    if differing := [name for name, sha256 in texts.items() if known.get(name, sha256) != sha256]:
        raise ValueError(f"{path.name} was measured on other texts {', '.join(differing)}")
    rows = {tuple(row[field] for field in key): row for row in old["rows"]}
    for row in new["rows"]:
        earlier = rows.get(place := tuple(row[field] for field in key))
        alike = earlier and row["method"] in baselines and earlier["documents"] == row["documents"]
        if earlier and alike and abs(row["kl"] / earlier["kl"] - 1) > SAME:
            raise ValueError(f"{path.name} has KL {earlier['kl']:.6f} for {place}, not {row['kl']:.6f}")
        if earlier is None or _count(row) >= _count(earlier):
            rows[place] = row
    models = list(dict.fromkeys(row["model"] for row in [*old["rows"], *new["rows"]]))
    order = {method.name: number for number, method in enumerate(methods)}
    families = {method.name: method.family for method in methods}
    for row in rows.values():
        if "family" in row:
            # Families are how results are shown, and may have been regrouped since.
            row["family"] = families.get(row["method"], row["family"])
    result = {**old, **new, "rows": sorted(rows.values(), key=lambda row: _place(row, models, order))}
    for field in ("documents", "models"):
        if field in new:
            result[field] = {**old[field], **new[field]}
    if old["versions"] != new["versions"]:
        # Most rows may be older than this run; the page does not tell them apart, whoever reads the file can.
        result["earlier_versions"] = old.get("earlier_versions", old["versions"])
    return result


def _count(row: Row) -> int:
    counted = row["documents"] if "documents" in row else row["asked"]
    return counted if isinstance(counted, int) else len(counted)


def _place(row: Row, models: list[str], order: dict[str, int]) -> tuple[int, int]:
    return models.index(row["model"]), order.get(row["method"], len(order))

"""What goes beyond the paper, at equal bytes: KL divergence of the paper's codec over that of each profile.

    python benchmarks/quality beyond --rows FOLDER [FOLDER …] --json FILE

Reads the rows that ``evaluate`` left in ``FOLDER``.  A profile is compared with the paper's codec whose containers make
it at least as large (``dquantcodec paper as large as …``), document by document.  Parameters were chosen on three
documents; the ratio over the others is given apart.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import earlier
import intervals
import numpy as np
import records
from evaluate import ROWS
from methods import methods
from records import Row

#: Documents on which parameters were chosen.
CHOSEN_ON = ("novel", "jargon", "config")
#: Beside the method of which the name begins so.
BASELINES = {
    "dquantcodec 1.96": "dquantcodec paper as large as 1.96",
    "dquantcodec paper as large as 1.96": "dquantcodec paper as large as 1.96",
    # The paper has no profile of this size, and one of another would be no comparison.
    "dquantcodec 3.0": "",
}
BASELINE = "dquantcodec paper as large as 2.26"
BASES = (BASELINE, "dquantcodec paper as large as 1.96")
PEERS = ("KIVI", "QuaRot", "TurboQuant")


def baseline_of(method: str) -> str:
    return next((base for name, base in BASELINES.items() if method.startswith(name)), BASELINE)


def compared(rows: Sequence[Row]) -> list[Row]:
    """One row for each model, window and method that has a baseline: ``kl_ratio_to_paper`` above 1 is better."""
    found: dict[tuple[str, int], dict[str, dict[str, Row]]] = {}
    for row in rows:
        methods = found.setdefault((row["model"], row["window"]["context"]), {})
        methods.setdefault(row["method"], {})[row["document"]] = row
    result = []
    for (model, context), methods in sorted(found.items()):
        for method, mine in methods.items():
            base = methods.get(baseline_of(method), {})
            documents = [name for name in mine if name in base]
            if not documents:
                continue
            unseen = [name for name in documents if name not in CHOSEN_ON]
            ratios = {
                name: intervals.ratio([base[d]["kl_mean"] for d in some], [mine[d]["kl_mean"] for d in some])
                for name, some in (("all", documents), ("unseen", unseen))
                if some
            }
            mean = {
                field: float(np.mean([mine[d][field] for d in documents]))
                for field in ("bits_per_value", "top1", "key_nmse", "value_nmse")
            }
            result.append(
                {
                    "model": model,
                    "method": method,
                    "bits_per_value": mean.pop("bits_per_value"),
                    "kl": intervals.geometric_mean([mine[d]["kl_mean"] for d in documents]),
                    "kl_ratio_to_paper": ratios["all"].mean,
                    "ci": [ratios["all"].low, ratios["all"].high],
                    "unseen": [ratios["unseen"].mean, ratios["unseen"].low, ratios["unseen"].high]
                    if "unseen" in ratios
                    else None,
                    "paper": baseline_of(method),
                    "context": context,
                    "documents": documents,
                    "perplexity_ratio": intervals.geometric_mean(
                        [mine[d]["perplexity"] / mine[d]["perplexity_full"] for d in documents]
                    ),
                    "worse_than_a_peer": worse_than_a_peer(mine, methods, documents),
                    **mean,
                }
            )
    return result


def worse_than_a_peer(
    mine: dict[str, Row], methods: dict[str, dict[str, Row]], documents: Sequence[str]
) -> list[str] | None:
    """Documents on which a coder of another design, with as many bytes or more, diverges less; None without any."""
    worse: list[str] = []
    if not any(method.startswith(PEERS) for method in methods):
        return None
    for document in documents:
        peers = [
            rows[document]
            for method, rows in methods.items()
            if method.startswith(PEERS)
            and document in rows
            and rows[document]["bits_per_value"] >= mine[document]["bits_per_value"] - 0.05
        ]
        if any(peer["kl_mean"] < mine[document]["kl_mean"] for peer in peers):
            worse.append(document)
    return worse


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/quality beyond", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=Path, required=True, metavar="FOLDER", help="as of evaluate --out")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--keep", action="store_true", help="keep the rows of FILE that the folders lack")
    arguments = parser.parse_args(argv)
    rows = [row for folder in arguments.rows for row in records.read(folder / ROWS)]
    result = compared(rows)
    for row in result:
        low, high = row["ci"]
        print(
            f"{row['model']:<9} {row['context']:>5} {row['method']:<44} {row['bits_per_value']:.3f} {row['kl']:.5f} "
            f"{row['kl_ratio_to_paper']:6.2f} [{low:.2f}, {high:.2f}] top-1 {100 * row['top1']:.1f} % "
            f"perplexity {row['perplexity_ratio']:.4f} worse {row['worse_than_a_peer']}"
        )
    document = {
        "what": __doc__.splitlines()[0],
        "chosen_on": CHOSEN_ON,
        "versions": {package: version(package) for package in ("dquantcodec", "numpy", "torch", "transformers")},
        "rows": result,
    }
    if arguments.keep:
        document = earlier.joined(document, arguments.json, ("model", "context", "method"), methods(), BASES)
    arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0

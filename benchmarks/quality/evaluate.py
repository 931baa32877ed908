"""Models x documents x methods: how far predictions move when the KV cache is coded.

    python benchmarks/quality evaluate --out FOLDER [--model smollm2] [--only 'dquant*' …] [--baseline NAME]

Every combination becomes one line of ``FOLDER/rows.jsonl`` and one small ``.npz`` of its per-token measures; what is
there already is not computed again.  The full-precision run of a document is made once for all methods.  Nothing is
random: the same versions on the same machine give the same numbers.  A line is taken as valid as long as the fields
``KEY`` agree; after changing a method's code without changing its name, use another folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path

import earlier
import intervals
import models
import numpy as np
import records
import texts
import torch
from divergence import Divergence, Reference, Window, divergence, reference
from method import Method
from models import Model
from records import Row
from texts import Document
from tqdm import tqdm

#: Raised when a field changes its meaning.
SCHEMA = 1
KEY = ("schema", "code", "model_sha256", "dtype", "document_sha256", "window", "method")
ROWS = "rows.jsonl"


def selected(methods: Iterable[Method], patterns: Sequence[str]) -> list[Method]:
    """Those whose name or family matches one of ``patterns`` (as of file names); all without patterns."""
    return [
        method
        for method in methods
        if not patterns or any(fnmatchcase(name, p) for name in (method.name, method.family) for p in patterns)
    ]


def identity(model: Model, document: Document, method: Method, window: Window) -> Row:
    """The fields of a row that are known before it is computed."""
    return {
        "schema": SCHEMA,
        "code": f"dquantcodec {version('dquantcodec')}",
        "model": model.name,
        "model_sha256": model.sha256,
        "dtype": str(model.network.dtype).removeprefix("torch."),
        "device": model.device.type,
        "document": document.name,
        "document_sha256": document.sha256,
        "window": asdict(window),
        "method": method.name,
        "family": method.family,
    }


def measures(full: Reference, found: Divergence) -> Row:
    """KL in nats; ``bits_per_value`` and errors are those of the coded tokens only."""
    median, p99 = np.quantile(found.kl, [0.5, 0.99])
    return {
        "bits_per_value": found.size.bits_per_value,
        "coded_values": found.size.values,
        "key_nmse": found.size.key_nmse,
        "value_nmse": found.size.value_nmse,
        "kl_mean": float(found.kl.mean()),
        "kl_median": float(median),
        "kl_p99": float(p99),
        "top1": found.top1,
        "perplexity_full": float(np.exp(full.nll.mean())),
        "perplexity": found.perplexity,
        "equal_tokens": found.equal_tokens,
        "equal_share": found.equal_tokens / max(1, full.window.continuation),
    }


def evaluate(
    model: Model, documents: Sequence[Document], methods: Sequence[Method], window: Window, folder: Path
) -> tuple[list[Row], list[str]]:
    """The rows of every document and method, computing those that ``folder`` lacks, and what could not be computed.

    A document that is too short for ``window`` and a method that refuses the model's geometry are of the latter.
    """
    path = folder / ROWS
    known = {records.key(row, KEY): row for row in records.read(path)}
    rows, failures = [], []
    with tqdm(total=len(documents) * len(methods), desc=model.name, disable=None) as progress:
        for document in documents:
            full: Reference | None = None
            tokens: list[int] = []
            for method in methods:
                progress.set_postfix_str(f"{document.name}, {method.name}", refresh=True)
                row = identity(model, document, method, window)
                key = records.key(row, KEY)
                if key not in known:
                    tokens = tokens or model.tokens(document.text)
                    try:
                        full = full or reference(model.network, tokens, window)
                        found = divergence(model.network, full, method)
                    except ValueError as error:
                        failures.append(f"{model.name}, {document.name}, {method.name}: {error}")
                        progress.update()
                        continue
                    row |= measures(full, found)
                    row["per_token"] = save_tokens(folder, row, full, found)
                    records.append(path, row)
                    known[key] = row
                rows.append(known[key])
                progress.update()
    return rows, failures


def save_tokens(folder: Path, row: Row, full: Reference, found: Divergence) -> str:
    """KL and negative log likelihoods float64 ``[scored]`` beside the rows; the path relative to ``folder``."""
    name = "-".join(row[field] for field in ("model", "document", "method"))
    name = "".join(c if c.isalnum() or c in "-._" else "_" for c in name)
    digest = hashlib.sha256(records.key(row, KEY).encode()).hexdigest()
    path = folder / "tokens" / f"{name}-{digest[:10]}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with (partial := path.with_suffix(".partial")).open("wb") as file:
        np.savez_compressed(file, kl=found.kl, nll=found.nll, nll_full=full.nll)
    partial.replace(path)
    return path.relative_to(folder).as_posix()


def summary(rows: Sequence[Row], baseline: str) -> list[Row]:
    """One row a model and method over its documents; KL and perplexity ratios are geometric means.

    ``kl_ratio`` is KL of the baseline over KL of the method (above 1: better than the baseline), over the documents
    that both have; ``None`` without any.
    """
    by_method: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        by_method.setdefault((row["model"], row["method"]), {})[row["document_sha256"]] = row
    result = []
    for (model, method), documents in by_method.items():
        found = list(documents.values())
        base = by_method.get((model, baseline), {})
        common = [sha256 for sha256 in documents if sha256 in base]
        kl_ratio = (
            intervals.ratio([base[s]["kl_mean"] for s in common], [documents[s]["kl_mean"] for s in common])
            if common
            else None
        )
        mean = {
            field: float(np.mean([row[field] for row in found]))
            for field in ("bits_per_value", "top1", "key_nmse", "value_nmse", "equal_share")
        }
        result.append(
            {
                "model": model,
                "method": method,
                "family": found[0]["family"],
                "documents": len(found),
                "kl": intervals.geometric_mean([row["kl_mean"] for row in found]),
                "kl_ratio": asdict(kl_ratio) if kl_ratio else None,
                "perplexity_ratio": intervals.geometric_mean(
                    [row["perplexity"] / row["perplexity_full"] for row in found]
                ),
                **mean,
            }
        )
    return result


def table(rows: Sequence[Row], baseline: str) -> str:
    """The summary as text, one block a model."""
    width = max([len(row["method"]) for row in rows] + [len("method")])
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        lines += [
            f"{model}, {mine[0]['documents']} documents; KL ratio: {baseline} / method, 95 % interval over documents",
            f"{'method':<{width}} {'bits':>6} {'KL':>9} {'KL ratio':>24} {'top-1':>7} {'ppl':>7} {'equal':>6}"
            f" {'K NMSE':>8} {'V NMSE':>8}",
        ]
        for row in mine:
            r = row["kl_ratio"]
            ratio = f"{r['mean']:.3f} [{r['low']:.3f}, {r['high']:.3f}]" if r else "-"
            lines.append(
                f"{row['method']:<{width}} {row['bits_per_value']:>6.3f} {row['kl']:>9.5f} {ratio:>24}"
                f" {100 * row['top1']:>6.1f}% {row['perplexity_ratio']:>7.4f} {100 * row['equal_share']:>5.0f}%"
                f" {row['key_nmse']:>8.5f} {row['value_nmse']:>8.5f}"
            )
        lines.append("")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/quality evaluate", description=__doc__.splitlines()[0])
    models.add_arguments(parser)
    texts.add_arguments(parser)
    default = Window()
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="rows of this and earlier runs")
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="methods by name or family")
    parser.add_argument("--documents", nargs="+", default=["*"], metavar="PATTERN", help="documents by name")
    parser.add_argument("--baseline", metavar="METHOD", help="what KL ratios compare to (default: the first method)")
    parser.add_argument("--context", type=int, default=default.context, help="tokens read first")
    parser.add_argument("--recent", type=int, default=default.recent, help="newest of them that stay exact")
    parser.add_argument("--scored", type=int, default=default.scored, help="teacher-forced tokens after them")
    parser.add_argument("--continuation", type=int, default=default.continuation, help="greedy tokens compared")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary with versions")
    parser.add_argument("--keep", action="store_true", help="keep the rows of FILE that this run lacks")
    arguments = parser.parse_args(argv)

    # Only the command knows all methods; whoever imports this module passes their own.
    from methods import methods as all_methods

    torch.set_num_threads(arguments.threads)
    window = Window(arguments.context, arguments.recent, arguments.scored, arguments.continuation)
    methods = selected(all_methods(), arguments.only)
    documents = [
        document
        for document in texts.chosen(arguments, arguments.models)
        if any(fnmatchcase(document.name, pattern) for pattern in arguments.documents)
    ]
    if not methods or not documents:
        parser.error("no method or no document is left")
    baseline = arguments.baseline or methods[0].name
    rows: list[Row] = []
    failures: list[str] = []
    for name in arguments.model or list(models.WEIGHTS):
        model = models.load(name, arguments.models, arguments.device, arguments.dtype)
        found, failed = evaluate(model, documents, methods, window, arguments.out)
        rows += found
        failures += failed
    result = summary(rows, baseline)
    print(table(result, baseline) if result else "nothing was computed")
    for failure in failures:
        print(f"not computed: {failure}", file=sys.stderr)
    if arguments.json:
        versions = {package: version(package) for package in ("dquantcodec", "numpy", "torch", "transformers")}
        document = {
            "what": __doc__.splitlines()[0],
            "window": asdict(window),
            "baseline": baseline,
            "documents": {document.name: document.sha256 for document in documents},
            "models": {row["model"]: row["model_sha256"] for row in rows},
            "versions": versions,
            "rows": result,
        }
        if arguments.keep:
            document = earlier.joined(document, arguments.json, ("model", "method"), all_methods(), [baseline])
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if failures else 0

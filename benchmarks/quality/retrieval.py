"""Facts that a model finds in its context with the full cache: does it still find them when the cache is coded?

    python benchmarks/quality retrieval --out FOLDER [--model smollm2] [--only PATTERN …] [--jsonl FILE …]

Two kinds of cases are made here: ``needle`` hides one sentence with a number in prose, ``pairs`` is a list of
``key: number`` of which one is asked for.  The context is read in full precision, all but its newest tokens are coded,
and only then the question is read, so nothing of it shapes what was kept; the answer always lies in the coded part.
Cases of growing difficulty are tried until enough are kept: those that the full-precision model answers right.  The
number tried is printed, because accuracies are relative to what this model can do at all.  ``--jsonl`` takes cases
from LongBench-E or RULER files instead; there the place of the answer is not known.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import earlier
import models
import records
import texts
import torch
from evaluate import selected
from method import Method
from model_cache import coded_copy, greedy, prefill, read, shared_copy
from models import Model
from questions import PROSE, Case, built_in, from_document, prompt
from records import Row
from tqdm import tqdm
from transformers import DynamicCache

SCHEMA = 1
KEY = ("schema", "code", "model_sha256", "dtype", "case_sha256", "recent", "method")
ROWS = "retrieval.jsonl"
FULL = "full precision"


def answer(model: Model, cache: DynamicCache, question: Sequence[int], tokens: int) -> str:
    """What the model writes after ``question`` on top of ``cache``, which grows by the question."""
    first = int(read(model.network, question, cache, last_only=True)[-1].argmax())
    return str(model.tokenizer.decode([first, *greedy(model.network, cache, first, tokens - 1)]))


def is_right(text: str, answers: Sequence[str]) -> bool:
    """Whether one of ``answers`` stands in ``text`` as whole words, in any case: 123 is not in 1234."""
    return any(re.search(rf"(?<!\w){re.escape(right)}(?!\w)", text, re.IGNORECASE) for right in answers if right)


class Run:
    """Rows of one model, those of earlier runs included."""

    def __init__(self, model: Model, recent: int, folder: Path) -> None:
        self.model, self.recent, self.path = model, recent, folder / ROWS
        self.known = {records.key(row, KEY): row for row in records.read(self.path)}

    def rows(self, case: Case, methods: Sequence[Method]) -> list[Row]:
        """The full-precision row of ``case`` and, if that is right, one a method; computed only where missing."""
        cache: DynamicCache | None = None
        rows: list[Row] = []
        for method in (None, *methods):
            row = self._identity(case, method)
            key = records.key(row, KEY)
            if key not in self.known:
                context, question = prompt(self.model, case)
                cache = cache or prefill(self.model.network, context)[0]
                bits = 0.0
                if method is None:
                    # A copy, because the question must not stay in the cache that methods code.
                    used = shared_copy(cache)
                else:
                    used, size = coded_copy(cache, method, self.recent)
                    bits = size.bits_per_value
                text = answer(self.model, used, question, case.tokens)
                row |= {"bits_per_value": bits, "tokens": len(context), "text": text}
                row["right"] = is_right(text, case.answers)
                records.append(self.path, row)
                self.known[key] = row
            rows.append(self.known[key])
            if not rows[0]["right"]:
                break
        return rows

    def _identity(self, case: Case, method: Method | None) -> Row:
        return {
            "schema": SCHEMA,
            "code": f"dquantcodec {version('dquantcodec')}",
            "model": self.model.name,
            "model_sha256": self.model.sha256,
            "dtype": str(self.model.network.dtype).removeprefix("torch."),
            "kind": case.kind,
            "case_sha256": case.sha256,
            "recent": self.recent,
            "method": method.name if method else FULL,
        }


def evaluate(run: Run, cases: Iterator[Case], methods: Sequence[Method], wanted: int, limit: int) -> list[Row]:
    """Rows of at most ``limit`` cases, until ``wanted`` of them were answered right in full precision."""
    rows: list[Row] = []
    kept = 0
    with tqdm(total=wanted, desc=f"{run.model.name}, retrieval", disable=None) as progress:
        for case in islice(cases, limit):
            found = run.rows(case, methods)
            rows += found
            if found[0]["right"]:
                kept += 1
                progress.update()
            if kept == wanted:
                break
    return rows


def summary(rows: Sequence[Row]) -> list[Row]:
    """Cases tried and kept of every model and kind, and how many of those kept each method answers right."""
    result = []
    for model, kind in dict.fromkeys((row["model"], row["kind"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["kind"]) == (model, kind)]
        full = [row for row in mine if row["method"] == FULL]
        for method in dict.fromkeys(row["method"] for row in mine if row["method"] != FULL):
            found = [row for row in mine if row["method"] == method]
            result.append(
                {
                    "model": model,
                    "kind": kind,
                    "method": method,
                    "bits_per_value": sum(row["bits_per_value"] for row in found) / len(found),
                    "tried": len(full),
                    "kept": sum(row["right"] for row in full),
                    "asked": len(found),
                    "right": sum(row["right"] for row in found),
                }
            )
    return result


def table(rows: Sequence[Row]) -> str:
    width = max([len(row["method"]) for row in rows] + [len("method")])
    lines = []
    for model, kind in dict.fromkeys((row["model"], row["kind"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["kind"]) == (model, kind)]
        lines += [
            f"{model}, {kind}: {mine[0]['kept']} of {mine[0]['tried']} cases tried are right in full precision",
            f"{'method':<{width}} {'bits':>6} {'right':>9}",
        ]
        for row in mine:
            right = f"{row['right']}/{row['asked']}"
            lines.append(f"{row['method']:<{width}} {row['bits_per_value']:>6.3f} {right:>9}")
        lines.append("")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/quality retrieval", description=__doc__.splitlines()[0])
    models.add_arguments(parser)
    texts.add_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="rows of this and earlier runs")
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="methods by name or family")
    parser.add_argument("--kinds", nargs="+", default=["*"], metavar="PATTERN", help="needle, pairs")
    parser.add_argument("--cases", type=int, default=24, help="cases to keep of each kind")
    parser.add_argument("--limit", type=int, default=120, help="cases to try of each kind at most")
    parser.add_argument("--recent", type=int, default=128, help="newest tokens of the context that stay exact")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary with versions")
    parser.add_argument("--keep", action="store_true", help="keep the rows of FILE that this run lacks")
    arguments = parser.parse_args(argv)

    # Only the command knows all methods; whoever imports this module passes their own.
    from methods import methods as all_methods

    torch.set_num_threads(arguments.threads)
    methods = selected(all_methods(), arguments.only)
    if not methods:
        parser.error("no method is left")
    documents = texts.chosen(arguments, arguments.models)
    rows: list[Row] = []
    for name in arguments.model or list(models.WEIGHTS):
        model = models.load(name, arguments.models, arguments.device, arguments.dtype)
        run = Run(model, arguments.recent, arguments.out)
        if arguments.jsonl:
            asked = [from_document(document) for document in documents if document.answers]
            rows += evaluate(run, iter(asked), methods, len(asked), len(asked))
            continue
        fillers = documents if arguments.texts else [d for d in documents if d.name in PROSE]
        for kind, cases in built_in(model, fillers, arguments.recent).items():
            if any(fnmatchcase(kind, pattern) for pattern in arguments.kinds):
                rows += evaluate(run, cases, methods, arguments.cases, arguments.limit)
    result = summary(rows)
    print(table(result))
    if not result:
        print("no case was answered right in full precision", file=sys.stderr)
        return 1
    if arguments.json:
        versions = {package: version(package) for package in ("dquantcodec", "numpy", "torch", "transformers")}
        found = {"what": __doc__.splitlines()[0], "recent": arguments.recent, "versions": versions, "rows": result}
        if arguments.keep:
            found = earlier.joined(found, arguments.json, ("model", "kind", "method"), all_methods())
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0

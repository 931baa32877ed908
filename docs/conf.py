"""Sphinx: the pages of this folder, the specification as it lies in ``formats/``, and the command's own help.

pip install '.[docs]' && sphinx-build -W -b html docs docs/_build
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import dquantcodec
from dquantcodec.cli.answers import ANSWERS, BATCH, ERROR, Shape, rows
from dquantcodec.cli.main import build_parser

HERE = Path(__file__).parent

project = "dquantcodec"
author = copyright = "The dquantcodec developers"
version = release = dquantcodec.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "dquantcodec"
exclude_patterns = ["_build"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
nitpicky = False
# Links into the source tree are checked by the tests; here they are plain text.
suppress_warnings = ["myst.xref_missing"]


def commands() -> str:
    """Help of every sub-command, as the terminal shows it, and what it prints for programs."""
    parser = build_parser()
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    parts = [
        "# Command line\n",
        "`dqkv COMMAND --help` says the same. With `--json` every command prints one document, whose keys stand below "
        "its help; `layers[].layer` is a key of every object of a list. [Reading output by program](scripting.md) has "
        "the rest.\n",
        f"```text\n{parser.format_help()}```\n",
        f"If a command fails:\n\n{keys(ERROR)}",
        f"With several files, `compress`, `decompress` and `verify` say of each:\n\n{keys(BATCH)}",
    ]
    for name, command in actions[0].choices.items():
        parts.append(f"## dqkv {name}\n\n```text\n{command.format_help()}```\n")
        if name in ANSWERS:
            parts.append(f"With `--json`:\n\n{keys(ANSWERS[name])}")
    return "\n".join(parts)


def keys(shape: Shape) -> str:
    """A table of the keys of a document."""
    lines = [f"| `{path}` | {kind} | {meaning} |" for path, kind, meaning in rows(shape)]
    return "\n".join(["| key | type | meaning |", "|---|---|---|", *lines, ""])


def setup(_app: object) -> None:
    (HERE / "cli.md").write_text(commands(), encoding="utf-8")
    shutil.copyfile(HERE.parent / "formats" / "dqkv.md", HERE / "format.md")

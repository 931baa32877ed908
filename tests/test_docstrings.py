"""Examples in docstrings and on pages run as written; links lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import dquantcodec

MODULES = [
    m.name
    for m in pkgutil.walk_packages(dquantcodec.__path__, "dquantcodec.")
    if not m.name.endswith("__main__") and ".integrations" not in m.name
]
ROOT = Path(__file__).parent.parent
#: Pages whose examples need nothing but the package; those of others are run by the tests of what they are about.
PAGES = ("README.md", "docs/start.md", "docs/files.md", "docs/embedding.md", "docs/guides/scale-out.md")


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_hold(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert failed == 0


@pytest.mark.parametrize("page", PAGES)
def test_examples_of_pages_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page, one after another as a reader would, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    path = ROOT / page
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(path), "exec"), names)


def test_links_between_pages_lead_somewhere() -> None:
    """Links of the README and the documentation to files, and to headings of other pages."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if "_build" in path.parts or path.name in ("cli.md", "format.md"):
            continue
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
            place = target.partition("#")[0]
            generated = place in ("cli.md", "format.md")
            if place and "://" not in place and not generated:
                assert (path.parent / place).exists(), f"{path.name} links to {target}"

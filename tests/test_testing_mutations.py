"""The list of mutations stays applicable: every anchor stands in its file exactly once, and every named test exists."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

import dquantcodec

TESTS = Path(__file__).parent
TOOL = TESTS.parent / "tools" / "mutations.py"


def test_every_mutation_applies() -> None:
    if not TOOL.exists():
        pytest.skip("tools/mutations.py is not beside the tests")
    spec = importlib.util.spec_from_file_location("mutations", TOOL)
    assert spec and spec.loader
    mutations = sys.modules["mutations"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutations)
    assert len(mutations.MUTATIONS) >= 40
    assert len({m.what for m in mutations.MUTATIONS}) == len(mutations.MUTATIONS)
    package = Path(dquantcodec.__file__).parent.parent
    for mutation in mutations.MUTATIONS:
        text = (package / mutation.file).read_text(encoding="utf-8")
        assert text.count(mutation.old) == 1, f"{mutation.what}: the anchor stands {text.count(mutation.old)} times"
        assert mutation.old != mutation.new
        assert (TESTS.parent / re.split(r"\s", mutation.tests)[0]).exists()

"""The list of mutations stays applicable, and the record says that tests notice every one."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

import dquantcodec

TESTS = Path(__file__).parent
TOOL = TESTS.parent / "tools" / "mutations.py"


@pytest.fixture(scope="module")
def mutations() -> ModuleType:
    if not TOOL.exists():
        pytest.skip("tools/mutations.py is not beside the tests")
    sys.path.insert(0, str(TOOL.parent))
    spec = importlib.util.spec_from_file_location("mutations", TOOL)
    assert spec and spec.loader
    module = sys.modules["mutations"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_mutation_applies(mutations: ModuleType) -> None:
    assert len(mutations.MUTATIONS) >= 40
    assert len({m.what for m in mutations.MUTATIONS}) == len(mutations.MUTATIONS)
    package = Path(dquantcodec.__file__).parent.parent
    for mutation in mutations.MUTATIONS:
        text = (package / mutation.file).read_text(encoding="utf-8")
        assert text.count(mutation.old) == 1, f"{mutation.what}: the anchor stands {text.count(mutation.old)} times"
        assert mutation.old != mutation.new
        assert (TESTS.parent / re.split(r"\s", mutation.tests)[0]).exists()


def test_every_mutation_was_noticed_when_it_was_run(mutations: ModuleType) -> None:
    """The record is of the list as it stands (else: run the changed ones with ``--only``), and the page shows it."""
    if not mutations.RESULTS.exists():
        pytest.skip("benchmarks/results is not beside the tests")
    results = json.loads(mutations.RESULTS.read_text(encoding="utf-8"))
    recorded = {row["number"]: row for row in results["mutations"]}
    assert sorted(recorded) == list(range(1, len(mutations.MUTATIONS) + 1))
    for number, mutation in enumerate(mutations.MUTATIONS, 1):
        assert recorded[number].items() >= asdict(mutation).items(), f"run mutation {number} again"
        assert recorded[number]["noticed_by"], f"no test notices mutation {number}"
    assert mutations.table(results) in (TESTS.parent / "docs" / "fuzzing.md").read_text(encoding="utf-8")

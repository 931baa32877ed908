"""Names of packages that are imported on first use."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

PACKAGES = ("dquantcodec", "dquantcodec.cuda", "dquantcodec.file", "dquantcodec.tensors")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_is_found_and_listed(package: str) -> None:
    module = import_module(package)
    for name in module.__all__:
        found = getattr(module, name)
        assert found is getattr(module, name)
        assert getattr(found, "__name__", name) == name
    assert {*module.__all__, "__doc__"} <= {*dir(module)}
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'compresss'"):
        _ = module.compresss


def test_importing_packages_imports_no_module_of_theirs() -> None:
    script = (
        "import sys\n"
        + "".join(f"import {package}\n" for package in PACKAGES)
        + "print(sorted(name for name in sys.modules if name.startswith('dquantcodec')))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(sorted([*PACKAGES, "dquantcodec.lazy"]))

"""A progress bar with rate and time left, on a terminal, for work that takes more than a second."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from .console import Console

Advance = Callable[[int], object]


@contextmanager
def progress(console: Console, description: str, total: int, unit: str = "B") -> Iterator[Advance]:
    """Gives a function to call with every amount of ``total`` that is done."""
    if console.quiet or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda _amount: None
        return
    bar = import_module("tqdm").tqdm(
        total=total, desc=description, unit=unit, unit_scale=total >= 1000, delay=1.0, leave=False, dynamic_ncols=True
    )
    with bar:
        yield bar.update


def prepare_kernels(console: Console, parts: Iterable[str], path: str | None) -> None:
    """Compile what the command is about to use, on all cores, if this version has not done so before."""
    from .. import warm

    todo = warm.missing(parts, path) if path else []
    if todo:
        console.hint("compiling the codec (once after installation; some seconds)")
        warm.compile_parts(todo, path or "")


def path_of(reader: Any) -> str | None:
    """The kernels that decode a file's first coded layer."""
    from .. import warm

    return next((warm.path_of(layer.plans[0]) for layer in reader.layers if layer.plans), None)

"""A progress bar with rate and time left, on a terminal, for work that takes more than a second."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

from .console import Console

Advance = Callable[[int], object]


@contextmanager
def progress(console: Console, description: str, total: int, unit: str = "B") -> Iterator[Advance]:
    """Gives a function to call with every amount of ``total`` that is done."""
    if console.quiet or not sys.stderr.isatty():
        yield lambda _amount: None
        return
    bar = import_module("tqdm").tqdm(
        total=total, desc=description, unit=unit, unit_scale=True, delay=1.0, leave=False, dynamic_ncols=True
    )
    with bar:
        yield bar.update


def announce_compilation(console: Console) -> None:
    """Say why the first run takes some seconds longer."""
    from ..kernels import cache_directory

    if not cache_directory().exists():
        console.hint("compiling the codec (once after installation; it may take half a minute)")

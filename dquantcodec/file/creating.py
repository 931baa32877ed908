"""New files (specification, clause 9.1)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

from ..errors import InputError
from .coding import coding
from .compose import RECORD_TARGET
from .header import Header
from .info import Info
from .layer import Layer
from .target import new_target
from .writer import Settings, Writer


def create(
    path: str | PathLike[str],
    layers: Sequence[Layer],
    *,
    sinks: int | None = None,
    recent: int = 128,
    model: str = "",
    revision: str = "",
    positions_start: int = 0,
    shard: tuple[int, int] = (0, 1),
    head_groups: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    threads: int = 1,
    sequences: int = 1,
    progress: Callable[[int], object] | None = None,
    lock: bool = True,
    device: str = "cpu",
    _file_id: bytes | None = None,
    _record_target: int = RECORD_TARGET,
) -> Writer:
    """A :class:`Writer` of a new file at ``path``; use it in a ``with`` block.

    ``path`` may be a URL such as ``s3://bucket/key``: the object is then uploaded when the block ends, and cannot be
    flushed before (``url-flush``).

    The first ``sinks`` (default: what the layers' profiles ask for) and the newest ``recent`` tokens of every sequence
    stay exact.  ``positions_start`` is the position of token 0 in the model, ``shard`` (part, parts) by KV heads,
    ``metadata`` a mapping of JSON values.  ``head_groups`` cuts every coded layer into so many (default: what each
    :class:`Layer` says).  ``progress`` is called with the number of tokens just taken in.  Neither ``threads`` nor how
    tokens are portioned over calls changes a byte of a file that is never flushed or rewound.

    The file takes its name when it is complete, or with the first :meth:`Writer.flush`.  From then on it survives
    crashes as a file of :func:`append` does; ``lock=False`` does without the lock that it then takes.

    ``device="cuda"`` or ``"cuda:1"`` encodes on that GPU, to the same bytes, with copies, kernels and writing under way
    at once; arrays stay NumPy's, and a few hundred MB of memory more are used.  Plans are fitted on the CPU.

    Layers whose profile has variance classes are fitted to the first 512 tokens that are to be coded, of the sequence
    that has them first; nothing is written until then.  Plans made by :func:`dquantcodec.fit_plan` need no waiting.

    Raises :class:`InputError`, :class:`LimitError` and :class:`DeviceError` before anything is written, OSError where
    the file system does.
    """
    from .. import __version__

    if sinks is None:
        sinks = max((layer.profile_sinks for layer in layers), default=0)
    for name, count in (("sinks", sinks), ("recent", recent)):
        if not 0 <= count < 1 << 32:
            raise InputError(f"{name} must be 0 or more tokens, not {count}", code="input-tokens")
    if threads < 1:
        raise InputError(f"threads must be at least 1, not {threads}", code="input-threads")
    info = Info(model, revision, positions_start, shard, f"dquantcodec {__version__}", dict(metadata or {}))
    if head_groups is not None:
        layers = [replace(layer, head_groups=head_groups) if layer.storage == "coded" else layer for layer in layers]
    resolved = tuple(layer.resolved(number) for number, layer in enumerate(layers))
    header = Header(_file_id or secrets.token_bytes(16), resolved, sequences, sinks, recent, info)
    header.pack()  # raises whatever the header has to say before anything is written
    fitted = [layer.fitted_profile for layer in layers]
    coded = coding(device, threads)
    target = new_target(path, header.salt, lock)
    return Writer(target, header, Settings(threads, fitted, progress, _record_target, coding=coded))

"""Many files over a Ray cluster (extra ``ray``): :func:`dquantcodec.batch.run_item` as a step of Ray Data.

    rows = compress_files(["s3://bucket/caches/"], "s3://bucket/coded", profile="1.96").take_all()
    failed = [row for row in rows if row["state"] == "failed"]

Nothing runs before the data set is consumed.  A failed file is a row with ``state`` "failed", after its retries; it
does not end the data set.  Running the same again passes over what is finished.  Paths must mean the same on all nodes:
URLs, or a shared file system.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..batch import Compress, Decoding, Decompress, Item, Settings, Work, plan_items, run_item


def compress_files(
    paths: Sequence[str],
    out: str,
    *,
    reading: Mapping[str, Any] | None = None,
    retries: int = 1,
    redo: bool = False,
    num_cpus: int = 1,
    concurrency: int | None = None,
    **settings: Any,
) -> Any:
    """A ``ray.data.Dataset`` with a row per file that ``paths`` name, compressed into the folder ``out``.

    ``paths`` are what :func:`dquantcodec.batch.plan_items` takes, rows are those of
    :class:`dquantcodec.batch.Outcome`.  ``settings`` are fields of :class:`dquantcodec.batch.Settings`
    (``profile``, ``recent``, ``sinks``, ``model``, ...), ``reading`` arguments of
    :func:`dquantcodec.tensors.open_source`.  A file takes ``num_cpus`` cores, and ``concurrency`` bounds how many are
    worked on at once.  Raises what ``plan_items`` raises.
    """
    work = Compress(Settings(**{"threads": num_cpus, **settings}), dict(reading or {}))
    return run_files(work, paths, out, retries=retries, redo=redo, num_cpus=num_cpus, concurrency=concurrency)


def decompress_files(
    paths: Sequence[str],
    out: str,
    *,
    retries: int = 1,
    redo: bool = False,
    num_cpus: int = 1,
    concurrency: int | None = None,
    **decoding: Any,
) -> Any:
    """As :func:`compress_files`, ``.dqkv`` files back into safetensors.

    ``decoding`` are fields of :class:`dquantcodec.batch.Decoding`: ``dtype``, ``layers``, ``tokens``, ...
    """
    work = Decompress(Decoding(**{"threads": num_cpus, **decoding}))
    return run_files(work, paths, out, retries=retries, redo=redo, num_cpus=num_cpus, concurrency=concurrency)


def run_files(
    work: Work,
    paths: Sequence[str],
    out: str,
    *,
    retries: int = 1,
    redo: bool = False,
    num_cpus: int = 1,
    concurrency: int | None = None,
) -> Any:
    """A data set of any :class:`dquantcodec.batch.Work`; as :func:`compress_files`."""
    import ray.data

    items = plan_items(paths, out, work.suffixes, work.made)
    rows = [{"input": item.input, "output": item.output} for item in items]
    # A block per file: files are what is balanced over the cluster.
    files = ray.data.from_items(rows, override_num_blocks=len(rows))
    compute = ray.data.TaskPoolStrategy(size=concurrency)
    return files.map(on_row(work, retries=retries, redo=redo), num_cpus=num_cpus, compute=compute)


def on_row(work: Work, *, retries: int = 1, redo: bool = False) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """A function for ``Dataset.map``: a row with ``input`` and ``output`` becomes the row of an outcome.

    >>> from dquantcodec.batch import Verify
    >>> on_row(Verify())({"input": "nothing.dqkv", "output": ""})["code"]
    'not-found'
    """

    def do(row: Mapping[str, Any]) -> dict[str, Any]:
        return run_item(work, Item(str(row["input"]), str(row["output"])), retries=retries, redo=redo).row()

    return do


def on_batch(work: Work, *, retries: int = 1, redo: bool = False) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """A function for ``Dataset.map_batches``: columns ``input`` and ``output`` become the columns of outcomes."""
    each = on_row(work, retries=retries, redo=redo)

    def do(batch: Mapping[str, Any]) -> dict[str, Any]:
        import numpy as np

        rows = [each({"input": a, "output": b}) for a, b in zip(batch["input"], batch["output"])]
        return {name: np.array([row[name] for row in rows]) for name in rows[0]}

    return do

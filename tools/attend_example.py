"""Make what ``gpu/examples/attend.cpp`` reads: small ``.dqkv`` files of real tokens, and attention over them.

    python tools/attend_example.py gpu/examples

Both files hold one layer of the bundled sample, a leading and 24 newest tokens exact and stored raw, so that reading
them needs no library; ``attend.dqkv`` is coded by a plan that rotates, ``attend_fitted.dqkv`` as files are by default:
by a plan with variance classes, fitted to its tokens.  The ``.bin`` beside each holds queries and, of the whole
sequence and of its first tokens, outputs and natural log-sum-exps: softmax in FP64 over what the file decodes to (the
layout is described in the program).
"""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

import dquantcodec as dq
from dquantcodec.file import compose
from dquantcodec.file.rows import RAW
from dquantcodec.plan import Plan, make_plan

QUERY_HEADS, TOKENS, SHORTER, RECENT = 9, 350, 171, 24


def attention(query: NDArray[Any], keys: NDArray[Any], values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Output ``[Q, D]`` and log-sum-exp ``[Q]`` of ``query`` over all tokens ``[T, H, D]``."""
    heads = np.arange(len(query)) * keys.shape[1] // len(query)
    logits = np.einsum("qd,tqd->qt", query, keys[:, heads]) / np.sqrt(keys.shape[2])
    most = logits.max(axis=1, keepdims=True)
    weights = np.exp(logits - most)
    total = weights.sum(axis=1, keepdims=True)
    return np.einsum("qt,tqd->qd", weights / total, values[:, heads]), (np.log(total) + most)[:, 0]


def sample() -> tuple[NDArray[Any], NDArray[Any]]:
    """Keys and values bfloat16 ``[T, H, D]`` of a layer."""
    path = Path(str(files("dquantcodec"))) / "data" / "sample.safetensors"
    with safe_open(path, "np") as tensors:
        name = sorted(key for key in tensors.keys() if key.endswith(".key"))[1]  # noqa: SIM118 (safe_open is no mapping)
        keys, values = (
            tensors.get_tensor(n)[0].transpose(1, 0, 2)[:TOKENS].astype(ml_dtypes.bfloat16)
            for n in (name, name.replace(".key", ".value"))
        )
    return keys, values


def main(folder: Path) -> None:
    keys, values = sample()
    profile = dq.Profile.named("2.26")
    write(folder / "attend", make_plan(profile, *keys.shape[1:]), keys, values)
    write(folder / "attend_fitted", profile, keys, values)


def write(path: Path, profile: dq.Profile | Plan, keys: NDArray[Any], values: NDArray[Any]) -> None:
    """``path`` with the endings ``.dqkv`` and ``.bin``; a file fits a profile's plan itself."""
    coded = path.with_suffix(".dqkv")
    heads, dim = keys.shape[1:]
    layer = dq.Layer(heads, dim, "bfloat16", profile)
    compressing, compose.encode_rows = compose.encode_rows, lambda rows: (RAW, rows.tobytes())
    try:
        with dq.create(coded, [layer], sinks=1, recent=RECENT, _file_id=b"attend example .") as out:
            out.append([keys], [values])
    finally:
        compose.encode_rows = compressing
    query = np.random.default_rng(0).standard_normal((QUERY_HEADS, dim)).astype(np.float32) * np.float32(2)
    with dq.open(coded) as file:
        read = [getattr(file.layers[0], kind).read(dtype=np.float64) for kind in ("key", "value")]
    results = [attention(query.astype(np.float64), *(array[:tokens] for array in read)) for tokens in (TOKENS, SHORTER)]
    words = [np.array([QUERY_HEADS, dim, SHORTER], "<u4").tobytes(), query.astype("<f4").tobytes()]
    words += [np.stack([result[part] for result in results]).astype("<f4").tobytes() for part in (0, 1)]
    path.with_suffix(".bin").write_bytes(b"".join(words))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

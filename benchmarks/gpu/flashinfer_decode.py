"""FlashInfer's BF16 decode kernels over pages, as calls that can be captured: what serving engines run.

Three of them: on CUDA cores, on tensor cores (its prefill kernel), and XQA.  Where the package is missing nothing of
this is run (``pip install flashinfer-python``; its kernels are compiled when they are first used).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

#: Tokens of a page.  XQA takes 16 to 128; more tokens a page are never slower to read.
PAGE = 64
#: What the package recommends, and as much for XQA.
WORKSPACE_BYTES = 128 << 20
#: Root of the mean squared error over that of the result that BF16 products may come to.
TOLERANCE = 0.01

Call = Callable[[int], Any]


def installed() -> bool:
    return find_spec("flashinfer") is not None


@dataclass(frozen=True)
class Paging:
    """Where the pages of sequences stand: block table ``[B, most]``, and the same row by row without gaps.

    ``indptr`` ``[B + 1]`` counts pages before each sequence, ``last`` ``[B]`` tokens in its last page; all int32.
    """

    table: torch.Tensor
    indices: torch.Tensor
    indptr: torch.Tensor
    last: torch.Tensor

    @staticmethod
    def of(lengths: list[int], page: int = PAGE) -> Paging:
        """Pages in random order; every sequence has a token at least."""
        tokens = torch.tensor(lengths)
        counts = (tokens + page - 1) // page
        indices = torch.randperm(int(counts.sum()), generator=torch.Generator().manual_seed(1)).to(torch.int32)
        table = torch.zeros(len(lengths), int(counts.max()), dtype=torch.int32)
        for row, part in zip(table, indices.split(counts.tolist())):
            row[: len(part)] = part
        indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        return Paging(table, indices, indptr, (tokens - (counts - 1) * page).to(torch.int32))

    @property
    def pages(self) -> int:
        return len(self.indices)


def calls(
    lengths: list[int], query_heads: int, kv_heads: int, head_dim: int, sets: int
) -> Iterator[tuple[str, list[Call]]]:
    """Names of kernels and ``sets`` calls of each on rows of their own; a kernel that fails is left out, with a word.

    The result of the first call is compared with PyTorch's before anything is yielded.
    """
    import flashinfer

    paging = Paging.of(lengths)
    size = (2, paging.pages, PAGE, kv_heads, head_dim)
    rows = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    query = torch.randn(len(lengths), query_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(query)

    def wrapper(tensor_cores: bool) -> Callable[[torch.Tensor], Any]:
        workspace = torch.zeros(WORKSPACE_BYTES, device="cuda", dtype=torch.uint8)
        planned = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
        planned.plan(
            paging.indptr, paging.indices.cuda(), paging.last, query_heads, kv_heads, head_dim, PAGE,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        return lambda of: planned.run(query, (of[0], of[1]), out=out)

    def xqa() -> Callable[[torch.Tensor], Any]:
        workspace = torch.zeros(WORKSPACE_BYTES, device="cuda", dtype=torch.uint8)
        table, tokens = paging.table.cuda(), torch.tensor(lengths, device="cuda", dtype=torch.int32).view(torch.uint32)
        return lambda of: flashinfer.decode.xqa_batch_decode_with_kv_cache(
            query, (of[0], of[1]), workspace, table, tokens, max(lengths), bmm1_scale=head_dim**-0.5, out=out
        )

    makers: dict[str, Callable[[], Callable[[torch.Tensor], Any]]] = {
        "flashinfer": lambda: wrapper(False),
        "flashinfer tensor cores": lambda: wrapper(True),
        "flashinfer xqa": xqa,
    }
    for name, make in makers.items():
        try:
            run = make()
            out.fill_(float("nan"))
            run(rows[0])
            error = deviation(out, query, rows[0], paging, lengths)
            if not error < TOLERANCE:
                raise RuntimeError(f"results are {error:.3g} off")
        except Exception as reason:
            print(f"{name}, {len(lengths)} sequences: left out, {type(reason).__name__}: {reason}"[:600], flush=True)
            continue
        yield name, [lambda _, of=of, run=run: run(of) for of in rows]


def deviation(out: torch.Tensor, query: torch.Tensor, rows: torch.Tensor, paging: Paging, lengths: list[int]) -> float:
    """Relative error of the first and the last sequence against attention in float32."""
    worst = 0.0
    for b in {0, len(lengths) - 1}:
        first, end = int(paging.indptr[b]), int(paging.indptr[b + 1])
        numbers = paging.indices[first:end].to(rows.device).long()
        keys, values = rows[:, numbers].flatten(1, 2)[:, : lengths[b]].float().transpose(1, 2)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            query[b, :, None].float(), keys, values, enable_gqa=True
        )[:, 0]
        error = float((out[b].float() - wanted).norm() / wanted.norm())
        worst = error if error != error else max(worst, error)
    return worst

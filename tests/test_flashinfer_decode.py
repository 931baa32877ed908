"""Pages for FlashInfer's kernels, and the check that its results have to pass, without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu"
if not FOLDER.is_dir():
    pytest.skip("the benchmarks are not part of this distribution", allow_module_level=True)
torch = pytest.importorskip("torch")
sys.path.insert(0, str(FOLDER))

import flashinfer_decode  # noqa: E402


def test_pages_of_unequal_lengths() -> None:
    paging = flashinfer_decode.Paging.of([1, 64, 65, 200])
    assert paging.indptr.tolist() == [0, 1, 2, 4, 8] and paging.last.tolist() == [1, 64, 1, 8]
    assert sorted(paging.indices.tolist()) == list(range(8)) and paging.pages == 8
    assert paging.table.shape == (4, 4)
    for b, (first, end) in enumerate(zip(paging.indptr, paging.indptr[1:])):
        assert torch.equal(paging.table[b, : end - first], paging.indices[first:end])


def test_wrong_results_are_noticed() -> None:
    lengths = [3, 10, 70]
    paging = flashinfer_decode.Paging.of(lengths, flashinfer_decode.PAGE)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, paging.pages, flashinfer_decode.PAGE, 2, 8, generator=generator)
    query = torch.randn(3, 4, 8, generator=generator)
    out = torch.empty_like(query)
    for b, length in enumerate(lengths):
        for head in range(4):
            tokens = [
                (int(paging.table[b, t // flashinfer_decode.PAGE]), t % flashinfer_decode.PAGE) for t in range(length)
            ]
            keys, values = (torch.stack([rows[i, page, at, head // 2] for page, at in tokens]) for i in range(2))
            out[b, head] = (keys @ query[b, head] / 8**0.5).softmax(0) @ values
    assert flashinfer_decode.deviation(out, query, rows, paging, lengths) < 1e-5
    for wrong in (1.1 * out, out.flip(0), torch.full_like(out, torch.nan)):
        assert not flashinfer_decode.deviation(wrong, query, rows, paging, lengths) < flashinfer_decode.TOLERANCE

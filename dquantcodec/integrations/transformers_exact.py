"""Attention over the exact tokens of a batch on a device, beside the kernels that read its pages.

Nothing here waits for the device but :func:`is_plain`, once in a forward pass: transformers' own masks do the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .transformers_rows import Step
from .transformers_store import as_additive, hidden_pages

if TYPE_CHECKING:
    from .transformers_device import Batch


def is_plain(mask: torch.Tensor | None, padding: torch.Tensor, step: Step, length: int) -> bool:
    """Whether ``mask`` hides what causal attention hides, and padding, and nothing else.

    All layers get the same mask, so the answer is written on it.
    """
    if mask is None:
        return True  # only causal attention comes without a mask
    about = step.tokens, [row.padding for row in step.rows]
    known: tuple[object, bool] | None = getattr(mask, "_dquant_plain", None)
    if known is None or known[0] != about:
        column = torch.arange(step.tokens, device=mask.device)
        newest = torch.arange(step.tokens - length, step.tokens, device=mask.device)
        visible = (column >= padding[:, None, None, None]) & (column <= newest[:, None])
        if mask.dtype == torch.bool:
            same = mask == visible
        else:
            same = torch.where(visible, mask == 0, mask <= torch.finfo(mask.dtype).min / 2)
        known = about, bool(same.all())
        mask._dquant_plain = known
    return known[1]


def attend_exact(
    batch: Batch, step: Step, query: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[B, L, Q, D]`` and log-sum-exps ``[B, L, Q]``, float32, of queries ``[B, Q, L, D]`` over exact tokens.

    ``mask`` ``[1 or B, 1 or Q, L, T]`` is true or zero where visible; without one, attention is causal.
    """
    rows, all_heads, length, dim = query.shape
    heads = batch.keys.shape[2]
    most = max(row.exact for row in batch.rows)
    keys, values = (x[:, :most].permute(0, 2, 1, 3).to(torch.float32) for x in (batch.keys, batch.values))
    queries = query.to(torch.float32).reshape(rows, heads, -1, dim)
    logits = torch.matmul(queries, keys.transpose(2, 3)).reshape(rows, all_heads, length, most) * scale
    place = torch.arange(most, device=query.device)
    # The newest tokens are the queries' own.
    last = batch.exact[:, None, None, None] - length + torch.arange(length, device=query.device)[:, None]
    if mask is None:
        logits = logits.masked_fill(place > last, -torch.inf)
    else:
        logits = logits + _of_exact(as_additive(mask), batch, step, place)
        logits = logits.masked_fill(place >= batch.exact[:, None, None, None], -torch.inf)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse[..., None].nan_to_num(neginf=0.0))
    out = torch.matmul(weights.reshape(rows, heads, -1, most), values).reshape(rows, all_heads, length, dim)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _of_exact(additive: torch.Tensor, batch: Batch, step: Step, place: torch.Tensor) -> torch.Tensor:
    """Columns of a mask that belong to the exact tokens at ``place``; raises if it hides any of those in pages."""
    first = (batch.padding + step.sinks)[:, None]
    column = torch.arange(additive.shape[-1], device=additive.device)
    in_pages = (column >= first) & (column < first + batch.coded[:, None])
    if bool(additive.masked_fill(~in_pages[:, None, None], 0).any()):
        raise hidden_pages()
    columns = batch.padding[:, None] + place + torch.where(place >= step.sinks, batch.coded[:, None], 0)
    columns = columns.clamp(max=additive.shape[-1] - 1).long()
    shape = len(batch.rows), *additive.shape[1:3]
    return additive.expand(*shape, -1).gather(3, columns[:, None, None].expand(*shape, -1))

"""Attention for transformers that reads pages: ``model.set_attn_implementation("dquant")``.

Queries of a forward pass attend to the pages through :meth:`dquantcodec.Codec.attend`, to the exact tokens as usual,
and both results are merged by their log-sum-exps.  Layers without pages get transformers' own SDPA.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..codec import Pages
from ..errors import InputError, UnsupportedError
from .tensors import as_torch
from .transformers_layer import ATTENTION, Row, Step


def register() -> None:
    """Make :data:`ATTENTION` known to transformers."""
    AttentionInterface.register(ATTENTION, attention_forward)
    AttentionMaskInterface.register(ATTENTION, attention_mask)


def attention_mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Always a mask, so that its width says how many tokens attention must see."""
    mask: torch.Tensor = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})
    return mask


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Output ``[B, L, Q, D]`` of queries ``[B, Q, L, D]``; ``key`` is what the cache's update returned.

    Raises :class:`UnsupportedError` (``attention-feature``) for soft-capped logits, learned sinks and dropout.
    """
    step: Step | None = getattr(key, "_dquant_step", None)
    if step is None:
        if mask is not None and mask.shape[-1] != key.shape[-2]:
            raise InputError(
                f"attention gets {key.shape[-2]} keys and a mask for {mask.shape[-1]}: the model passes on something "
                "else than its cache returned; use another attention implementation with it",
                code="attention-keys",
            )
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if unknown or dropout:
        raise UnsupportedError(
            f"attention over pages knows no {', '.join(unknown) or 'dropout'}; use another attention implementation",
            code="attention-feature",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = torch.stack(
        [
            _attend(step, row, queries, scale, None if mask is None else mask[i if len(mask) > 1 else 0])
            for i, (row, queries) in enumerate(zip(step.rows, query))
        ]
    )
    return out.to(query.dtype), None


def _attend(step: Step, row: Row, query: torch.Tensor, scale: float, mask: torch.Tensor | None) -> torch.Tensor:
    """Output float32 ``[L, Q, D]`` of one sequence; ``mask`` ``[1 or Q, L, T]``, true or zero where visible."""
    coded, exact = step.columns(row)
    heads, (all_heads, length, dim) = len(row.keys), query.shape
    queries = query.to(torch.float32).reshape(heads, -1, length, dim)
    logits = torch.matmul(queries, row.keys.to(torch.float32).transpose(1, 2)[:, None]) * scale
    if mask is None:
        # Only causal attention comes without a mask: the last query sees everything.
        visible = torch.arange(step.tokens)[None] <= torch.arange(step.tokens - length, step.tokens)[:, None]
        mask = visible[None].to(query.device)
    additive = (
        mask
        if mask.dtype != torch.bool
        else torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)
    )
    if additive[..., coded.start : coded.stop].any():
        raise InputError("the mask hides tokens that are in pages; only padding may be hidden", code="attention-mask")
    columns = torch.from_numpy(exact).to(mask.device)
    bias = additive[..., columns].expand(all_heads, -1, -1) if len(additive) == 1 else additive[..., columns]
    logits = logits + bias.reshape(heads, -1, length, len(exact))
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse[..., None].nan_to_num(neginf=0.0))
    out = torch.matmul(weights, row.values.to(torch.float32)[:, None])
    out, lse = out.reshape(all_heads, length, dim).transpose(0, 1), lse.reshape(all_heads, length).T
    if not len(row.pages):
        return out
    pages = Pages(row.pages, len(row.pages) * step.codec.plan.window)
    found, sums = step.codec.attend(query.transpose(0, 1).cpu(), pages, scale=scale)
    over_pages, of_pages = as_torch(found).to(out.device), as_torch(sums).to(out.device)
    together = torch.logaddexp(lse, of_pages)
    share = torch.exp(of_pages - together)[..., None]
    return share * over_pages + torch.exp(lse - together)[..., None] * out

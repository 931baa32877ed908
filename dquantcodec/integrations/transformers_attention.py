"""Attention for transformers that reads pages: ``model.set_attn_implementation("dquant")``.

Queries of a forward pass attend to pages where they are (:mod:`~dquantcodec.integrations.transformers_store`): on the
CPU through :meth:`dquantcodec.Codec.attend`, on a CUDA device with the fused kernels, and what those do not take is
decoded.  Layers without pages get transformers' own SDPA.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..errors import InputError, UnsupportedError
from .transformers_layer import ATTENTION
from .transformers_rows import Step


def register() -> None:
    """Make :data:`ATTENTION` known to transformers."""
    AttentionInterface.register(ATTENTION, attention_forward)
    AttentionMaskInterface.register(ATTENTION, attention_mask)


def attention_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """A mask, whose width says how many tokens attention must see; none where the new ones are all there are."""
    first = kwargs.get("q_length") == kwargs.get("kv_length")
    skip = first and kwargs.get("allow_is_causal_skip", True)
    mask: torch.Tensor | None = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": skip})
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
    out = step.store.attend(step, query, scale, mask)
    if out is not None:
        return out.to(query.dtype), None
    keys, values = step.decoded()
    decoded: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, keys, values, mask, scaling=scaling, **kwargs
    )
    return decoded

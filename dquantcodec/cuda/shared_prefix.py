"""Decode attention of requests that begin with the same tokens, such as a system prompt or samples of one question.

The tokens that requests share are in pages once, and are decoded once for as many requests as a block has rows of
queries for: 16 query heads of a KV head, so four requests where four query heads share one.  Two
:class:`~dquantcodec.cuda.attend.PageAttention` do it: the first over the shared tokens, with the requests as positions
that all see everything, the second over each request's own, which takes the first's result as part of its own.
"""

from __future__ import annotations

from typing import Any

from ..errors import InputError
from ..plan import Plan
from .attend import PageAttention


class SharedPrefixAttention:
    """Attention for ``prefixes`` groups of ``requests`` requests each, on the current device.

    Requests of a group stand next to each other.  ``most_prefix_tokens`` and ``most_tokens``, the longest prefix and
    the longest rest in pages, only choose the size of blocks.  Everything else is as in
    :class:`~dquantcodec.cuda.attend.PageAttention`: no allocation and no waiting in a call, four launches.
    """

    def __init__(
        self,
        plan: Plan,
        prefixes: int,
        requests: int,
        query_heads: int,
        *,
        dtype: str = "bfloat16",
        most_prefix_tokens: int | None = None,
        most_tokens: int | None = None,
        soft_cap: bool = False,
    ) -> None:
        self.prefixes, self.requests = prefixes, requests
        self._shared = PageAttention(
            plan, prefixes, query_heads, positions=requests, dtype=dtype, out_dtype="float32", masked=False,
            most_tokens=most_prefix_tokens, soft_cap=soft_cap,
        )  # fmt: skip
        self._own = PageAttention(
            plan, prefixes * requests, query_heads, dtype=dtype, most_tokens=most_tokens, soft_cap=soft_cap
        )
        self._rows = (prefixes * requests, 1, query_heads)

    def __call__(
        self,
        query: Any,
        pages: Any,
        prefix_table: Any,
        prefix_lengths: Any,
        block_table: Any,
        lengths: Any,
        *,
        sinks: tuple[Any, Any, Any] | None = None,
        tail: tuple[Any, Any, Any] | None = None,
        scale: float | None = None,
        soft_cap: float = 0.0,
        sink_logits: Any = None,
        lse_base: str = "e",
        out: Any = None,
        lse: Any = None,
        stream: Any = None,
    ) -> tuple[Any, Any]:
        """Outputs ``[P * R, 1, Q, D]`` of the queries' dtype and log-sum-exps float32 ``[P * R, 1, Q]``.

        query
            ``[P * R, 1, Q, D]``, contiguous: the requests of prefix 0, those of prefix 1, and so on.
        pages
            uint8 ``[pages, page_bytes]``, one pool for all.
        prefix_table, prefix_lengths, sinks
            Of what is shared: int32 ``[P, windows]``, int32 ``[P]``, and exact leading tokens ``[P, room, H, D]``.
        block_table, lengths, tail
            Of what follows, request by request: int32 ``[P * R, windows]``, int32 ``[P * R]``, exact newest tokens
            ``[P * R, room, H, D]``.

        A shared prefix is a whole number of pages, or what is left of it in its last page belongs to nobody else: give
        its tokens in ``prefix_lengths``, and let every request begin a page of its own.
        """
        flat = getattr(query, "reshape", None)
        if flat is None or len(query.shape) != 4 or tuple(query.shape[:3]) != self._rows:
            raise InputError(f"query must be an array {[*self._rows, 'D']}", code="input-shape", what="query")
        together = flat((self.prefixes, self.requests, *query.shape[2:]))
        shared_out, shared_lse = self._shared(
            together, pages, prefix_table, prefix_lengths, sinks=sinks, scale=scale, causal=False, soft_cap=soft_cap,
            lse_base=lse_base, stream=stream,
        )  # fmt: skip
        return self._own(
            query, pages, block_table, lengths, tail=tail, scale=scale, soft_cap=soft_cap, sink_logits=sink_logits,
            before=(shared_out.reshape(query.shape), shared_lse.reshape(self._rows)), lse_base=lse_base, out=out,
            lse=lse, stream=stream,
        )  # fmt: skip

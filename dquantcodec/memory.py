"""How large a cache gets, by arithmetic on page layouts: tokens, layers and head groups against bytes.

An engine keeps the first ``sinks`` tokens and the newest ones exact in 16 bits; whole windows before them are pages.
At least ``recent`` tokens stay exact, and up to a window more until the next page is full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .errors import InputError
from .model_shape import LayerShape, ModelShape
from .page_layout import PageLayout
from .plan import Plan, make_plan
from .profile import Profile

#: Searches for a context end here.
MOST_TOKENS = 1 << 40


@dataclass(frozen=True)
class CacheSize:
    """Bytes of one sequence by context: coded with ``profile``, or with ``bytes_per_value`` where that is None.

    ``groups`` is the number of head groups, one to a device for instance; a model with fewer KV heads repeats them.
    """

    shape: ModelShape
    profile: Profile | None
    bytes_per_value: int = 2
    recent: int = 128
    groups: int = 1

    def __post_init__(self) -> None:
        for layer in self.shape.layers:
            if layer.kv_heads % self.groups and self.groups % layer.kv_heads:
                raise InputError(
                    f"{layer.kv_heads} KV heads do not make {self.groups} groups",
                    code="plan-groups",
                    layer=layer.number,
                )

    def plan(self, layer: LayerShape) -> Plan:
        """The plan of one head group of a layer."""
        assert self.profile
        return make_plan(self.profile, max(1, layer.kv_heads // self.groups), layer.head_dim)

    def layer_bytes(self, layer: LayerShape, context: int) -> int:
        """The most that one layer takes while one sequence grows to ``context``, all its groups together."""
        tokens = layer.tokens(context)
        token = 2 * max(layer.kv_heads, self.groups) * layer.head_dim * 2
        if self.profile is None:
            return tokens * token * self.bytes_per_value // 2
        window, kept = self.profile.window, self.profile.sinks + self.recent
        pages = max(0, tokens - kept) // window
        page = self.groups * PageLayout.of(self.plan(layer)).page_bytes
        now = pages * page + (tokens - pages * window) * token
        # A token before the last page was full, its window was still exact.
        return max(now, (pages - 1) * page + (kept + window - 1) * token) if pages else now

    def bytes(self, context: int) -> int:
        """What has to be there for one sequence that grows to ``context``: never less for a longer one."""
        return sum(self.layer_bytes(layer, context) for layer in self.shape.layers)

    def bits_per_value(self, layer: LayerShape) -> float:
        """Of pages alone, every byte counted."""
        if self.profile is None:
            return 8.0 * self.bytes_per_value
        plan = self.plan(layer)
        return 8 * PageLayout.of(plan).page_bytes / (2 * plan.values * plan.window)

    def token_bytes(self) -> float:
        """What one more token of a long context takes, in layers that keep all tokens."""
        long = [layer for layer in self.shape.layers if layer.sliding is None]
        heads = [2 * max(layer.kv_heads, self.groups) * layer.head_dim for layer in long]
        return sum(self.bits_per_value(layer) / 8 * values for layer, values in zip(long, heads))

    def most_sequences(self, memory: int, context: int) -> int:
        """Sequences of ``context`` tokens that fit ``memory`` bytes."""
        return memory // self.bytes(context)

    def most_tokens(self, memory: int, sequences: int) -> int:
        """The longest context of ``sequences`` sequences that fits ``memory`` bytes."""
        return last(lambda context: sequences * self.bytes(context) <= memory)

    def break_even(self, other: CacheSize, longest: int = 1 << 20) -> int | None:
        """From how many tokens on a sequence is smaller than with ``other``; None if not even the ``longest`` is."""
        if self.bytes(longest) >= other.bytes(longest):
            return None
        return last(lambda context: context <= longest and self.bytes(context) >= other.bytes(context)) + 1


def last(fits: Callable[[int], bool]) -> int:
    """The largest number up to :data:`MOST_TOKENS` that fits, where smaller ones fit too; 0 if none does."""
    low, high = 0, 1
    while high < MOST_TOKENS and fits(high):
        low, high = high, 2 * high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

"""What a file holds of one layer of one sequence, as its header and record headers say it."""

from __future__ import annotations

from ..plan import Plan
from .layer import Layer
from .records import RecordRules
from .sequences import SequenceLog


class LayerContent:
    """One layer of one sequence, all its heads or some whole head groups.

    spec
        The layer as a file with these heads alone would have it.
    heads
        Which heads of the file's layer these are.
    sinks, coded_tokens, recent
        Tokens kept exact before the pages, held by pages, and kept exact otherwise (as a rule after them).  Without
        pages the rows count as sinks up to the number the file was created with; every token of an exact layer counts
        as recent.
    """

    def __init__(self, rules: RecordRules, log: SequenceLog, index: int, heads: slice | None = None) -> None:
        whole = rules.header.layers[index]
        self.index = index
        self.heads = heads or slice(0, whole.kv_heads)
        self.spec: Layer = whole.cut(self.heads.start, self.heads.stop)
        self.stretches = {"coded": log.coded, "exact": log.exact, "absent": ()}[self.spec.storage]
        self.tokens = log.tokens
        paged = [stretch for stretch in self.stretches if stretch.paged]
        self.coded_tokens = sum(stretch.tokens for stretch in paged)
        self.sinks = 0
        if self.spec.storage == "coded":
            self.sinks = paged[0].first if paged else min(log.tokens, rules.header.sinks)
        self.recent = self.tokens - self.sinks - self.coded_tokens

    @property
    def plan(self) -> Plan | None:
        """The plan of a coded layer that is one head group, else None."""
        return self.spec.plan

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of every head group of a coded layer, else none."""
        return self.spec.plans

"""Axis orders of saved tensors, and where a range of tokens lies in each.

A layout is spelled by its axes: ``B`` sequences, ``H`` KV heads, ``T`` tokens, ``D`` head dimension.  ``D`` is always
last; ``BHTD`` and ``HTD`` keep a head's tokens together, ``BTHD`` and ``THD`` a token's heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..errors import InputError
from .names import listing

#: No known model has more KV heads, so a longer axis can only be tokens.
MOST_HEADS = 128


@dataclass(frozen=True)
class Geometry:
    """Sizes of one tensor: ``sequences`` (B), ``heads`` (H), ``tokens`` (T), ``head_dim`` (D)."""

    sequences: int
    heads: int
    tokens: int
    head_dim: int

    @staticmethod
    def of(shape: Sequence[int], layout: str) -> Geometry:
        """Read ``shape`` in ``layout``; an axis the layout lacks has size 1."""
        size = dict(zip(layout, shape, strict=True))
        return Geometry(size.get("B", 1), size["H"], size["T"], size["D"])

    def shape(self, layout: str) -> tuple[int, ...]:
        """The shape of a tensor of these sizes in ``layout``."""
        size = {"B": self.sequences, "H": self.heads, "T": self.tokens, "D": self.head_dim}
        return tuple(size[axis] for axis in layout)


@dataclass(frozen=True)
class Run:
    """Elements that lie together: ``count`` of them from element ``offset``, of one head or (``None``) of all."""

    head: int | None
    offset: int
    count: int


def token_runs(geometry: Geometry, layout: str, sequence: int, start: int, stop: int) -> Iterator[Run]:
    """The runs that hold tokens ``[start, stop)`` of ``sequence``: one a head, or one in all where heads are inner."""
    heads, tokens, width = geometry.heads, geometry.tokens, geometry.head_dim
    if layout.endswith("THD"):
        yield Run(None, (sequence * tokens + start) * heads * width, (stop - start) * heads * width)
        return
    for head in range(heads):
        yield Run(head, ((sequence * heads + head) * tokens + start) * width, (stop - start) * width)


def decide_layout(shapes: dict[str, tuple[int, ...]], asked: str | None = None) -> tuple[str, str]:
    """The layout of tensors of ``shapes`` (by name) and, in a few words, why.

    ``asked`` settles it if the number of axes agrees.  Four axes are ``BHTD``, three are decided only by evidence that
    leaves one reading: tensors whose sizes differ along one axis (heads may differ between layers, tokens may not), or
    one axis too long for KV heads.  Otherwise :class:`InputError` ``layout-ambiguous`` lists shapes and options.
    """
    ranks = {len(shape) for shape in shapes.values()}
    if len(ranks) > 1:
        raise InputError("the tensors have different numbers of axes" + _shapes(shapes), code="layout-mixed")
    rank = ranks.pop()
    if rank not in (3, 4):
        raise InputError(
            f"the tensors have {rank} axes; keys and values need 4 ([B,H,T,D], [B,T,H,D]) or 3 ([H,T,D], [T,H,D])"
            + _shapes(shapes),
            code="layout-rank",
        )
    if asked is not None:
        if len(asked) != rank:
            raise InputError(
                f"layout {asked} has {len(asked)} axes, the tensors have {rank}" + _shapes(shapes), code="layout-rank"
            )
        return asked, "as given"
    return _decide_four(shapes) if rank == 4 else _decide_three(shapes)


def _decide_four(shapes: dict[str, tuple[int, ...]]) -> tuple[str, str]:
    if any(shape[1] > MOST_HEADS >= shape[2] for shape in shapes.values()):
        # The default would silently code tokens as heads.
        raise InputError(
            f"[B,H,T,D] would mean more than {MOST_HEADS} KV heads; give --layout BTHD or --layout BHTD"
            + _shapes(shapes),
            code="layout-ambiguous",
        )
    return "BHTD", "the default for 4 axes"


def _decide_three(shapes: dict[str, tuple[int, ...]]) -> tuple[str, str]:
    first = {shape[0] for shape in shapes.values()}
    second = {shape[1] for shape in shapes.values()}
    if len(first) > 1 and len(second) == 1:
        return "HTD", "only the second axis is the same in all layers, so it is tokens"
    if len(second) > 1 and len(first) == 1:
        return "THD", "only the first axis is the same in all layers, so it is tokens"
    if min(second) > MOST_HEADS >= max(first):
        return "HTD", f"an axis of {min(second)} is too long for KV heads"
    if min(first) > MOST_HEADS >= max(second):
        return "THD", f"an axis of {min(first)} is too long for KV heads"
    raise InputError(
        "the shapes fit [H,T,D] and [T,H,D]; give --layout HTD or --layout THD" + _shapes(shapes),
        code="layout-ambiguous",
    )


def _shapes(shapes: dict[str, tuple[int, ...]]) -> str:
    return listing(f"{name} {list(shape)}" for name, shape in shapes.items())

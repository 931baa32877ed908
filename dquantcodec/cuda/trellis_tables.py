"""What the encoder of a stream with a trellis looks up on a device (``gpu/include/dquant/trellis.cuh``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedError
from ..group_arrays import group_arrays
from ..group_drift import check_zeros
from ..group_grid import GAIN_ONE, inverse_reach
from ..group_prefix import group_tables
from ..plan import StreamPlan
from ..profile import TILE
from ..trellis_drift import path_rates, walk
from .group_tables import LEFT_OUT, RUN


@dataclass(frozen=True, eq=False)
class TrellisEncodeArrays:
    """The arrays of ``TrellisTables``, by its names, and its numbers."""

    channels: NDArray[np.uint32]
    inverses: NDArray[np.float32]
    costs: NDArray[np.float32]
    codes: NDArray[np.uint32]
    classes: NDArray[np.uint32]
    groups: NDArray[np.uint32]
    kinds: NDArray[np.uint8]
    start: int
    values: int

    #: Arrays that ``TrellisTables`` has the addresses of.
    NAMES = ("channels", "inverses", "costs", "codes", "classes", "groups", "kinds")

    @property
    def rungs(self) -> int:
        return len(self.costs)

    @property
    def entries(self) -> int:
        """Costs of a rung."""
        return int(self.costs.shape[1])

    @property
    def pitch(self) -> int:
        """Values of a sub-stream, up to a multiple of 32."""
        return int(self.kinds.shape[1])

    def block_bytes(self) -> int:
        """What a block shares beside rungs: codes, classes, groups, kinds."""
        rounded = sum(-(-array.nbytes // 16) * 16 for array in (self.codes, self.kinds))
        return rounded + self.classes.nbytes + self.groups.nbytes

    def warp_bytes(self, plan: StreamPlan) -> int:
        """What a warp has: positions, indices, two paths, costs of 32 values, ways, words."""
        rows = 4 * self.pitch * plan.substreams
        return 3 * rows + 16 * TILE * plan.substreams + 4 * self.pitch + -(-4 * plan.words // 16) * 16

    def numbers(self, plan: StreamPlan) -> dict[str, object]:
        """The numbers of ``TrellisTables`` that the plan gives; a launch adds the window."""
        return {
            "step": plan.step,
            "rungs": self.rungs,
            "entries": self.entries,
            "start": self.start,
            "words": plan.words,
            "values": self.values,
            "pitch": self.pitch,
            "groups_each": self.groups.shape[1],
            "code_count": len(self.codes),
            "class_count": len(self.classes),
        }


@lru_cache(maxsize=256)
def trellis_encode_arrays(plan: StreamPlan) -> TrellisEncodeArrays:
    """The arrays of a stream plan whose grouping has states.

    Raises :class:`UnsupportedError` (``device-groups``) for a grouping that would need more room than any fit makes.
    """
    grouping = plan.grouping
    assert grouping is not None
    check_zeros(plan)
    arrays, steps, (rates, start) = group_arrays(grouping), walk(grouping), path_rates(grouping)
    values = len(steps.place) // plan.substreams
    each = len(arrays.groups) // plan.substreams
    pitch = -(-values // TILE) * TILE
    if plan.substreams * pitch > LEFT_OUT or values > 0xFFFF:
        raise UnsupportedError(
            f"streams of {len(steps.place)} coded values with a trellis have no room on a device", code="device-groups"
        )
    n = len(arrays.middle)
    channels = np.full(-(-n // RUN) * RUN, LEFT_OUT, np.uint32)
    inverses = np.zeros(len(channels), np.float32)
    inverses[:n] = inverse_reach(grouping)
    substream, value = np.divmod(np.arange(len(steps.place)), values)
    channels[arrays.row_channel.reshape(-1)[steps.place]] = substream * pitch + value
    kinds = np.zeros((plan.substreams, pitch), np.uint8)
    kinds[substream, value] = steps.kind
    classes = np.zeros((len(grouping.classes), 4), np.uint32)
    for row, levels, first in zip(classes, grouping.classes, rates.first):
        row[:3] = first, levels.most | bool(levels.second) << 8, round(GAIN_ONE * levels.factor)
    groups = np.zeros((plan.substreams, each, 4), np.uint32)
    most = [[grouping.classes[c].most for c in table.classes] for table in grouping.tables]
    at = 0
    for number, (_, fields, letters, table) in enumerate(arrays.groups.tolist()):
        strides = arrays.strides[table].tolist()
        zero = int(arrays.first[table]) + sum(m * s for m, s in zip(most[table], strides))
        strides = [s if f < fields else 0 for f, s in enumerate(strides)]
        groups[number // each, number % each] = [
            zero,
            at % values | letters << 16 | fields << 20,
            int(arrays.letters[table]) | strides[1] << 16,
            strides[2] | strides[3] << 16,
        ]
        at += letters * fields
    return TrellisEncodeArrays(
        channels=channels,
        inverses=inverses,
        costs=np.pad(rates.costs, ((0, 0), (0, -rates.costs.shape[1] % 4))),
        # An empty code at the end, for lanes without a letter.
        codes=np.append(group_tables(grouping).codes, np.uint32(0)),
        classes=classes,
        groups=groups,
        kinds=kinds,
        start=start,
        values=values,
    )

"""Layers of a file: geometry, dtype of exact rows, and how the layer is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ..errors import InputError, LimitError
from ..plan import MAX_HEAD_DIM, MAX_HEADS, MAX_VALUES, Plan, make_plan
from ..profile import DEFAULT_PROFILE, Profile
from .structs import DTYPES, STORAGES

if TYPE_CHECKING:
    import numpy as np

KINDS = ("key", "value")
#: Bytes of a number; NumPy knows those of BF16 only once ml_dtypes is loaded.
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def dtype_of(name: str) -> np.dtype[Any]:
    """NumPy dtype of a layer dtype; ``bfloat16`` is ml_dtypes' extension type."""
    import numpy as np  # geometry and sizes do without

    if name == "bfloat16":
        import ml_dtypes

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(name)


@dataclass(frozen=True)
class Layer:
    """One layer of a file (specification, clause 3.3).

    dtype
        ``"bfloat16"``, ``"float16"`` or ``"float32"``: the dtype of appended arrays, of exact rows, and what reads
        return unless told otherwise.
    profile
        A profile's name, a :class:`Profile` or a ready :class:`Plan`; only for coded layers.  Variance classes of a
        profile are fitted to the first tokens of the file.  With several head groups a plan is that of each group, or
        there is a sequence of plans, one a group.
    storage
        ``"coded"`` (pages; leading and newest tokens exact), ``"exact"`` (every token exact) or ``"absent"``.
    number
        Layer number in the model; ``None`` takes the place in the list.
    head_groups
        Of a coded layer: how many equal groups of consecutive heads have pages of their own, so that ranks of tensor
        parallelism read and write theirs alone.  As many as there are plans, if ``profile`` is a sequence.

    Raises :class:`InputError` (``layer-dtype``, ``layer-storage``, ``layer-profile``, ``layer-groups``) and
    :class:`LimitError` (``limit-geometry``).
    """

    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    profile: str | Profile | Plan | Sequence[Plan] | None = DEFAULT_PROFILE
    storage: str = "coded"
    number: int | None = None
    head_groups: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(f"layer dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}", code="layer-dtype")
        if self.storage not in STORAGES:
            raise InputError(
                f"layer storage must be one of {', '.join(STORAGES)}, not {self.storage!r}", code="layer-storage"
            )
        check_geometry(self.kv_heads, self.head_dim)
        if self.storage != "coded":
            object.__setattr__(self, "profile", None)
            object.__setattr__(self, "head_groups", 1)
        elif self.profile is None:
            raise InputError("a coded layer needs a profile; name one or store the layer exact", code="layer-profile")
        elif not isinstance(self.profile, (str, Profile, Plan)):
            object.__setattr__(self, "profile", tuple(self.profile))
            object.__setattr__(self, "head_groups", len(self.plans))
            if not compose(self.plans, self.kv_heads, self.head_dim):
                raise InputError(
                    f"the layer has {self.kv_heads} heads of {self.head_dim} values; the heads of its plans must sum "
                    "to that, and their head sizes and windows be equal",
                    code="layer-profile",
                )
        elif not 1 <= self.head_groups <= self.kv_heads or self.kv_heads % self.head_groups:
            raise InputError(
                f"{self.kv_heads} KV heads cannot be cut into {self.head_groups} equal head groups", code="layer-groups"
            )

    @property
    def values(self) -> int:
        """Values of one token of one kind, ``n = kv_heads * head_dim``."""
        return self.kv_heads * self.head_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of one exact row of one kind."""
        return self.values * DTYPE_BYTES[self.dtype]

    @property
    def array_dtype(self) -> np.dtype[Any]:
        return dtype_of(self.dtype)

    def resolved(self, number: int) -> Layer:
        """This layer with the :class:`Plan` of every head group in place of a profile and with a layer number.

        Raises what building the plan raises, and :class:`InputError` (``layer-profile``) for the plan of another
        geometry.
        """
        profile = Profile.named(self.profile) if isinstance(self.profile, str) else self.profile
        heads = self.kv_heads // self.head_groups
        plan = make_plan(profile, heads, self.head_dim) if isinstance(profile, Profile) else profile
        if isinstance(plan, Plan) and (plan.kv_heads, plan.head_dim) != (heads, self.head_dim):
            raise InputError(
                f"a head group has {heads} heads of {self.head_dim} values, its plan {plan.kv_heads} of "
                f"{plan.head_dim}; make the plan for the group's geometry",
                code="layer-profile",
            )
        return replace(self, profile=plan, number=number if self.number is None else self.number)

    def cut(self, start: int, stop: int) -> Layer:
        """The layer of heads ``start`` to ``stop`` alone, if it is resolved.

        Raises :class:`InputError` (``shard-groups``) where that would cut a head group.
        """
        if (start, stop) == (0, self.kv_heads):
            return self
        if self.storage != "coded":
            return replace(self, kv_heads=stop - start)
        pairs = zip(self.plans, self.groups)
        plans = [plan for plan, heads in pairs if start <= heads.start and heads.stop <= stop]
        if sum(plan.kv_heads for plan in plans) != stop - start:
            raise InputError(
                f"heads {start} to {stop - 1} cut a head group of the layer, which has {len(self.plans)} of "
                f"{self.kv_heads} heads together; reshard the file with recoding, or read whole layers",
                code="shard-groups",
            )
        return replace(self, kv_heads=stop - start, profile=plans)

    @property
    def fitted_profile(self) -> Profile | None:
        """The profile that a plan is to be fitted to the layer's tokens for; None for a ready plan or no classes."""
        profile = Profile.named(self.profile) if isinstance(self.profile, str) else self.profile
        fits = isinstance(profile, Profile) and (profile.key.classes or profile.value.classes)
        return profile if fits and isinstance(profile, Profile) else None

    @property
    def profile_sinks(self) -> int:
        """Leading tokens that the profile of a coded layer asks to keep exact; a ready plan asks for none."""
        profile = Profile.named(self.profile) if isinstance(self.profile, str) else self.profile
        return profile.sinks if isinstance(profile, Profile) else 0

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of every head group of a coded layer that is resolved or was read from a file, else none."""
        if isinstance(self.profile, Plan):
            return (self.profile,) * self.head_groups
        return self.profile if isinstance(self.profile, tuple) else ()

    @property
    def plan(self) -> Plan | None:
        """The plan of a coded layer of one head group that is resolved or was read from a file, else None."""
        return self.plans[0] if len(self.plans) == 1 else None

    @property
    def groups(self) -> tuple[slice, ...]:
        """The heads of every head group; none of a layer that is not coded."""
        if self.storage != "coded":
            return ()
        counts = [plan.kv_heads for plan in self.plans] or [self.kv_heads // self.head_groups] * self.head_groups
        return tuple(slice(end - count, end) for count, end in zip(counts, accumulate(counts)))


def compose(plans: Sequence[Plan], kv_heads: int, head_dim: int) -> bool:
    """Whether head groups of these plans make a layer of ``kv_heads`` heads of ``head_dim`` values."""
    alike = len({plan.window for plan in plans}) == 1 and {plan.head_dim for plan in plans} == {head_dim}
    return alike and sum(plan.kv_heads for plan in plans) == kv_heads


def check_geometry(kv_heads: int, head_dim: int) -> None:
    """Raise :class:`LimitError` (``limit-geometry``) for heads the format cannot hold."""
    if not 1 <= kv_heads <= MAX_HEADS or not 1 <= head_dim <= MAX_HEAD_DIM or kv_heads * head_dim > MAX_VALUES:
        raise LimitError(
            f"{kv_heads} heads of {head_dim} values: a layer has 1 to {MAX_HEADS} heads of 1 to {MAX_HEAD_DIM} values "
            f"and at most {MAX_VALUES} values",
            code="limit-geometry",
        )

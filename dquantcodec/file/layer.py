"""Layers of a file: geometry, dtype of exact rows, and how the layer is stored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import InputError, LimitError
from ..plan import MAX_HEAD_DIM, MAX_HEADS, MAX_VALUES, Plan, make_plan
from ..profile import DEFAULT_PROFILE, Profile
from .structs import DTYPES, STORAGES

KINDS = ("key", "value")


def dtype_of(name: str) -> np.dtype[Any]:
    """NumPy dtype of a layer dtype; ``bfloat16`` is ml_dtypes' extension type."""
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
        profile are fitted to the first tokens of the file.
    storage
        ``"coded"`` (pages; leading and newest tokens exact), ``"exact"`` (every token exact) or ``"absent"``.
    number
        Layer number in the model; ``None`` takes the place in the list.

    Raises :class:`InputError` (``layer-dtype``, ``layer-storage``, ``layer-profile``) and :class:`LimitError`
    (``limit-geometry``).
    """

    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    profile: str | Profile | Plan | None = DEFAULT_PROFILE
    storage: str = "coded"
    number: int | None = None

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
        elif self.profile is None:
            raise InputError("a coded layer needs a profile; name one or store the layer exact", code="layer-profile")

    @property
    def values(self) -> int:
        """Values of one token of one kind, ``n = kv_heads * head_dim``."""
        return self.kv_heads * self.head_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of one exact row of one kind."""
        return self.values * self.array_dtype.itemsize

    @property
    def array_dtype(self) -> np.dtype[Any]:
        return dtype_of(self.dtype)

    def resolved(self, number: int) -> Layer:
        """This layer with its :class:`Plan` in place of a profile and with a layer number.

        Raises what building the plan raises, and :class:`InputError` (``layer-profile``) for the plan of another
        geometry.
        """
        profile = Profile.named(self.profile) if isinstance(self.profile, str) else self.profile
        plan = make_plan(profile, self.kv_heads, self.head_dim) if isinstance(profile, Profile) else profile
        if plan is not None and (plan.kv_heads, plan.head_dim) != (self.kv_heads, self.head_dim):
            raise InputError(
                f"the layer has {self.kv_heads} heads of {self.head_dim} values, its plan {plan.kv_heads} of "
                f"{plan.head_dim}; make the plan for the layer's geometry",
                code="layer-profile",
            )
        return replace(self, profile=plan, number=number if self.number is None else self.number)

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
    def plan(self) -> Plan | None:
        """The plan of a coded layer that is resolved or was read from a file, else None."""
        return self.profile if isinstance(self.profile, Plan) else None


def check_geometry(kv_heads: int, head_dim: int) -> None:
    """Raise :class:`LimitError` (``limit-geometry``) for heads the format cannot hold."""
    if not 1 <= kv_heads <= MAX_HEADS or not 1 <= head_dim <= MAX_HEAD_DIM or kv_heads * head_dim > MAX_VALUES:
        raise LimitError(
            f"{kv_heads} heads of {head_dim} values: a layer has 1 to {MAX_HEADS} heads of 1 to {MAX_HEAD_DIM} values "
            f"and at most {MAX_VALUES} values",
            code="limit-geometry",
        )

"""A cache for generation with Hugging Face transformers: old tokens in pages, few exact ones, files to go on from.

    from dquantcodec.integrations.transformers import DQuantCache

    cache = DQuantCache(model.config)
    output = model.generate(**inputs, cache=cache, max_new_tokens=200)
    cache.save("conversation.dqkv", model="SmolLM2-135M-Instruct")

Layers with full attention are coded; the others (sliding windows, linear attention, shared ones) are transformers'
own.  Decoded keys and values live for one layer's attention and are gone afterwards: every step decodes the whole
history, which costs time and no memory.  ``keep_decoded`` turns this round.  With ``model.set_attn_implementation(
"dquant")`` attention reads the pages themselves.  Pages are where the model's keys are: in the CPU's memory, or in a
pool on a CUDA device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from os import PathLike
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Cache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs

from ..errors import InputError
from ..plan import Plan
from ..profile import DEFAULT_PROFILE, Profile
from .transformers_attention import register
from .transformers_layer import ATTENTION, DQuantLayer, Settings

__all__ = ["ATTENTION", "DQuantCache"]

register()


class DQuantCache(Cache):  # type: ignore[misc]  # transformers has no types
    """Keys and values of all layers, those of full-attention layers in pages.

    config
        The model's configuration, ``model.config``.
    profile
        A profile or its name.  Variance classes are fitted to the first ``fit_windows`` windows that a layer has to
        code; until then it codes nothing.  ``plans`` (of :attr:`plans`, layer number to plan) spare the wait.
    sinks, recent
        Leading tokens that stay exact (default: what the profile asks for), and how many of the newest always are.
        Up to one window more waits until it is full.
    attention_mask
        ``[B, T]`` of a batch of prompts that are padded on the left: padding is neither coded nor stored.
    exact_layers
        Numbers of full-attention layers that are not coded.
    keep_decoded
        Keep what pages decode to.  Steps get faster, and memory is no less than without the codec.
    threads
        Pages worked on at once.

    Raises :class:`InputError` for arguments that do not fit.
    """

    def __init__(
        self,
        config: Any,
        profile: str | Profile = DEFAULT_PROFILE,
        *,
        sinks: int | None = None,
        recent: int = 128,
        fit_windows: int = 4,
        attention_mask: torch.Tensor | None = None,
        plans: Mapping[int, Plan] | None = None,
        exact_layers: Collection[int] = (),
        keep_decoded: bool = False,
        threads: int = 1,
    ) -> None:
        profile = Profile.named(profile) if isinstance(profile, str) else profile
        sinks = profile.sinks if sinks is None else sinks
        for name, value, least in (("sinks", sinks, 0), ("recent", recent, 0), ("fit_windows", fit_windows, 1)):
            if value < least:
                raise InputError(f"{name} must be {least} or more, not {value}", code="input-tokens")
        self.settings = Settings(profile, sinks, recent, fit_windows, keep_decoded, threads)
        self.config = config.get_text_config(decoder=True)
        padding = None if attention_mask is None else left_padding(attention_mask)
        types, keywords = get_layer_types_and_kwargs(self.config)
        layers = []
        for number, (kind, arguments) in enumerate(zip(types, keywords)):
            if kind == "full_attention" and number not in exact_layers:
                plan = plans.get(number) if plans else None
                layers.append(DQuantLayer(number, self.settings, self.config, padding, plan))
            else:
                layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**arguments))
        super().__init__(layers=layers)

    @property
    def coded_layers(self) -> dict[int, DQuantLayer]:
        """Layers that pages are made of, by number."""
        return {number: layer for number, layer in enumerate(self.layers) if isinstance(layer, DQuantLayer)}

    @property
    def plans(self) -> dict[int, Plan]:
        """Plans fitted so far, by layer; another cache of the same model takes them."""
        return {number: layer.plan for number, layer in self.coded_layers.items() if layer.plan}

    def reset(self, attention_mask: torch.Tensor | None = None) -> None:
        """Forget all tokens and the old mask, not the plans.  ``attention_mask`` is that of the prompts to come."""
        padding = None if attention_mask is None else left_padding(attention_mask)
        for layer in self.layers:
            if isinstance(layer, DQuantLayer):
                layer.reset(padding)
            else:
                layer.reset()

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays the cache keeps alive; what sequences share counts once."""
        held: dict[int, int] = {}
        for layer in self.layers:
            arrays = layer.held() if isinstance(layer, DQuantLayer) else vars(layer).values()
            for array in arrays:
                if isinstance(array, torch.Tensor):
                    storage = array.untyped_storage()
                    held[storage.data_ptr()] = storage.nbytes()
                elif isinstance(array, np.ndarray):
                    held[array.ctypes.data] = owner_bytes(array)
        return sum(held.values())

    def save(
        self,
        path: str | PathLike[str],
        *,
        model: str = "",
        revision: str = "",
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Write all sequences to a ``.dqkv`` file; pages go into it as they are.

        ``metadata`` (JSON values, at most 64 KiB in all) is the place for what else a program needs to go on, such as
        the text so far.  Raises :class:`UnsupportedError` (``cache-layer``) for layers that are no keys and values.
        """
        from .transformers_file import save

        save(self, path, model, revision, metadata or {})

    @classmethod
    def load(
        cls, path: str | PathLike[str], config: Any, *, model: str | None = None, threads: int = 1, **settings: Any
    ) -> DQuantCache:
        """The cache that :meth:`save` wrote, to go on with the same text.

        ``config`` is the model's; ``model`` is what the file must say, if given; ``settings`` are other arguments of
        the constructor.  Raises :class:`IdentityError` for the file of another model and whatever
        :func:`dquantcodec.open` raises.
        """
        from .transformers_file import load

        cache: DQuantCache = load(cls, path, config, model, threads, settings)
        return cache


def left_padding(attention_mask: torch.Tensor) -> list[int]:
    """Tokens of padding before every sequence of a mask ``[B, T]``; raises where there is any after the first token."""
    mask = attention_mask.to("cpu", torch.bool)
    if mask.ndim != 2:
        raise InputError(f"the mask has shape {list(mask.shape)}; expected [B, T]", code="cache-mask")
    padding = (~mask).sum(dim=1)
    if not torch.equal(mask, torch.arange(mask.shape[1])[None] >= padding[:, None]):
        raise InputError("the mask has padding behind tokens; pad prompts on the left", code="cache-mask")
    return [int(count) for count in padding]


def owner_bytes(array: NDArray[Any]) -> int:
    """Bytes of the array whose memory ``array`` is a view of."""
    owner: Any = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return int(owner.nbytes)

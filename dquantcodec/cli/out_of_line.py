"""The warning of compress: layers whose estimated attention error is out of line with that of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .console import Console

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..attention_estimate import AttentionEstimate
    from ..tensors import KVSource


def estimate_layers(source: KVSource, output: str, policy: str, device: str = "cpu") -> dict[int, AttentionEstimate]:
    """Estimates of attention errors by layer number, from a few tokens of every coded layer of ``output``.

    The file is read back, so nothing more is held while encoding; tokens are read once more from ``source``.
    """
    import numpy as np

    from ..attention_estimate import estimate_attention, sample_tiles
    from ..file import open as open_file
    from ..tensors import replace_nonfinite

    estimates = {}
    with open_file(output, device=device) as reader:
        for place, (layer, stored) in enumerate(zip(source.layers, reader.layers)):
            if not stored.plans or not stored.coded_tokens:
                continue
            sample: list[list[NDArray[Any]]] = [[], [], [], []]
            for sequence, start, stop in sample_tiles(stored.coded_tokens, source.sequences, stored.plans[0].window):
                tokens = (stored.sinks + start, stored.sinks + stop)
                decoded = reader.sequences[sequence].layers[place]
                for i, kind in enumerate(("key", "value")):
                    block = layer.tensor(kind).read(source.layout, sequence, *tokens)
                    sample[i].append(block if policy == "error" else replace_nonfinite(block, policy)[0])
                    sample[2 + i].append(getattr(decoded, kind).read(*tokens, dtype=np.float32))
            estimates[layer.number] = estimate_attention(*(np.concatenate(arrays) for arrays in sample))
    return estimates


def warn_out_of_line(estimates: dict[int, AttentionEstimate], console: Console) -> list[dict[str, Any]]:
    """One line for each layer whose estimated attention error is out of line; the same as JSON values."""
    from ..attention_estimate import layers_out_of_line

    flagged, middle = layers_out_of_line({number: found.output_error for number, found in estimates.items()})
    beside = f"the median of {len(estimates)} layers is {middle:.2f}" if len(estimates) > 1 else "1.41 is noise"
    for number in flagged:
        found = estimates[number]
        console.warn(
            f"layer {number}: estimated attention error {found.output_error:.2f} ({beside}), logits off by "
            f"{found.logit_error:.2g}; keep it exact with --exact-layers {number}, or code it with a larger profile"
        )
    return [
        {
            "layer": number,
            "attention_error": estimates[number].output_error,
            "logit_error": estimates[number].logit_error,
        }
        for number in flagged
    ]

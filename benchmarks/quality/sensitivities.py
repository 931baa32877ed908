"""What coding one layer's keys or values alone does to a model: the harm that containers are allocated by.

    python benchmarks/quality sensitivities --json FILE [--model smollm2]

One kind of one layer at a time is coded with profile ``1.96``, everything else stays exact, and the mean KL divergence
of the model's predictions is taken over a few documents, other ones than results are reported on.  The figures belong
to a model and are measured once; ``dquantcodec 2.26 planned`` gives them to :func:`dquantcodec.allocate.allocate`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import models
import numpy as np
import ours
import texts
import torch
from divergence import Window, divergence, reference
from method import Coded, Method, Pair
from tqdm import tqdm

PROFILE = "1.96"
#: Those on which choices were made, so that nothing of the others is known.
DOCUMENTS = ("novel", "jargon")


def one_kind(number: int, kind: int) -> Method:
    """A method that codes keys (0) or values (1) of layer ``number`` and leaves all else."""

    def together(layers: Sequence[Pair]) -> list[Coded]:
        coded = [Coded(*pair, 0, 0) for pair in layers]
        found = ours.named(PROFILE)(*layers[number])
        kept = [found.keys, layers[number][1]] if kind == 0 else [layers[number][0], found.values]
        coded[number] = Coded(*kept, 0, 0)
        return coded

    return Method(f"layer {number}", "one kind", ours.SOURCE, ours.named(PROFILE), together)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/quality sensitivities", description=__doc__.splitlines()[0]
    )
    models.add_arguments(parser)
    texts.add_arguments(parser)
    parser.add_argument("--documents", nargs="+", default=list(DOCUMENTS), metavar="NAME")
    parser.add_argument("--context", type=int, default=1152, help="tokens read first; the newest 128 stay exact")
    parser.add_argument("--scored", type=int, default=128, help="predictions compared")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    window = Window(context=arguments.context, scored=arguments.scored, continuation=0)
    documents = [d for d in texts.chosen(arguments, arguments.models) if d.name in arguments.documents]
    known = json.loads(arguments.json.read_text(encoding="utf-8"))["models"] if arguments.json.exists() else {}
    for name in arguments.model or list(models.WEIGHTS):
        model = models.load(name, arguments.models, arguments.device, arguments.dtype)
        fulls = [reference(model.network, model.tokens(document.text), window) for document in documents]
        kinds = [(layer, kind) for layer in range(len(fulls[0].cache.layers)) for kind in (0, 1)]
        harm = np.zeros((len(fulls[0].cache.layers), 2))
        for layer, kind in tqdm(kinds, desc=model.name, disable=None):
            found = [divergence(model.network, full, one_kind(layer, kind)).kl.mean() for full in fulls]
            harm[layer, kind] = float(np.mean(found))
        known[model.name] = {"sha256": model.sha256, "harm": harm.tolist()}
        document = {
            "what": __doc__.splitlines()[0],
            "profile": PROFILE,
            "documents": {document.name: document.sha256 for document in documents},
            "context": arguments.context,
            "scored": arguments.scored,
            "versions": {package: version(package) for package in ("dquantcodec", "numpy", "torch", "transformers")},
            "models": known,
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0

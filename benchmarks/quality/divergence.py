"""How much a model's predictions on one document change when its KV cache is replaced by reconstructions.

The first ``context`` tokens are prefilled in full precision, all but their newest ``recent`` are replaced in every
layer, and the next ``scored`` tokens are read one after another (teacher forced).  Both models, full and coded, predict
after every one of them; the KV entries of the scored tokens themselves stay exact in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from method import Method
from model_cache import CodedSize, coded_copy, greedy, prefill, read, shared_copy
from numpy.typing import NDArray
from transformers import DynamicCache

#: Tokens read at once (their float32 logits take 128 MiB with a vocabulary of 262144: a model reads many tokens much
#: faster together than apart) and positions whose distributions are held in float64 at once (64 MiB each).
READ = 128
POSITIONS = 32


@dataclass(frozen=True)
class Window:
    """Tokens of a document: ``context`` read first, of which the newest ``recent`` stay exact, then ``scored``.

    ``continuation`` is the number of tokens both models write greedily after the context (0: none).
    """

    context: int = 2048
    recent: int = 128
    scored: int = 256
    continuation: int = 64

    @property
    def tokens(self) -> int:
        """What a document needs: the last scored prediction is about one token more."""
        return self.context + self.scored + 1


@dataclass(frozen=True, eq=False)
class Reference:
    """The full-precision run of one document, shared by all methods.

    ``logits`` float32 ``[scored, V]`` on the CPU, ``nll`` float64 ``[scored]`` of the true tokens in nats.
    ``written`` are the tokens the model writes greedily after the context and one token of the document, ``chosen`` its
    most probable token before each of them when it reads them together; the two are equal, save where rounding decides
    between equally probable tokens.
    """

    tokens: tuple[int, ...]
    window: Window
    cache: DynamicCache
    logits: torch.Tensor
    nll: NDArray[np.float64]
    written: tuple[int, ...]
    chosen: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Divergence:
    """``kl`` float64 ``[scored]`` is KL(full || coded) of each prediction in nats; ``nll`` belongs to the coded model.

    ``top1`` is the share of positions with the same most probable token, ``equal_tokens`` the number of greedy tokens
    before the first that differs.
    """

    kl: NDArray[np.float64]
    nll: NDArray[np.float64]
    top1: float
    equal_tokens: int
    size: CodedSize

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll.mean())


def reference(network: Any, tokens: Sequence[int], window: Window) -> Reference:
    """``tokens`` are at least ``window.tokens`` of the document; later ones are not read."""
    if len(tokens) < window.tokens:
        raise ValueError(f"{len(tokens)} tokens, {window.tokens} needed")
    tokens = tuple(tokens[: window.tokens])
    cache, _ = prefill(network, tokens[: window.context])
    logits = torch.empty(window.scored, network.get_output_embeddings().out_features)
    nll = []
    for start, part, targets in _forced(network, tokens, window, cache):
        logits[start : start + len(part)] = part
        nll.append(_nll(torch.log_softmax(part.double(), -1), targets))
    written = greedy(network, cache, tokens[window.context], window.continuation)
    chosen = _choices(network, tokens[window.context], written, cache)
    return Reference(tokens, window, cache, logits, np.concatenate(nll), tuple(written), chosen)


def divergence(network: Any, full: Reference, method: Method) -> Divergence:
    """The same document with ``method`` between prefill and scored tokens."""
    cache, size = coded_copy(full.cache, method, full.window.recent)
    kl, nll, equal = [], [], 0
    for start, part, targets in _forced(network, full.tokens, full.window, cache):
        exact = full.logits[start : start + len(part)].to(part.device)
        log_p = torch.log_softmax(exact.double(), -1)
        log_q = torch.log_softmax(part.double(), -1)
        p = log_p.exp()
        # Entries that underflow to p = 0 add nothing, even where log q is -inf.
        terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
        kl.append(terms.sum(-1).cpu().numpy())
        nll.append(_nll(log_q, targets))
        equal += int((exact.argmax(-1) == part.argmax(-1)).sum())
    chosen = _choices(network, full.tokens[full.window.context], full.written, cache)
    return Divergence(
        kl=np.concatenate(kl),
        nll=np.concatenate(nll),
        top1=equal / full.window.scored,
        equal_tokens=equal_prefix(full.chosen, chosen),
        size=size,
    )


def equal_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens are equal before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _forced(
    network: Any, tokens: Sequence[int], window: Window, cache: DynamicCache
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Scored positions, a few at a time: the first's number, logits ``[n, V]``, true next tokens ``[n]``."""
    cache = shared_copy(cache)
    scored, following = tokens[window.context :], tokens[window.context + 1 :]
    for first in range(0, window.scored, READ):
        logits = read(network, scored[first : min(first + READ, window.scored)], cache)
        for start in range(0, len(logits), POSITIONS):
            part = logits[start : start + POSITIONS]
            targets = following[first + start : first + start + len(part)]
            yield first + start, part, torch.tensor(targets, device=logits.device)


def _choices(network: Any, first: int, written: Sequence[int], cache: DynamicCache) -> tuple[int, ...]:
    """The most probable token after ``first`` and after each of ``written`` but the last, read together.

    Up to its first difference from ``written`` this is what the model would write itself, in one pass.
    """
    if not written:
        return ()
    logits = read(network, [first, *written[:-1]], shared_copy(cache))
    return tuple(logits.argmax(-1).tolist())


def _nll(log_probabilities: torch.Tensor, targets: torch.Tensor) -> NDArray[np.float64]:
    return -log_probabilities.gather(-1, targets[:, None])[:, 0].cpu().numpy()

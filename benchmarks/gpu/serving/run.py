"""What one run measures, case by case: a case that fails or comes too late is written down and hides no other."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from capacity import exact_bytes, largest, paged_bytes
from decoder_model import Decoder, DecoderShape, random_rows
from kv_caches import BACK_ENDS, Coded, ExactCache, NoCache, PageCache, spread_lengths
from measuring import spread

#: Steps of caches whose lengths stay; pages take at least as many, and as many as fill every tail once if there are too
#: few sequences for that to even out.
STEPS = 16
#: Bytes that a sequence takes in activations, logits above all: where the search for the largest batch begins.
ACTIVATIONS = 600_000

Row = dict[str, Any]


class Run:
    """One model on one card (:class:`measuring.Card`); rows are printed and kept in ``out`` as they come.

    ``prompt`` tokens a sequence in batches, ``sample`` tokens are repeated in caches, ``positions`` bounds lengths.
    """

    def __init__(
        self, card: Any, shape: DecoderShape, header: Row, *, prompt: int, sample: int, positions: int, repeats: int,
        seconds: float = float("inf"), out: Path | None = None, back_ends: tuple[str | None, ...] = tuple(BACK_ENDS),
    ) -> None:  # fmt: skip
        self.card, self.shape, self.prompt, self.out, self.repeats = card, shape, prompt, out, repeats
        self.back_ends = back_ends
        self.until = time.monotonic() + seconds
        self.result: Row = {**header, "batches": [], "largest": [], "growth": [], "checks": [], "left_out": []}
        self.sample = random_rows(shape, sample, 3).to(torch.bfloat16).to(card.device)
        card.release()
        before = card.used()
        self.model = Decoder(shape, positions, card.device)
        self.result["weights"] = {"parameters": shape.parameters, "card_bytes": card.used() - before}

    def keep(self, part: str, row: Row) -> None:
        self.result[part].append(row)
        print(json.dumps({part: row}), flush=True)
        if self.out:
            self.out.write_text(json.dumps(self.result, indent=1) + "\n", encoding="utf-8")

    def attempt(self, what: str, work: Callable[[], Any]) -> Any:
        """``work()``, unless time is up; what it raises is kept in place of its rows."""
        if time.monotonic() > self.until:
            self.keep("left_out", {"what": what, "why": "time"})
            return None
        try:
            return work()
        except Exception as reason:
            self.keep("left_out", {"what": what, "why": f"{type(reason).__name__}: {reason}"[:500]})
            return None
        finally:
            self.card.release()

    def timed(self, cache: Any, batch: int, steps: int, repeats: int | None = None) -> Row:
        taken = self.card.times(self.model, cache, batch, steps, repeats or self.repeats)
        return {**spread(taken), "tokens_per_s": round(1000 * batch / statistics.median(taken), 1), "steps": steps}

    def alone(self, batch: int) -> Row:
        """The model without keys and values."""
        return {"cache": "none", "batch": batch, **self.timed(NoCache(batch, self.card.device), batch, STEPS)}

    def exact(self, batch: int, tokens: int, repeats: int | None = None) -> Row:
        """BF16 rows, with whichever of the back ends is fastest."""
        self.card.release()
        before = self.card.allocated()
        cache = ExactCache(self.shape, batch, tokens, self.card.device)
        taken = self.card.allocated() - before
        cache.fill(self.sample)
        found: dict[str | None, Row] = {}
        failures: list[RuntimeError] = []
        for back_end in self.back_ends:
            cache.back_end = back_end
            try:
                found[back_end] = self.timed(cache, batch, STEPS, repeats)
            except RuntimeError as reason:
                failures.append(reason)
        if not found:
            raise failures[-1]
        best = min(found, key=lambda name: found[name]["median_ms"])
        return {
            "cache": "bf16", "batch": batch, "tokens": tokens, **found[best], "back_end": best,
            "back_ends": {str(name): row["median_ms"] for name, row in found.items()},
            "cache_bytes": taken, "bytes_by_layout": batch * exact_bytes(self.shape, tokens),
            "card_used_bytes": self.card.used(),
        }  # fmt: skip

    def paged(self, coded: Coded, pages: torch.Tensor, batch: int, tokens: int, repeats: int | None = None) -> Row:
        """Pages of a plan; ``without_attention_ms`` is a step that appends and encodes alone."""
        self.card.release()
        before = self.card.allocated()
        window = coded.plan.window
        steps = max(STEPS, window // batch)
        cache = PageCache(self.shape, coded, spread_lengths(batch, tokens, window, steps), self.room(coded, tokens))
        taken = self.card.allocated() - before
        cache.fill(self.sample, pages)
        row = self.timed(cache, batch, steps, repeats)
        if cache.full():
            raise RuntimeError("a token found no room")
        used = self.card.used()
        cache.attending = False
        without = self.timed(cache, batch, steps, 1)["median_ms"]
        return {
            "cache": coded.name, "batch": batch, "tokens": tokens, **row, "without_attention_ms": without,
            "cache_bytes": taken, "bytes_by_layout": batch * self.paged_bytes(coded, tokens), "card_used_bytes": used,
        }  # fmt: skip

    @staticmethod
    def room(coded: Coded, tokens: int) -> int:
        """What sequences of about ``tokens`` tokens may come to while they are measured: less than a window more."""
        return tokens + coded.plan.window - 1

    def paged_bytes(self, coded: Coded, tokens: int) -> int:
        return paged_bytes(self.shape, coded.plan, coded.sinks, self.room(coded, tokens))

    def most(self, name: str, sequence: int, work: Callable[[int], Row]) -> int:
        """The largest batch for which ``work`` finds memory; a sequence takes ``sequence`` bytes by its layout."""
        self.card.release()
        free = self.card.free()

        def attempt(batch: int) -> Row:
            self.card.release()
            return work(batch)

        batch, row, failed = largest(free // (sequence + ACTIVATIONS), attempt)
        if row:
            self.keep("batches", row)
            if not any((r["cache"], r["batch"]) == ("none", batch) for r in self.result["batches"]):
                self.card.release()
                self.keep("batches", self.alone(batch))
        row = {"cache": name, "batch": batch, "too_large": failed, "free_bytes": free, "sequence_bytes": sequence}
        self.keep("largest", row)
        return batch

    def check(self, coded: Coded, pages: torch.Tensor, tokens: int) -> Row:
        """The same tokens from pages and, decoded, from BF16 rows: logits must agree as far as BF16 can tell.

        How far that is two back ends on the same rows show: ``back_ends_error``.
        """
        lengths = torch.full((2,), tokens - 1, dtype=torch.int32)
        cache = PageCache(self.shape, coded, lengths, tokens)
        cache.fill(self.sample, pages)
        rows = ExactCache(self.shape, 2, tokens, self.card.device)
        for layer, exact in enumerate(rows.rows):
            for sequence in range(2):
                exact[:, sequence, :, :-1] = cache.exact_rows(layer, sequence).permute(0, 2, 1, 3)
        ids = torch.tensor([1, 2], device=self.card.device)
        ours = self.model.logits(ids, cache).double()
        exact_logits = []
        for back_end in self.back_ends:
            rows.back_end = back_end
            exact_logits.append(self.model.logits(ids, rows).double())

        def error(of: torch.Tensor) -> float:
            return round(float((of - exact_logits[0]).norm() / exact_logits[0].norm()), 6)

        return {
            "cache": coded.name, "tokens": tokens, "relative_error": error(ours),
            "back_ends_error": error(exact_logits[1]) if len(exact_logits) > 1 else None,
            "same_tokens": int((ours.argmax(-1) == exact_logits[0].argmax(-1)).sum()), "of": 2,
        }  # fmt: skip


def measure(run: Run, all_coded: list[Coded], batches: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    """Equal batches, the largest ones, and one sequence that grows."""
    prompt = run.prompt
    for batch in batches:
        run.attempt(f"none x {batch}", lambda batch=batch: run.keep("batches", run.alone(batch)))
        if not run.result["batches"]:
            # Nothing else can work then, and a card is too dear to see that case by case.
            return
    sequence = exact_bytes(run.shape, prompt)
    for batch in batches:
        if batch * sequence < run.card.free():
            run.attempt(f"bf16 x {batch}", lambda batch=batch: run.keep("batches", run.exact(batch, prompt)))
    most = run.attempt("bf16, largest", lambda: run.most("bf16", sequence, lambda batch: run.exact(batch, prompt)))
    sizes = sorted({*batches, *([most] if most else [])})
    for number, coded in enumerate(all_coded):
        # Pages of other plans differ by a few bytes a token: their growth tells nothing new.
        measure_coded(run, coded, sizes, lengths if number == 0 else ())
        for tokens in lengths if number == 0 else ():
            run.attempt(
                f"bf16, 1 x {tokens}", lambda tokens=tokens: run.keep("growth", run.exact(1, tokens, repeats=2))
            )


def measure_coded(run: Run, coded: Coded, batches: list[int], lengths: tuple[int, ...]) -> None:
    """All cases of one plan."""
    name = coded.name
    pages = run.attempt(f"{name}, pages", lambda: coded.pages(run.sample))
    if pages is None:
        return

    def case(what: str, part: str, work: Callable[[], Row]) -> None:
        run.attempt(f"{name}, {what}", lambda: run.keep(part, work()))

    case("check", "checks", lambda: run.check(coded, pages, min(run.prompt, 1001)))
    for batch in batches:
        case(f"{batch} x {run.prompt}", "batches", lambda batch=batch: run.paged(coded, pages, batch, run.prompt))
    run.attempt(
        f"{name}, largest",
        lambda: run.most(
            name,
            run.paged_bytes(coded, run.prompt),
            lambda batch: run.paged(coded, pages, batch, run.prompt, repeats=2),
        ),
    )
    for tokens in lengths:
        case(f"1 x {tokens}", "growth", lambda tokens=tokens: run.paged(coded, pages, 1, tokens, repeats=2))

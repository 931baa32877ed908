"""Questions whose answer stands in the context: a sentence hidden in prose, and a list of keys and values.

The answer is always among the tokens that methods code: ``recent`` newer ones and a margin follow it.  Numbers, and
leads that begin the answer, make the cases easy enough for models of 100 million parameters.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from models import Model
from texts import Document

#: Tokens of context of the needle cases and numbers of pairs, used in turn.
LENGTHS = (1000, 1500, 2000)
PAIRS = (50, 75, 100)
#: Built-in documents that are prose.
PROSE = ("novel", "scripture", "jargon", "law")
#: Tokens between the fact and the exact ones: tokenizers may merge across the places where lengths are counted.
MARGIN = 16


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CITIES = _words(
    "Lisbon Oslo Cairo Lima Kyoto Boston Dublin Vienna Havana Nairobi Athens Delhi Geneva Hanoi Madrid Manila Milan "
    "Moscow Munich Naples Paris Prague Quito Riga Rome Seoul Sydney Tehran Tokyo Toronto Tunis Warsaw Zurich"
)
WORDS = _words(
    "amber ancient bitter brave bright broken calm clever cold crimson dark eager early faint gentle golden grand "
    "green happy hollow humble icy little lonely loud lucky mellow narrow noble pale proud quick quiet rapid "
    "rough rusty silent silver simple slow smooth spare stormy strange sweet tall tiny upper velvet wild wooden "
    "young anchor arrow basket bell bridge candle castle cloud compass copper desert door dragon engine falcon "
    "feather field forest fountain garden glove hammer harbor island jacket kettle key ladder lake lantern magnet "
    "marble mirror mountain needle orchid pepper piano pocket quartz ribbon river saddle ship spoon temple tower "
    "tunnel valley violin wagon walnut whistle window winter apple bottle camera cotton dinner elbow finger "
    "guitar helmet insect jungle kitchen lemon market napkin onion pencil rabbit school ticket uncle village "
    "wallet yogurt zebra"
)


@dataclass(frozen=True)
class Case:
    """``lead`` is how the answer begins, so that a small model need not guess the form; ``tokens`` may follow it.

    ``chat`` is for models with a chat template; everything else is asked as plain text that goes on.
    """

    kind: str
    context: str
    question: str
    lead: str
    answers: tuple[str, ...]
    tokens: int = 8
    chat: bool = True

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()


def needle(model: Model, filler: str, length: int, recent: int, seed: int) -> Case:
    """One sentence with a number of four digits among about ``length`` tokens of the sentences of ``filler``."""
    draw = random.Random(f"needle {seed} {length}")
    city, number = draw.choice(CITIES), _number(draw, 4)
    sentences = re.split(r"(?<=[.!?;:])\s+", filler)
    counts = [len(model.tokenizer(sentence, add_special_tokens=False)["input_ids"]) for sentence in sentences]
    kept, total = 0, 0
    while kept < len(sentences) and total + counts[kept] <= length:
        total += counts[kept]
        kept += 1
    place = draw.choice(_coded_places(counts[:kept], recent))
    sentences[place:kept] = [f"The secret code of {city} is {number}.", *sentences[place:kept]]
    return Case(
        "needle",
        "Remember the secret code in this text.\n\n" + " ".join(sentences[: kept + 1]),
        f"What is the secret code of {city}?",
        f"The secret code of {city} is",
        (number,),
    )


def pairs(model: Model, count: int, recent: int, seed: int) -> Case:
    """``count`` lines ``word: three digits``, no two words equal, of which one is asked for again.

    No chat: small models that find the line when the text goes on with its key often do not when they are asked.
    """
    draw = random.Random(f"pairs {seed} {count}")
    lines = {key: _number(draw, 3) for key in draw.sample(WORDS, count)}
    counts = [len(model.tokenizer(f"{k}: {v}\n", add_special_tokens=False)["input_ids"]) for k, v in lines.items()]
    # The place before which the remaining lines are long enough is that after the line asked for.
    key = list(lines)[draw.choice(_coded_places(counts, recent)[1:]) - 1]
    return Case(
        "pairs",
        "Here is a list of keys and their values.\n\n" + "\n".join(f"{k}: {v}" for k, v in lines.items()),
        "One of them again:",
        f"{key}:",
        (lines[key],),
        chat=False,
    )


def _number(draw: random.Random, digits: int) -> str:
    return "".join(draw.choice("123456789") for _ in range(digits))


def _coded_places(counts: Sequence[int], recent: int) -> list[int]:
    """Indices before which a fact may stand so that at least ``recent`` tokens and a margin follow it."""
    after = sum(counts)
    places = []
    for index, count in enumerate(counts):
        if after < recent + MARGIN:
            break
        places.append(index)
        after -= count
    if len(places) < 2:
        raise ValueError(f"{sum(counts)} tokens of context are too few to leave out the newest {recent}")
    return places


def from_document(document: Document) -> Case:
    """A question of a JSONL file; its answer is free text, so more tokens are written."""
    return Case("file", document.text.strip(), document.question, "", document.answers, tokens=32)


def prompt(model: Model, case: Case) -> tuple[list[int], list[int]]:
    """Token ids of the context, and of the question with the beginning of the answer.

    In a chat both are one message of the user and the answer is the assistant's.
    """
    if case.chat and model.tokenizer.chat_template:
        message = [{"role": "user", "content": f"{case.context}\n\n{case.question}"}]
        text = model.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True) + case.lead
        cut = text.index(case.context) + len(case.context)
        return _plain_ids(model, text[:cut]), _plain_ids(model, text[cut:])
    return model.tokens(case.context), _plain_ids(model, f"\n\n{case.question}\n{case.lead or 'Answer:'}")


def _plain_ids(model: Model, text: str) -> list[int]:
    return list(model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def built_in(model: Model, fillers: Sequence[Document], recent: int) -> dict[str, Iterator[Case]]:
    """Endless cases of both kinds; every one of another text, length and seed."""

    def needles() -> Iterator[Case]:
        number = 0
        while True:
            filler = fillers[number % len(fillers)].text
            yield needle(model, filler, LENGTHS[number % len(LENGTHS)], recent, number)
            number += 1

    def lists() -> Iterator[Case]:
        number = 0
        while True:
            yield pairs(model, PAIRS[number % len(PAIRS)], recent, number)
            number += 1

    return {"needle": needles(), "pairs": lists()}

"""The documents: free texts of different kinds out of pinned packages on PyPI, or files of one's own.

Each of the built-in ones is a passage of a file in one package version, so it is the same text on every machine; its
SHA-256 is checked and recorded with every result.

=========== ============================================== ===================================
name        what                                           licence
=========== ============================================== ===================================
novel       Botchan, translated by Y. Morri (1919)         public domain
scripture   King James Bible, Genesis 29 and after           public domain
jargon      Jargon File, dictionary entries                public domain
law         GNU General Public License 3                   verbatim copies permitted
manual      command-line manual of yt-dlp                  Unlicense
markup      reStructuredText specification                 public domain
tutorial    NLTK on logic, prose and interpreter sessions  Apache-2.0
python      source of more-itertools                       MIT
csharp      source of Ansible's Windows modules            GPL-3.0-or-later
config      Ansible's settings in YAML                     GPL-3.0-or-later
=========== ============================================== ===================================
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packages import FetchError, Package, archive, member

#: Characters of a passage: at least 2.4 per token of either tokenizer gives 2305 tokens and some to spare.
PASSAGE = 16000


@dataclass(frozen=True)
class Document:
    """``question`` is empty, or what is asked about ``text``; ``answers`` are the strings any of which is right."""

    name: str
    text: str
    question: str = ""
    answers: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class Passage:
    """``PASSAGE`` characters from ``start`` of what ``prepare`` makes of one file of a package."""

    name: str
    package: Package
    filename: str
    start: int
    prepare: Callable[[str], str]
    sha256: str


def flowing(text: str) -> str:
    """Paragraphs as single lines, with one empty line between them: how models mostly saw prose."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def joined_lines(text: str) -> str:
    """Joins a line to the next unless it ends a sentence: for prose that has lost its paragraph breaks."""
    return re.sub(r"(?<![.!?\"'])\n", " ", text)


def verses(source: str) -> str:
    """The verses of a Python module that holds a whole Bible in one string, a paragraph a line, without numbers."""
    # Numbers before verses are not part of the text, and the easiest tokens to guess.
    return re.sub(r"(^|(?<=\s))\d+\. ", "", source.split('"""')[1]).strip()


def entries(source: str) -> str:
    """Dictionary entries from JSON, without the terminal colours in them."""
    lines = []
    for entry in json.loads(source):
        definition = " ".join(sense["definition"] for sense in entry["senses"])
        lines.append(f"{entry['term']}: {definition}")
    return re.sub(r"\x1b\[\d+m", "", "\n\n".join(lines))


def unchanged(text: str) -> str:
    return text


ANSIBLE = Package("ansible-core", "2.17.6")
PASSAGES = (
    Passage(
        "novel",
        Package("sentencepiece", "0.1.99", source=True),
        "/test/botchan.txt",
        60000,
        joined_lines,
        "40e30d059b6bdea6d43318a65fa142bd38ddbff5725f64ec9aaf891de555c627",
    ),
    Passage(
        "scripture",
        Package("pythonbible", "0.13.1"),
        "/kjv/plain_text.py",
        100000,
        verses,
        "612c41d2006d4b3b51003a12b210b88c17707565ba53faa2f665814228108983",
    ),
    Passage(
        "jargon",
        Package("jargon-file", "0.1.0"),
        "data/jargon.json",
        300000,
        entries,
        "c32db943b99d59af60a9f14cec2bce9766a7ef70ff592b86d9f3bee829e88db6",
    ),
    Passage(
        "law",
        Package("yamllint", "1.35.1"),
        "/LICENSE",
        3000,
        flowing,
        "35463e88e66dcfc2a78bf73e24e8065768717a66365d98032731880db425c7c3",
    ),
    Passage(
        "manual",
        Package("yt-dlp", "2024.10.22"),
        "/share/doc/yt_dlp/README.txt",
        80000,
        unchanged,
        "9d65186d28caac28948aa2f717e50a3f5924c7bda8f9f6a87232683cbba34e9b",
    ),
    Passage(
        "markup",
        Package("docutils", "0.21.2", source=True),
        "/rst/restructuredtext.txt",
        40000,
        unchanged,
        "af84a19979ed180bc3d5a67be856becd4622dda63702f06bf899f166f1393c66",
    ),
    Passage(
        "tutorial",
        Package("nltk", "3.9.1"),
        "nltk/test/logic.doctest",
        1000,
        unchanged,
        "f78e39f30bba2a14bb61542be14e2a313c1b64e64812fec9a7dfdd78bf1bdc21",
    ),
    Passage(
        "python",
        Package("more-itertools", "10.5.0"),
        "more_itertools/more.py",
        40000,
        unchanged,
        "3240801099a44690f60f251dd0ab9083a5d0b4d54c1093fdbd0546c6b4e75aae",
    ),
    Passage(
        "csharp",
        ANSIBLE,
        "/csharp/Ansible.Basic.cs",
        20000,
        unchanged,
        "26fbccc1fcd688113a9e78e5d4cc456aecee229c813d2b16a850c01143190c8e",
    ),
    Passage(
        "config",
        ANSIBLE,
        "ansible/config/base.yml",
        20000,
        unchanged,
        "db0951fe52accf4d5fba2444019a07882b6858429172548e081f0420c4ad50e6",
    ),
)


def passage(source: Passage, cache: Path) -> Document:
    """The document of ``source``, from packages in ``cache`` or downloaded to it; its text is checked."""
    with member(archive(source.package, cache), source.filename) as stream:
        whole = stream.read().decode("utf-8-sig").replace("\r\n", "\n")
    text = source.prepare(whole)[source.start :]
    # Starting and ending between words keeps both tokenizers from cutting one in two.
    text = text[text.index("\n") + 1 :][:PASSAGE].rsplit(None, 1)[0]
    document = Document(source.name, text)
    if document.sha256 != source.sha256:
        raise FetchError(f"the text {source.name!r} has SHA-256 {document.sha256}, not {source.sha256}")
    return document


def passages(cache: Path) -> list[Document]:
    """The built-in documents."""
    return [passage(source, cache) for source in PASSAGES]


def folder(path: Path) -> list[Document]:
    """Every ``*.txt`` of a folder, by name."""
    files = sorted(path.glob("*.txt"))
    if not files:
        raise FetchError(f"{path} holds no *.txt")
    return [Document(file.stem, file.read_text(encoding="utf-8")) for file in files]


def json_lines(path: Path) -> list[Document]:
    """Documents of a JSONL file of LongBench-E (``context``, ``input``, ``answers``) or RULER (``input``, ``outputs``).

    RULER puts all into ``input``: there the question is its last paragraph, or its last line.
    """
    return list(_json_lines(path))


def _json_lines(path: Path) -> Iterator[Document]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            row = json.loads(line)
            if "input" not in row:
                raise ValueError(f"{path}, line {number}: no field 'input'")
            text, question = row.get("context", ""), row["input"]
            if not text:
                text, question = _last_paragraph(question)
            answers = row.get("answers", row.get("outputs", []))
            answers = (answers,) if isinstance(answers, str) else tuple(str(answer) for answer in answers)
            yield Document(f"{path.stem}-{number}", text, question, answers)


def _last_paragraph(text: str) -> tuple[str, str]:
    cut = text.rstrip().rfind("\n\n")
    cut = cut if cut > 0 else text.rstrip().rfind("\n")
    return (text[:cut], text[cut:].strip()) if cut > 0 else (text, "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that replace the built-in documents."""
    parser.add_argument("--texts", type=Path, metavar="FOLDER", help="use every *.txt of this folder")
    parser.add_argument(
        "--jsonl",
        type=Path,
        action="append",
        metavar="FILE",
        help="use a LongBench-E or RULER file: its contexts as documents, in retrieval its questions too",
    )


def chosen(arguments: argparse.Namespace, cache: Path) -> list[Document]:
    """The documents that the options ask for; the built-in ones without any."""
    own = folder(arguments.texts) if arguments.texts else []
    for path in arguments.jsonl or []:
        own += json_lines(path)
    return own or passages(cache)

"""The page of ``dqkv compare --html``: its figures against slow and obvious ones, and that it is complete by itself."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from dquantcodec import Codec, fit_plan
from dquantcodec.classes import classes
from dquantcodec.cli.main import main
from dquantcodec.grouping import Levels
from dquantcodec.layer_report import MOST_OFFSET, KindSums, class_shares, container_fill, expected_levels
from dquantcodec.page import read_kind

SAMPLE = Path(str(files("dquantcodec"))) / "data" / "sample.safetensors"


def run(*argv: object) -> int:
    return main([str(arg) for arg in argv])


class Whole(HTMLParser):
    """Fails on tags that are not closed in order; collects what would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("profile", ["2.26", "paper-2.26"])
def test_the_page_is_whole_and_needs_nothing_else(profile: str, tmp_path: Path) -> None:
    coded, page = tmp_path / "a<b.dqkv", tmp_path / "page.html"
    assert run("compress", SAMPLE, coded, "--quiet", "--profile", profile, "--recent", 0, "--exact-layers", 29) == 0
    assert run("compare", SAMPLE, coded, "--html", page, "--quiet") == 0
    text = page.read_text(encoding="utf-8")
    parsed = Whole()
    parsed.feed(text)
    assert parsed.open == [] and parsed.fetched == []
    assert "<script" not in text and "url(" not in text and "@import" not in text
    assert "prefers-color-scheme:dark" in text and "width=device-width" in text
    assert "a<b.dqkv" in parsed.text, "names are shown as they are"
    for heading in ("Size", "Errors by layer", "Attention by layer", "Containers by layer", "Levels", "Worst tokens"):
        assert heading in parsed.text
    assert not re.search(r"\bnan\b|\binf\b", parsed.text)


def test_a_page_never_replaces_what_it_is_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    coded = tmp_path / "c.dqkv"
    assert run("compress", SAMPLE, coded, "--quiet", "--profile", "paper-2.26", "--layers", 1) == 0
    before = coded.read_bytes()
    assert run("compare", SAMPLE, coded, "--layers", 1, "--html", coded) == 1
    assert "[output-is-input]" in capsys.readouterr().err and coded.read_bytes() == before


@pytest.mark.parametrize("profile", ["2.26", "2.26-t", "paper-2.26"])
def test_sums_are_those_of_the_whole(profile: str) -> None:
    rng = np.random.default_rng(1)
    keys, values = (rng.standard_normal((2, 160, 2, 32)) * np.geomspace(0.3, 3, 32)).astype(np.float32)
    plan = fit_plan(profile, keys, values)
    codec = Codec(plan)
    pages = codec.encode(keys, values)
    decoded = codec.decode(pages, dtype=np.float32)
    for kind, exact, back in zip(("key", "value"), (keys, values), decoded):
        sums = KindSums(2, 32)
        for start in range(0, 160, 50):
            sums.add_tokens(exact[start : start + 50], back[start : start + 50], (start,))
        symbols = codec.symbols(pages, kind)
        sums.add_pages(pages.data, symbols, plan, kind)
        report = sums.report()
        squared = np.square(exact.astype(np.float64) - back)
        assert report.nmse == pytest.approx(squared.sum() / np.square(exact.astype(np.float64)).sum())
        tokens = squared.sum(axis=(1, 2))
        assert report.tokens[0].place == (int(tokens.argmax()),)
        assert report.tokens[0].times_mean == pytest.approx(tokens.max() / tokens.mean())
        channels = squared.sum(axis=0)
        assert report.channels[0].place == tuple(int(i) for i in np.unravel_index(channels.argmax(), channels.shape))
        assert sum(report.shares) == pytest.approx(1, abs=2e-3)
        assert sum(report.expected) == pytest.approx(1, abs=2e-3)
        assert 0.5 < report.fill <= report.fullest <= 1


def test_fill_ends_at_the_last_bit_that_is_set() -> None:
    rng = np.random.default_rng(2)
    keys, values = rng.standard_normal((2, 128, 2, 32)).astype(np.float32)
    for profile in ("2.26", "paper-2.26"):
        codec = Codec(profile, 2, 32)
        pages = codec.encode(keys, values)
        words = read_kind(pages.data, codec.plan, "value", slice(0, 4)).words
        fill = container_fill(pages.data, codec.plan, "value")
        bits = 8 * words.dtype.itemsize
        for token in (0, 31, 32, 127):
            container = [int(words[token // 32, 0, w, token % 32]) for w in range(words.shape[2])]
            string = "".join(f"{word:0{bits}b}"[::-1] for word in container).rstrip("0")
            used = -(-len(string) // bits) * bits if profile == "paper-2.26" else len(string)
            assert fill[token, 0] == pytest.approx(used / (bits * len(container)))


def test_expected_shares_follow_from_classes() -> None:
    levels = classes("normal")[8].levels("unbiased")
    offsets, shares = class_shares(levels)
    assert shares.sum() == pytest.approx(1) and offsets.tolist() == sorted(offsets.tolist())
    dependent = Levels((1, 16382, 1), 256, second=(5000, 6384, 5000))
    offsets, shares = class_shares(dependent)
    assert {offset: shares[offsets == offset].sum() for offset in (-2, -1, 0, 1, 2)} == pytest.approx(
        {-2: 1 / 32768, -1: 5000 / 32768, 0: (16382 + 6384) / 32768, 1: 5000 / 32768, 2: 1 / 32768}
    )
    rng = np.random.default_rng(3)
    keys, values = rng.standard_normal((2, 128, 1, 64)).astype(np.float32)
    for plan in (fit_plan("2.26", keys, values), Codec("paper-2.26", 1, 64).plan):
        middles, expected = expected_levels(plan.key, 64)
        assert len(expected) == 2 * MOST_OFFSET + 1 and expected.sum() == pytest.approx(1)
        assert middles.shape == (64,)

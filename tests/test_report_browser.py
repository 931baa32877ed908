"""The page of ``dqkv compare --html`` in a real browser: wide, on a phone, in the dark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, find_browser, pixels

from dquantcodec.cli.main import main

SAMPLE = Path(str(files("dquantcodec"))) / "data" / "sample.safetensors"
PROGRAM = find_browser()

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium or Chrome is on the path")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(str(PROGRAM), tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    coded = folder / "a<b.dqkv"
    options = ["--quiet", "--recent", "0", "--layers", "1,14,29", "--exact-layers", "29"]
    assert main(["compress", str(SAMPLE), str(coded), *options]) == 0
    assert main(["compare", str(SAMPLE), str(coded), "--quiet", "--html", str(folder / "page.html")]) == 0
    return folder / "page.html"


@pytest.fixture(scope="module")
def facts(page: Path) -> dict[str, Any]:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["compare", str(SAMPLE), str(page.parent / "a<b.dqkv"), "--json"]) == 0
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (390, False), (390, True)])
def test_the_page_is_seen_whole(browser: Browser, page: Path, width: int, dark: bool) -> None:
    browser.open(page, width=width, dark=dark)
    asked = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    assert asked == [page.as_uri()], "nothing but the page is fetched"
    said = [
        e
        for e in browser.events
        if e["method"] in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
    ]
    assert not said
    assert browser.evaluate("document.compatMode") == "CSS1Compat"
    assert browser.evaluate("document.documentElement.scrollWidth") <= width, "nothing scrolls sideways"
    colours = browser.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,"
        " getComputedStyle(document.querySelector('rect.key')).fill]"
    )
    light = ["rgb(255, 255, 255)", "rgb(27, 31, 36)", "rgb(31, 111, 235)"]
    assert colours == (["rgb(20, 23, 26)", "rgb(230, 233, 236)", "rgb(108, 176, 255)"] if dark else light)
    picture = browser.picture()
    (page.parent / f"{width}-{'dark' if dark else 'light'}.png").write_bytes(picture)
    assert len(pixels(picture)) > 500, "the picture is not blank"
    # No text of a drawing is cut off at its edge.
    cut = browser.evaluate(
        "[...document.querySelectorAll('svg')].flatMap(svg => [...svg.querySelectorAll('text')].filter(text => {"
        " const box = text.getBoundingClientRect(), edge = svg.getBoundingClientRect();"
        " return box.left < edge.left - 1 || box.right > edge.right + 1 }).map(text => text.textContent))"
    )
    assert cut == []


def test_the_figures_are_those_of_the_comparison(browser: Browser, page: Path, facts: dict[str, Any]) -> None:
    browser.open(page, width=1200, dark=False)
    layers = facts["layers"]

    def count(label: str, selector: str, place: int = 0) -> int:
        found = browser.evaluate(
            f"document.querySelectorAll('svg[aria-label=\"{label}\"]')[{place}].querySelectorAll('{selector}').length"
        )
        assert isinstance(found, int)
        return found

    assert count("errors by layer", "rect.key") == count("errors by layer", "rect.value") == len(layers) == 3
    assert count("attention error by layer", "rect") == 3
    assert count("rate and distortion against the Shannon bound", "circle") == 4, "two kinds of two coded layers"
    shown = browser.evaluate(
        "[...document.querySelectorAll('svg[aria-label=\"errors by layer\"] .soft')].map(t => t.textContent)"
    )
    wanted = [share for row in layers for share in (row["key_centred_nmse"], row["value_nmse"])]
    assert [float(text.split()[0]) for text in shown] == pytest.approx([100 * share for share in wanted], abs=0.051)
    widths = browser.evaluate(
        "[...document.querySelectorAll('svg[aria-label=\"errors by layer\"] rect')].map(r => r.width.baseVal.value)"
    )
    most = max(wanted)
    assert widths == pytest.approx([max(270 * share / most, 0.5) for share in wanted], abs=0.06)
    text = browser.evaluate("document.body.innerText")
    assert f"{facts['totals']['bits_per_value']:.3f} bits/value" in text and "a<b.dqkv" in text

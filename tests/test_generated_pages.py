"""Parts of pages between marks: what is replaced, what stays, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"
if not TOOLS.is_dir():
    pytest.skip("the tools are not beside the tests", allow_module_level=True)
sys.path.insert(0, str(TOOLS))

import generated_pages  # noqa: E402

PAGE = """# Page

<!-- one: from the results -->

old

<!-- end of one -->

Marks begin a line: <!-- one -->
and fill one: <!-- end of one -->
<!-- end of one --> does not.

<!-- one-more -->

older
<!-- end of one-more -->
"""


def test_parts_are_replaced_and_the_rest_stays() -> None:
    one = PAGE.replace("\nold\n", "\nnew \\1\n")
    assert generated_pages.updated(PAGE, {"one": "new \\1"}) == one
    both = one.replace("\nolder\n", "\na\n\nb\n\n")
    assert generated_pages.updated(PAGE, {"one": "new \\1", "one-more": "a\n\nb"}) == both
    assert generated_pages.updated(both, {"one-more": "a\n\nb", "one": "new \\1"}) == both


def test_a_page_is_rewritten_where_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(PAGE + "µ\n", encoding="utf-8")
    generated_pages.rewrite(path, {"one": "·"})
    assert path.read_text(encoding="utf-8") == PAGE.replace("\nold\n", "\n·\n") + "µ\n"


@pytest.mark.parametrize(
    "text",
    [
        PAGE.replace("<!-- one: from the results -->", ""),
        PAGE.replace("<!-- end of one -->", ""),
        PAGE + PAGE,
        PAGE.replace("<!-- one: from the results -->", "<!-- x -->")
        .replace("<!-- end of one -->", "<!-- one -->")
        .replace("<!-- x -->", "<!-- end of one -->"),
    ],
    ids=["no first mark", "no last mark", "twice", "the wrong way round"],
)
def test_marks_that_are_not_there_once_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="marks of 'one' once"):
        generated_pages.updated(text, {"one": "new"})


def test_a_table() -> None:
    assert generated_pages.table(("", "b"), [("1", ""), ("3", "4")]) == "|  | b |\n| --- | --- |\n| 1 |  |\n| 3 | 4 |"

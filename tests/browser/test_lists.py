"""Lists of the console at two widths: no word of a name is broken."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest

from chromium import Chromium

from .console import Console


@pytest.mark.parametrize("query", [{}, {"state": "all"}])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_list_breaks_no_word(
    browser: Chromium, console: Console, query: dict[str, str], width: int
) -> None:
    browser.log_in(console.url, console.session)
    browser.look("light", width)
    browser.open(f"{console.pages['list']}?{urlencode(query)}")
    if width == 1280:
        assert browser.find("#nav-sidebar").is_displayed()
    assert browser.run(_BROKEN) == []


#: Parts of names that are on more than one line.
_BROKEN = """
const broken = [];
for (const name of document.querySelectorAll(
    "#result_list .ae-what, #result_list .field-handled_by, #result_list .ae-exception, "
    + "#changelist-filter a")) {
  for (const part of name.childNodes) {
    const range = document.createRange();
    range.selectNode(part);
    const words = part.textContent.trim();
    const lines = new Set([...range.getClientRects()].map((each) => each.top));
    if (words && !words.includes(" ") && lines.size > 1) broken.push(words);
  }
}
return broken;
"""

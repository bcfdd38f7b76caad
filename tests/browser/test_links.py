"""Each page answers the next question with a link, and the link leads to its answer."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest

from chromium import Chromium

from .console import Console, go

#: A page, the words of a link within an element, and what the address of its target contains.
LINKS = [
    # alert → group, list, topology
    ("dashboard", "#ae-live-alerts", "Failure reopened", "/failuregroup/"),
    ("dashboard", "#ae-live-alerts", "Many events archived", "/archivedevent/?failed=hour"),
    ("dashboard", "#ae-live-alerts", "abyss", "/dashboard/topology/"),
    # queue → archived events
    ("topology", "#ae-live-queues", "Archived events", "/archivedevent/?handler="),
    # batch → its failed events
    ("batch-paused", "#ae-live-progress", "10 events", "/archivedevent/?state=all&batch="),
    ("batches", "#result_list", "failed again", "/archivedevent/?state=all&batch="),
    # row of the outbox → its event
    ("outbox-event", ".ae-facts", "Archived events", "/archivedevent/?q="),
]


@pytest.mark.parametrize(
    ("page", "within", "words", "there"), LINKS, ids=[f"{each[0]}: {each[2]}" for each in LINKS]
)
def test_a_link_leads_to_the_answer(
    browser: Chromium, console: Console, page: str, within: str, words: str, there: str
) -> None:
    browser.log_in(console.url, console.session)
    go(browser, console, page)
    found = [each for each in browser.all(f"{within} a") if words in each.text]
    browser.leave_by(found[0])
    url = browser.driver.current_url
    assert there in url
    assert not browser.complaints()


def test_a_group_leads_to_a_batch_that_names_it(browser: Chromium, console: Console) -> None:
    browser.log_in(console.url, console.session)
    browser.open(console.pages["group"])
    browser.leave_by(browser.find("input[type=submit][value^='Replay all in the background']"))
    assert "/replaybatch/" in browser.driver.current_url
    reason = browser.find("[name=reason]").get_attribute("value")
    assert reason == "https://tickets.example/BILL-1207"
    browser.leave_by(browser.find("#ae-watch-state p a"))
    assert browser.driver.current_url == console.pages["group"]


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

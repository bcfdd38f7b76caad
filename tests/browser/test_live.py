"""Pages keep themselves up to date, and neither lose a selection nor move what is being read."""

from __future__ import annotations

import pytest

from chromium import Chromium
from example_project.demo.admin_user import AdminUser

from .console import Console

#: The height of the link with these words in the window, ``null`` if there is none.
_TOP = """
const link = [...document.querySelectorAll("#result_list a")]
    .find((each) => each.getAttribute("href").includes(arguments[0]));
return link ? link.getBoundingClientRect().top : null;
"""


@pytest.fixture
def ada(browser: Chromium, console: Console) -> Chromium:
    """Look at the console; pages that are opened refresh each second."""
    browser.log_in(console.url, console.session)
    return browser


@pytest.fixture
def colleague(console: Console) -> AdminUser:
    user = AdminUser(console.url)
    user.log_in("ada", "secret")
    return user


def look(browser: Chromium, url: str) -> None:
    browser.open(url)
    browser.until(lambda: browser.find(".ae-live").is_displayed(), "the control")
    browser.run("document.querySelector('.ae-live').dataset.seconds = 1")


def discard(colleague: AdminUser, page: str) -> None:
    (link,) = colleague.open(page).xpath("//a[contains(@class, 'ae-button-discard')]/@href")
    (form,) = [each for each in colleague.open(link).forms if "reason" in each.fields]
    colleague.submit(form, {"reason": "placed twice"})


def key(page: str) -> str:
    """Return the id of an event from the address of its page."""
    return page.rstrip("/").split("/")[-2]


def test_a_list_shows_what_a_colleague_does(
    ada: Chromium, console: Console, colleague: AdminUser
) -> None:
    event = console.pages["live-0"]
    look(ada, console.pages["list"])
    assert ada.run(_TOP, key(event)) is not None
    ada.run("document.querySelector('#result_list').same = true")
    discard(colleague, event)
    ada.until(lambda: ada.run(_TOP, key(event)) is None, "the event leaves the list")
    assert ada.run("return document.querySelector('#result_list').same")
    # The rows that came up can be selected, and Django's script counts them.
    ada.find("#action-toggle").click()
    chosen = len(ada.all("input.action-select:checked"))
    assert chosen == len(ada.all("input.action-select"))
    assert ada.find(".action-counter").text.startswith(f"{chosen} of {chosen} ")
    assert not ada.complaints()


def test_a_selection_is_not_lost(ada: Chromium, console: Console, colleague: AdminUser) -> None:
    event, other = console.pages["live-1"], console.pages["live-2"]
    look(ada, console.pages["list"])
    box = ada.find(f"input.action-select[value='{key(event)}']")
    box.click()
    discard(colleague, other)
    note = ada.find(".ae-live span")
    ada.until(note.is_displayed, "the note that updates wait")
    assert box.is_selected()
    assert ada.run(_TOP, key(other)) is not None
    box.click()
    ada.run("document.activeElement.blur()")
    ada.until(lambda: ada.run(_TOP, key(other)) is None, "the update")
    assert not note.is_displayed()


def test_what_is_read_stays_in_its_place(
    ada: Chromium, console: Console, colleague: AdminUser
) -> None:
    # The one that failed last is listed first.
    above, read = console.pages["live-4"], console.pages["live-3"]
    look(ada, console.pages["list"])
    before, after = ada.run(_TOP, key(above)), ada.run(_TOP, key(read))
    assert before < after
    ada.run("scrollTo(0, arguments[0])", after - 20)
    top = ada.run(_TOP, key(read))
    assert ada.run(_TOP, key(above)) < 0
    discard(colleague, above)
    ada.until(lambda: ada.run(_TOP, key(above)) is None, "the event above leaves the list")
    assert abs(ada.run(_TOP, key(read)) - top) < 2


def test_updates_can_be_paused(ada: Chromium, console: Console, colleague: AdminUser) -> None:
    event = console.pages["live-5"]
    look(ada, console.pages["list"])
    button = ada.find(".ae-live button")
    button.click()
    assert button.text == "Resume updates"
    discard(colleague, event)
    ada.until(lambda: int(ada.find(".ae-live time").text.split()[0]) > 3, "nothing is fetched")
    assert ada.run(_TOP, key(event)) is not None
    button.click()
    ada.until(lambda: ada.run(_TOP, key(event)) is None, "the update")
    assert button.text == "Pause updates"


def test_a_batch_shows_its_state_by_itself(
    ada: Chromium, console: Console, colleague: AdminUser
) -> None:
    url = console.pages["batch-running"]
    look(ada, url)
    assert "Refresh every" not in ada.find("#content").text
    press(colleague, url, "Pause")
    try:
        ada.until(lambda: ada.all(".ae-state.ae-batch-paused"), "the batch is paused")
        assert ada.all(".ae-actions input[value=Resume]")
    finally:
        press(colleague, url, "Resume")
    ada.until(lambda: ada.all(".ae-state.ae-batch-running"), "the batch runs")
    assert not ada.complaints()


def press(colleague: AdminUser, url: str, button: str) -> None:
    page = colleague.open(url)
    (form,) = [
        each for each in page.forms if each.xpath(f".//input[@type='submit'][@value='{button}']")
    ]
    colleague.submit(form, {})


def test_the_message_of_an_action_is_left_to_its_page(
    ada: Chromium, console: Console, colleague: AdminUser
) -> None:
    """A live page of the same session fetches before the page that is to show the message."""
    event = console.pages["live-6"]
    (link,) = colleague.open(event).xpath("//a[contains(@class, 'ae-button-discard')]/@href")
    look(ada, console.pages["list"])
    ada.run(
        "window.answer = null;"
        "fetch(arguments[0], {redirect: 'manual'}).then((answer) => answer.text()).then((text) => {"
        " const page = new DOMParser().parseFromString(text, 'text/html');"
        " const form = new FormData(page.querySelector('#content form'));"
        " form.set('reason', 'placed twice');"
        " return fetch(arguments[0].split('?')[0],"
        "  {method: 'POST', body: new URLSearchParams(form), redirect: 'manual'});"
        "}).then((answer) => { window.answer = answer.type; })",
        link,
    )
    ada.until(lambda: ada.run("return window.answer") == "opaqueredirect", "the redirect")
    ada.until(lambda: ada.run(_TOP, key(event)) is None, "the list fetches")
    ada.open(console.pages["list"])
    assert "1 event discarded" in ada.find("ul.messagelist").text


def test_the_page_works_where_a_policy_forbids_to_fetch(ada: Chromium, console: Console) -> None:
    look(ada, console.pages["batch-running"])
    ada.run(
        "const meta = document.createElement('meta');"
        "meta.httpEquiv = 'Content-Security-Policy'; meta.content = \"connect-src 'none'\";"
        "document.head.append(meta)"
    )
    ada.until(lambda: not ada.all(".ae-live"), "the script gives up")
    assert ada.link("Refresh every").is_displayed()
    ada.complaints()

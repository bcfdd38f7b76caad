"""Pages refresh what has no controls, and say when another part has changed."""

from __future__ import annotations

import pytest

from chromium import Chromium
from example_project.demo.admin_user import AdminUser

from .console import Console


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
    browser.run("document.querySelector('.ae-live').dataset.seconds = 1")


def discard(colleague: AdminUser, page: str) -> None:
    (link,) = colleague.open(page).xpath("//a[contains(@class, 'ae-button-discard')]/@href")
    (form,) = [each for each in colleague.open(link).forms if "reason" in each.fields]
    colleague.submit(form, {"reason": "placed twice"})


def key(page: str) -> str:
    """Return the id of an event from the address of its page."""
    return page.rstrip("/").split("/")[-2]


def test_a_list_says_that_it_has_changed(
    ada: Chromium, console: Console, colleague: AdminUser
) -> None:
    event = console.pages["live-0"]
    look(ada, console.pages["list"])
    line = ada.find(".ae-changed")
    assert not line.is_displayed()
    box = ada.find(f"input.action-select[value='{key(event)}']")
    box.click()
    discard(colleague, event)
    ada.until(line.is_displayed, "the line that it has changed")
    assert box.is_selected()
    ada.leave_by(ada.find(".ae-changed a"))
    assert not ada.all(f"input.action-select[value='{key(event)}']")
    assert not ada.complaints()


def test_the_dashboard_refreshes_until_it_is_paused(
    ada: Chromium, console: Console, colleague: AdminUser
) -> None:
    look(ada, console.pages["dashboard"])
    button, line = ada.find(".ae-live button"), ada.find(".ae-changed")
    number = open_events(ada)
    discard(colleague, console.pages["live-1"])
    ada.until(lambda: open_events(ada) == number - 1, "the number of open events")
    # What has the focus is not replaced, and the line says so.
    button.click()
    assert button.text == "Resume updates"
    discard(colleague, console.pages["live-2"])
    ada.run("document.querySelector('#ae-live-tiles a').focus()")
    assert not line.is_displayed()
    ada.run("arguments[0].click()", button)
    ada.until(line.is_displayed, "the line that it has changed")
    assert open_events(ada) == number - 1
    ada.run("document.activeElement.blur()")
    ada.until(lambda: open_events(ada) == number - 2, "the update")
    assert not ada.complaints()


def open_events(browser: Chromium) -> int:
    return int(browser.find("#ae-live-tiles a").text)


def test_the_buttons_of_a_batch_stay_as_they_were_seen(
    ada: Chromium, console: Console, colleague: AdminUser
) -> None:
    url = console.pages["batch-running"]
    look(ada, url)
    press(colleague, url, "Pause")
    try:
        ada.until(ada.find(".ae-changed").is_displayed, "the line that it has changed")
        assert ada.all(".ae-actions input[value=Pause]")
        assert "Paused" in ada.find("#ae-live-steps").text.title()
        ada.leave_by(ada.find(".ae-changed a"))
        assert ada.all(".ae-actions input[value=Resume]")
    finally:
        press(colleague, url, "Resume")
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
    ada.until(ada.find(".ae-changed").is_displayed, "the list fetches")
    ada.open(console.pages["list"])
    assert "1 event discarded" in ada.find("ul.messagelist").text

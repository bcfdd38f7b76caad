"""Every page of the console in a browser: its policy, its width, and what axe-core finds."""

from __future__ import annotations

from typing import Any

import pytest
from selenium.webdriver import ActionChains, Keys

from chromium import Chromium

from .console import PAGES, Console, go

#: Django's own, on each of its pages: not ours to fix.
CHROME = {
    "#changelist-search": "its label is a picture's alternative text",
    "div.breadcrumbs": "links in a text, told apart by their colour; ours is a list",
}

_AXE = """
const done = arguments[arguments.length - 1];
const [exclude, rules, within] = arguments;
axe.run(within ? within : {exclude: exclude.map((css) => [css])}, {
  resultTypes: ["violations"],
  preload: false,  // it would fetch style sheets, which the policy forbids
  ...(rules ? {runOnly: {type: "rule", values: rules}} : {}),
}).then((found) => done(found.violations), (error) => done([{id: String(error), nodes: []}]));
"""


def violations(browser: Chromium, axe: str, *rules: str, within: str = "") -> list[str]:
    """Return axe-core's serious and critical findings on the current page."""
    if not browser.run("return !!window.axe"):
        browser.run(axe)
    # Colours fade into each other, and are looked at when they have.
    browser.until(lambda: browser.run("return !document.getAnimations().length"), "no more change")
    found: list[dict[str, Any]] = browser.driver.execute_async_script(
        _AXE, list(CHROME), list(rules) or None, within
    )
    return [
        f"{each['id']} ({each.get('impact')}): {node['html'][:200]} at {node['target']}: "
        f"{node.get('failureSummary', '')}"
        for each in found
        for node in each["nodes"] or [{"html": "", "target": ""}]
        if each.get("impact") not in ("minor", "moderate")
    ]


@pytest.fixture(scope="module", autouse=True)
def logged_in(window: Chromium, console: Console) -> None:
    window.forget()
    window.complaints()  # of an earlier module's page, whose server has ended
    window.log_in(console.url, console.session)


@pytest.mark.parametrize("name", PAGES)
def test_a_page(window: Chromium, console: Console, axe: str, name: str) -> None:
    """Light and dark, wide and narrow: neither changes what the other one does."""
    found: list[str] = []
    for width, theme in ((1280, "light"), (390, "dark")):
        window.look(theme, width)
        go(window, console, name)
        found += window.complaints()
        if (wide := window.run(_WIDTH)) > 0:
            found.append(f"{width}: {wide} pixels too wide: {window.run(_TOO_WIDE, width)}")
        found += [f"{width}, {theme}: {each}" for each in violations(window, axe)]
        other = "dark" if theme == "light" else "light"
        window.look(other, width)
        found += [f"{width}, {other}: {one}" for one in violations(window, axe, "color-contrast")]
    assert not found, "\n".join(found)


#: By how much the page, or its list, is wider than its place.
_WIDTH = """
return Math.max(...[document.documentElement, document.querySelector("#changelist .results")]
  .map((each) => each ? each.scrollWidth - each.clientWidth : 0));
"""
_TOO_WIDE = """
return [...document.querySelectorAll("body *")]
  .filter((each) => each.getBoundingClientRect().right > arguments[0])
  .slice(0, 5).map((each) => each.outerHTML.slice(0, 100));
"""


# -- the keyboard ---------------------------------------------------------------------------------

#: Pages and actions: a word of each button or link.
ACTIONS = {
    "event": ("Replay…", "Discard…", "Edit and replay…", "Download the raw body"),
    "overdue": ("Force", "Mark as resolved"),
    "confirm": ("Replay 4 events", "Cancel"),
    "edit": ("Preview changes", "Cancel"),
    "review": ("Replay with this payload", "Continue editing", "Cancel"),
    "group": ("Replay all in the background…", "Save"),
    "batch-draft": ("Refresh", "Start in the background", "Cancel", "Delete draft"),
    "batch-running": ("Pause updates", "Pause", "Cancel batch"),
    "batch-paused": ("Resume", "Cancel batch"),
    "dashboard": ("Topology", "Find", "As a table"),
    "outbox-discard": ("Discard", "Cancel"),
}  # fmt: skip

_FOCUSED = """
const each = document.activeElement;
const style = getComputedStyle(each);
return {
  words: (each.value && each.tagName === "INPUT" ? each.value : each.textContent).trim(),
  html: each.outerHTML.slice(0, 200),
  ours: !!each.closest(".ae-page, .ae-tabs, .ae-breadcrumbs"),
  seen: (style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0)
    || style.boxShadow !== "none",
  body: each === document.body,
};
"""


def press(browser: Chromium, *keys: str) -> None:
    ActionChains(browser.driver).send_keys(*keys).perform()


def walk(browser: Chromium, limit: int = 250) -> list[dict[str, Any]]:
    """Press Tab from the beginning of the page to its end; returns what had the focus."""
    seen: list[dict[str, Any]] = []
    for _ in range(limit):
        press(browser, Keys.TAB)
        found = browser.run(_FOCUSED)
        if found["body"] or (seen and found == seen[0]):
            return seen
        seen.append(found)
    raise AssertionError(f"no end after {limit} steps: {seen[-5:]}")


@pytest.mark.parametrize("name", ACTIONS)
def test_everything_is_reached_and_seen_by_keyboard(
    window: Chromium, console: Console, name: str
) -> None:
    window.look("light", 1280)
    go(window, console, name)
    # From our own part on: what is before it is Django's.
    window.run(
        "const at = document.querySelector('#content-start, #content');at.tabIndex = -1; at.focus()"
    )
    found = [each for each in walk(window) if each["ours"]]
    words = [each["words"] for each in found]
    missing = [word for word in ACTIONS[name] if not any(word in each for each in words)]
    assert not missing, words
    assert not [each["html"] for each in found if not each["seen"]]


def test_an_event_is_discarded_without_a_mouse(window: Chromium, console: Console) -> None:
    """Use the page with the keyboard only."""
    window.look("light", 1280)
    go(window, console, "spare")
    tab_to(window, "Discard…")
    press(window, Keys.ENTER)
    window.until(lambda: window.all("#id_reason"), "a page that asks why")
    window.run("document.querySelector('#content-start').focus()")
    while window.run("return document.activeElement.id") != "id_reason":
        press(window, Keys.TAB)
    press(window, "it was placed twice")
    tab_to(window, "Discard")
    press(window, Keys.ENTER)
    window.until(lambda: window.all("ul.messagelist"), "what came of it")
    assert "1 event discarded" in window.find("ul.messagelist").text


def tab_to(browser: Chromium, words: str) -> None:
    for _ in range(250):
        press(browser, Keys.TAB)
        if browser.run(_FOCUSED)["words"].startswith(words):
            return
    raise AssertionError(f"no Tab leads to {words!r}")

"""Every page of the console in a browser: its policy, its width, and what axe-core finds."""

from __future__ import annotations

from typing import Any

import pytest

from chromium import Chromium

from .console import PAGES, Console, go

#: Django's own, and the same on each of its pages: not ours to mend.
CHROME = {
    "#changelist-search": "its label is a picture's alternative text",
    "div.breadcrumbs": "links in a text, told apart by their colour; ours is a list",
}

_AXE = """
const done = arguments[arguments.length - 1];
const [exclude, rules] = arguments;
axe.run({exclude: exclude.map((css) => [css])}, {
  resultTypes: ["violations"],
  preload: false,  // it would fetch style sheets, which the policy forbids
  ...(rules ? {runOnly: {type: "rule", values: rules}} : {}),
}).then((found) => done(found.violations), (error) => done([{id: String(error), nodes: []}]));
"""


def violations(browser: Chromium, axe: str, *rules: str) -> list[str]:
    """What axe-core finds on the page as it is now, serious or critical."""
    if not browser.run("return !!window.axe"):
        browser.run(axe)
    # Colours fade into each other, and are looked at when they have.
    browser.until(lambda: browser.run("return !document.getAnimations().length"), "no more change")
    found: list[dict[str, Any]] = browser.driver.execute_async_script(
        _AXE, list(CHROME), list(rules) or None
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
    window.log_in(console.url, console.session)


@pytest.mark.parametrize("name", PAGES)
def test_a_page(window: Chromium, console: Console, axe: str, name: str) -> None:
    """Light and dark, wide and narrow: neither changes what the other one does."""
    found: list[str] = []
    for width, theme in ((1280, "light"), (390, "dark")):
        window.look(theme, width)
        go(window, console, name)
        found += window.complaints()
        wide = window.run("return document.documentElement.scrollWidth")
        if wide > width:
            found.append(f"{width}: it is {wide} pixels wide: {window.run(_TOO_WIDE, width)}")
        found += [f"{width}, {theme}: {each}" for each in violations(window, axe)]
        if theme == "light":
            window.look("dark", width)
            found += [f"{width}, dark: {one}" for one in violations(window, axe, "color-contrast")]
    assert not found, "\n".join(found)


_TOO_WIDE = """
return [...document.querySelectorAll("body *")]
  .filter((each) => each.getBoundingClientRect().right > arguments[0])
  .slice(0, 5).map((each) => each.outerHTML.slice(0, 100));
"""

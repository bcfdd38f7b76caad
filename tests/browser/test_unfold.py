"""The admin in a project with django-unfold: its pages exist and are readable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from broker import Broker
from chromium import Chromium
from tests.conftest import _vhost

from .console import Console, go, serving
from .test_pages import violations

#: One of each kind; all others are of the same templates.
SHOWN = ("dashboard", "list", "event", "confirm", "group", "batch-draft", "review", "result")


@pytest.fixture(scope="module")
def unfold(rabbit: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    where: Path = tmp_path_factory.mktemp("unfold")
    with (
        _vhost(rabbit, "unfold") as vhost,
        serving(vhost.url, vhost.management_url, where, "unfold") as served,
    ):
        yield served


def test_all_pages_exist(unfold: Console) -> None:
    for name, url in unfold.pages.items():
        request = Request(url, headers={"Cookie": f"sessionid={unfold.session}"})  # noqa: S310
        with urlopen(request, timeout=30) as answer:  # noqa: S310 - our own
            html = answer.read().decode()
        assert 'x-bind="themeBindings"' in html, f"{name} is not unfold's"
        assert "ae-page" in html or 'id="changelist"' in html, name


@pytest.mark.parametrize("name", SHOWN)
def test_a_page_can_be_read(browser: Chromium, unfold: Console, axe: str, name: str) -> None:
    """Texts and buttons, light and dark, of what is ours."""
    browser.log_in(unfold.url, unfold.session)
    found: list[str] = []
    for theme, width in (("light", 1280), ("dark", 390)):
        browser.look(theme, width)
        go(browser, unfold, name)
        assert not browser.complaints()
        within = ".ae-page" if browser.all(".ae-page") else "#result_list tbody"
        found += violations(browser, axe, "color-contrast", "link-in-text-block", within=within)
        assert browser.run("return document.documentElement.scrollWidth") <= width
        plain = browser.run(
            "return [...document.querySelectorAll('.ae-page .button, .ae-page [type=submit]')]"
            ".filter((each) => getComputedStyle(each).backgroundColor === 'rgba(0, 0, 0, 0)')"
            ".map((each) => each.outerHTML)"
        )
        assert not plain, "buttons that do not look like buttons"
    assert not found, "\n".join(found)

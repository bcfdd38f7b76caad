"""The console on a site of a project's own: every link and every redirect stays on it."""

from __future__ import annotations

import re
from dataclasses import replace
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest

from chromium import Chromium
from example_project.demo.admin_user import parse

from .console import Console

#: Of each of these pages one is enough: their addresses differ in an id or a filter.
_SAME = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}|=[^&]*")


@pytest.fixture
def ops(console: Console) -> Console:
    """The console on ``AdminSite(name="ops")``, in a project that has it on Django's own too."""
    pages = {name: url.replace("/admin/", "/ops/") for name, url in console.pages.items()}
    return replace(console, pages=pages)


def get(ops: Console, url: str) -> tuple[str, str, str]:
    """Return where that led, what it is, and what it says."""
    request = Request(url, headers={"Cookie": f"sessionid={ops.session}"})  # noqa: S310 - our own
    with urlopen(request, timeout=30) as answer:  # noqa: S310
        kind = answer.headers.get_content_type()
        return answer.url, kind, answer.read().decode() if kind == "text/html" else ""


def test_all_links_stay_on_the_site(ops: Console) -> None:
    ours = f"{ops.url}/ops/"
    waiting = list(ops.pages.values())
    seen: dict[str, str] = {}
    while waiting:
        url = waiting.pop()
        key = _SAME.sub("-", url)
        if key in seen:
            continue
        seen[key] = url
        there, kind, html = get(ops, url)
        assert there.startswith(ours), f"{url} leads to {there}"
        if kind != "text/html":
            continue
        page = parse(there, html)
        links = [href for each in page.iter("a") if (href := each.get("href"))]
        for link in links + [form.action or there for form in page.forms]:
            if urlsplit(link).netloc != urlsplit(ops.url).netloc or link.startswith(
                f"{ops.url}/static/"
            ):
                assert "tickets.example" in link or "/static/" in link, f"{url} links to {link}"
                continue
            if link == f"{ops.url}/":  # Django's "View site"
                continue
            assert link.startswith(ours), f"{url} links to {link}"
        # Django's own pages are asked for nothing; a log-out or a password are nothing to follow.
        waiting += [
            link.partition("#")[0]
            for link in links
            # One filter at a time.
            if link.startswith(f"{ours}django_amqp_events/") and link.count("&") == 0
        ]
    models = {urlsplit(url).path.split("/")[3] for url in seen.values() if url.count("/") > 5}
    assert models >= {
        "archivedevent", "dashboard", "failuregroup", "outboxevent", "replaybatch",
    }, models  # fmt: skip
    assert len(seen) > 40, sorted(seen)


@pytest.mark.parametrize(
    ("name", "button"),
    [
        ("discard-spare", "Discard"),
        ("batch-draft", "Refresh"),
        ("group", "Save"),
    ],
)
def test_forms_return_to_their_site(
    browser: Chromium, ops: Console, name: str, button: str
) -> None:
    browser.log_in(ops.url, ops.session)
    browser.open(ops.pages[name])
    if browser.all("#id_reason"):
        browser.find("#id_reason").send_keys("placed twice")
    browser.leave_by(browser.find(f"#content input[type=submit][value^='{button}']"))
    assert urlsplit(browser.driver.current_url).path.startswith("/ops/django_amqp_events/")
    assert browser.find("#content").text
    assert not browser.complaints()


def test_anonymous_user_is_sent_to_the_sites_login(browser: Chromium, ops: Console) -> None:
    browser.open(ops.pages["event"])
    assert urlsplit(browser.driver.current_url).path == "/ops/login/"

"""A user of the admin: over HTTP, with cookies, by the forms and links of its pages."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode, urljoin, urlsplit

import lxml.html

from .processes import DemoError

#: Seconds to wait for an answer.
TIMEOUT = 60.0
#: The longest list that the user pages through.
PAGES = 50
SUBMIT = ".//button[not(@type) or @type='submit'] | .//input[@type='submit']"


class AdminUser:
    """A browser session. Pages and forms are elements of lxml.

    Args:
        address: of the service, ``http://host:port``.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._browser = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),  # this machine needs no proxy
            urllib.request.HTTPCookieProcessor(),
        )

    def open(self, url: str, data: Sequence[tuple[str, str | list[str]]] | None = None) -> Any:
        """Get a page, or post to it.

        Raises:
            DemoError: there is no answer, or an error.
        """
        url = urljoin(self.address, url)
        body = None if data is None else urlencode(data, doseq=True).encode()
        request = urllib.request.Request(url, body, {"Referer": url})  # noqa: S310 - ours
        try:
            with self._browser.open(request, timeout=TIMEOUT) as answer:
                return parse(answer.url, answer.read().decode())
        except urllib.error.HTTPError as exc:
            with exc:
                title = _title(parse(url, exc.read().decode(errors="replace")))
            raise DemoError(f"{url} answers {exc.code} {exc.reason}: {title}") from exc
        except (OSError, http.client.HTTPException) as exc:
            raise DemoError(f"{url} does not answer: {exc}") from exc

    def submit(self, form: Any, filled: Mapping[str, str | list[str]]) -> Any:
        """Fill in a form and press its first button."""
        data = [(name, value) for name, value in form.form_values() if name not in filled]
        data += filled.items()
        button = form.xpath(SUBMIT)[0]
        if name := button.get("name"):
            data.append((name, button.get("value", "")))
        return self.open(form.action or form.base_url, data)

    def log_in(self, name: str, password: str) -> Any:
        """Log in to the admin and return its first page."""
        form = _form(self.open("/admin/"), "password")
        page = self.submit(form, {"username": name, "password": password})
        if any("password" in form.fields for form in page.forms):
            raise DemoError(f"Login failed at {self.address}: {_said(page)}")
        return page

    def replay_everything(self, page: Any, reason: str) -> list[str]:
        """Open the archived events, select all and replay each once; return the admin's messages.

        Raises:
            DemoError: a page lacks a form or link.
        """
        messages: list[str] = []
        known: set[str] = set()
        for _ in range(PAGES):
            page = self.open(_link(page, lambda url, _: url.endswith("/archivedevent/")))
            page = self.open(_link(page, _filters_archived))
            boxes = page.xpath("//input[@name='_selected_action']/@value")
            # An event that failed again is in the list again.
            chosen = [str(value) for value in boxes if value not in known]
            if not chosen:
                return messages
            known.update(chosen)
            form = _form(page, "_selected_action")
            actions = form.inputs["action"].value_options
            action = next(name for name in actions if name.startswith("replay"))
            page = self.submit(form, {"action": action, "_selected_action": chosen})
            page = self.submit(_form(page, "reason"), {"reason": reason})
            messages += [
                _text(item) for each in page.find_class("messagelist") for item in each.iter("li")
            ]
        raise DemoError(f"{page.base_url} lists archived events without end: {messages[-1:]}")


def answers(address: str) -> bool:
    """Return True if the admin at *address* shows its login form."""
    try:
        return bool(AdminUser(address).open("/admin/login/").forms)
    except DemoError:
        return False


def parse(url: str, html: str) -> Any:
    """Return the page at *url*, with absolute links."""
    page = lxml.html.document_fromstring(html or "<p>", base_url=url)
    page.make_links_absolute()
    return page


def _filters_archived(url: str, text: str) -> bool:
    return "state" in urlsplit(url).query and text.lower().startswith("archived")


def _form(page: Any, name: str) -> Any:
    """Return the form with a field of this name."""
    found = next((form for form in page.forms if name in form.fields), None)
    if found is None:
        raise DemoError(
            f"{page.base_url} ({_title(page)}) has no form with a field {name!r}. {_said(page)}"
        )
    return found


def _link(page: Any, matches: Callable[[str, str], bool]) -> str:
    links = ((each.get("href", ""), _text(each)) for each in page.iter("a"))
    found = next((url for url, text in links if matches(url, text)), None)
    if found is None:
        raise DemoError(f"{page.base_url} ({_title(page)}) has no link to the archived events.")
    return str(found)


def _said(page: Any) -> str:
    """Return the errors and messages of a page."""
    names = ("errornote", "errorlist", "messagelist")
    return " ".join(_text(each) for name in names for each in page.find_class(name))


def _title(page: Any) -> str:
    return page.findtext(".//title") or ""


def _text(element: Any) -> str:
    return " ".join(element.text_content().split())

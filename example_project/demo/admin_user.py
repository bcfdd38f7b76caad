"""A user of the admin: over HTTP, with cookies, by the forms and links of its pages."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from urllib.parse import urlencode, urljoin, urlsplit
from xml.etree.ElementTree import Element

from .html_forms import Form, Page
from .processes import DemoError

#: Seconds to wait for an answer.
TIMEOUT = 60.0
#: The longest list that the user pages through.
PAGES = 50


class AdminUser:
    """A browser session.

    Args:
        address: of the service, ``http://host:port``.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._browser = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),  # this machine needs no proxy
            urllib.request.HTTPCookieProcessor(),
        )

    def open(self, url: str, data: list[tuple[str, str]] | None = None) -> Page:
        """Get a page, or post to it.

        Raises:
            DemoError: there is no answer, or an error.
        """
        url = urljoin(self.address, url)
        body = None if data is None else urlencode(data).encode()
        request = urllib.request.Request(url, body, {"Referer": url})  # noqa: S310 - ours
        try:
            with self._browser.open(request, timeout=TIMEOUT) as answer:
                return Page(answer.url, answer.read().decode())
        except urllib.error.HTTPError as exc:
            with exc:
                title = Page(url, exc.read().decode(errors="replace")).title
            raise DemoError(f"{url} answers {exc.code} {exc.reason}: {title}") from exc
        except (OSError, http.client.HTTPException) as exc:
            raise DemoError(f"{url} does not answer: {exc}") from exc

    def submit(self, form: Form, filled: Mapping[str, str | list[str]], button: Element) -> Page:
        return self.open(form.action, form.data(filled, button))

    def log_in(self, name: str, password: str) -> Page:
        """Log in to the admin and return its first page."""
        page = self.open("/admin/")
        form = _form(page, "login form", lambda form: form.named("password"))
        page = self.submit(form, {"username": name, "password": password}, form.buttons[0])
        if any(form.named("password") for form in page.forms):
            raise DemoError(f"Login failed at {self.address}: {' '.join(page.errors)}")
        return page

    def replay_everything(self, page: Page, reason: str) -> list[str]:
        """Open the archived events, select all and replay each once; return the admin's messages.

        Raises:
            DemoError: a page lacks a form or link.
        """
        messages: list[str] = []
        known: set[str] = set()
        for _ in range(PAGES):
            page = self.open(_link(page, lambda url, _: url.endswith("/archivedevent/")))
            page = self.open(_link(page, _filters_archived))
            form = next((form for form in page.forms if form.named("_selected_action")), None)
            boxes = form.named("_selected_action") if form is not None else []
            # An event that failed again is in the list again.
            chosen = [value for box in boxes if (value := box.get("value", "")) not in known]
            if form is None or not chosen:
                return messages
            known.update(chosen)
            action = next(name for name in form.options("action") if name.startswith("replay"))
            page = self.submit(
                form, {"action": action, "_selected_action": chosen}, form.buttons[0]
            )
            form = _form(
                page,
                "confirmation",
                lambda form: form.method == "post" and form.named("reason"),
            )
            page = self.submit(form, {"reason": reason}, form.buttons[0])
            messages += page.messages
        raise DemoError(f"{page.url} lists archived events without end: {messages[-1:]}")


def answers(address: str) -> bool:
    """Return True if the admin at *address* shows its login form."""
    try:
        return bool(AdminUser(address).open("/admin/login/").forms)
    except DemoError:
        return False


def _filters_archived(url: str, text: str) -> bool:
    return "state" in urlsplit(url).query and text.lower().startswith("archived")


def _form(page: Page, what: str, matches: Callable[[Form], object]) -> Form:
    found = next((form for form in page.forms if matches(form)), None)
    if found is None:
        said = "; ".join([*page.errors, *page.messages])
        raise DemoError(f"{page.url} ({page.title}) has no {what}. {said}")
    return found


def _link(page: Page, matches: Callable[[str, str], bool]) -> str:
    found = next((url for url, text in page.links if matches(url, text)), None)
    if found is None:
        raise DemoError(f"{page.url} ({page.title}) has no link to the archived events.")
    return found

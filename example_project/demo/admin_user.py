"""A person at an admin: over HTTP, with cookies, by the forms and links that its pages show."""

from __future__ import annotations

import http.client
import http.cookiejar
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from urllib.parse import urlencode, urljoin, urlsplit

from .html_forms import Element, Form, Page
from .processes import DemoError

#: Seconds for an answer.
TIMEOUT = 60.0
#: More pages of one list than this are none that a person would go through.
PAGES = 50


class AdminUser:
    """Somebody with a browser.

    Args:
        address: where the service answers, ``http://host:port``.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._browser = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),  # it is this machine, whatever the environment says
            urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()),
        )

    def open(self, url: str, data: list[tuple[str, str]] | None = None) -> Page:
        """Get a page, or post to it.

        Raises:
            DemoError: it does not answer, or with an error.
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

    def submit(
        self,
        form: Form,
        filled: Mapping[str, str | list[str]] | None = None,
        *,
        button: Element | None = None,
    ) -> Page:
        data = form.data(filled or {}, button)
        if form.method == "post":
            return self.open(form.action, data)
        return self.open(urlsplit(form.action)._replace(query=urlencode(data)).geturl())

    def log_in(self, name: str, password: str) -> Page:
        """Log in to the admin and return its first page."""
        page = self.open("/admin/")
        form = _form(page, lambda form: form.named("password"), "form to log in with")
        page = self.submit(form, {"username": name, "password": password})
        if any(form.named("password") for form in page.forms):
            raise DemoError(f"no login at {self.address}: {' '.join(page.errors)}")
        return page

    def replay_everything(self, page: Page, reason: str) -> list[str]:
        """Go from the first page to the archived events, select all and replay them, once each.

        Returns:
            what the admin said about it.

        Raises:
            DemoError: a page is not what it should be.
        """
        said: list[str] = []
        known: set[str] = set()
        for _ in range(PAGES):
            page = self._archived(page)
            listed = next((form for form in page.forms if form.named("_selected_action")), None)
            boxes = listed.named("_selected_action") if listed is not None else []
            # Those that failed again meanwhile are there again.
            chosen = [value for box in boxes if (value := box.get("value")) not in known]
            if listed is None or not chosen:
                return said
            known.update(chosen)
            page = self._confirm(self._choose(page, listed, chosen), reason)
            said += page.messages
        raise DemoError(f"there is no end of archived events at {page.url}: {said[-1:]}")

    def _archived(self, page: Page) -> Page:
        """The list, and of it what its filter calls archived."""
        page = self.open(
            _link(page, lambda url, _: url.endswith("/archivedevent/"), "the archived events")
        )
        return self.open(_link(page, _shows_archived, "the filter for those that are archived"))

    def _choose(self, page: Page, listed: Form, boxes: list[str]) -> Page:
        actions = listed.options("action")
        replay = [value for value in actions if value.startswith("replay")]
        if len(replay) != 1:
            raise DemoError(f"one action of {page.url} should replay, of {actions}")
        filled: dict[str, str | list[str]] = {"action": replay[0], "_selected_action": boxes}
        return self.submit(listed, filled, button=next(iter(listed.buttons), None))

    def _confirm(self, page: Page, reason: str) -> Page:
        form = _form(
            page,
            lambda form: form.method == "post" and form.named("reason"),
            "confirmation to replay",
        )
        return self.submit(form, {"reason": reason}, button=next(iter(form.buttons), None))


def answers(address: str) -> bool:
    """Whether an admin can be logged in to there."""
    try:
        return bool(AdminUser(address).open("/admin/login/").forms)
    except DemoError:
        return False


def _shows_archived(url: str, text: str) -> bool:
    return "state" in urlsplit(url).query and text.lower().startswith("archived")


def _form(page: Page, fits: Callable[[Form], object], what: str) -> Form:
    found = next((form for form in page.forms if fits(form)), None)
    if found is None:
        raise DemoError(_missing(page, what))
    return found


def _link(page: Page, fits: Callable[[str, str], bool], what: str) -> str:
    found = next((url for url, text in page.links if fits(url, text)), None)
    if found is None:
        raise DemoError(_missing(page, f"link to {what}"))
    return found


def _missing(page: Page, what: str) -> str:
    said = "; ".join([*page.errors, *page.messages])
    return f"there is no {what} on {page.url} ({page.title}){': ' + said if said else ''}"

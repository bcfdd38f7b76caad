"""A Django project with the admin, and archived events of every kind: what the admin's tests need.

Addresses: ``/admin/`` is the default site, ``/office/`` one of a project's own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from typing import Any
from uuid import UUID, uuid4

from django.contrib import admin, messages
from django.contrib.auth.models import Permission, User
from django.db.models import Model
from django.test import Client
from django.urls import path, reverse

from django_amqp_events.admin import (
    ArchivedEventAdmin,
    DashboardAdmin,
    FailureGroupAdmin,
    OutboxEventAdmin,
)
from django_amqp_events.admin.action_pages import encode_selection
from django_amqp_events.archive.groups import failure_groups
from django_amqp_events.models import (
    ArchivedEvent,
    Dashboard,
    FailureGroup,
    OutboxEvent,
    Replay,
    State,
)
from tests import archive_rows
from tests.services import BILLING
from tests.web_settings import WEB

office = admin.AdminSite(name="office")
office.register(ArchivedEvent, ArchivedEventAdmin)
office.register(Dashboard, DashboardAdmin)
office.register(FailureGroup, FailureGroupAdmin)
office.register(OutboxEvent, OutboxEventAdmin)

urlpatterns = [path("admin/", admin.site.urls), path("office/", office.urls)]

SETTINGS: dict[str, Any] = {
    "ROOT_URLCONF": __name__,
    **{name: WEB[name] for name in ("STATIC_URL", "PASSWORD_HASHERS", "MIDDLEWARE", "TEMPLATES")},
}
EVENTS = BILLING
LIST = "admin:django_amqp_events_archivedevent_changelist"
PERMISSIONS = ("view", "view_payload", "replay", "force", "discard", "restore")
DECISIONS = ("replay", "force", "resolve", "discard", "restore")
#: Decisions that the list offers.
LISTED = ("replay", "resolve", "discard", "restore")
#: Decisions whose permission is another one's.
RIGHTS = {"resolve": "discard"}
BEFORE = {
    "replay": State.ARCHIVED,
    "force": State.REPLAYING,
    "resolve": State.REPLAYING,
    "discard": State.ARCHIVED,
    "restore": State.DISCARDED,
}
TRACEBACK = """Traceback (most recent call last):
  File "/srv/billing/handlers.py", line 12, in send_invoice
    rate = tax.rate(country)
  File "/srv/.venv/lib/python3.11/site-packages/requests/api.py", line 59, in get
    return session.request(method="get")
  File "/srv/.venv/lib/python3.11/site-packages/requests/sessions.py", line 7, in request
    raise Refused
billing.errors.TaxError: there is no tax rate for 'XX'
"""


def document(**more: Any) -> dict[str, Any]:
    """The header event-archive as a worker writes it."""
    return {
        "reason": "exhausted",
        "exception": {
            "type": "billing.errors.TaxError",
            "message": "there is no tax rate for 'XX'\nask the tax office",
        },
        "traceback": TRACEBACK,
        "frames": [
            {
                "file": "/srv/billing/tax.py",
                "line": 28,
                "function": "rate",
                "module": "billing.tax",
            },
        ],
        "history": [
            {
                "attempt": number,
                "at": f"2026-03-01T12:00:0{number}.000000Z",
                "worker": f"celery@worker-{number}",
                "exception": "billing.errors.TaxError",
                "message": "there is no tax rate for 'XX'",
            }
            for number in (1, 2, 3)
        ],
        "deaths": [
            {
                "queue": "billing:delay.1s",
                "reason": "expired",
                "at": "2026-03-01T12:00:01.000000Z",
                "count": 2,
            }
        ],
        "cut": [],
        **more,
    }


def make(state: State = State.ARCHIVED, *, failure: Any = None, **more: Any) -> ArchivedEvent:
    """An archived event with its failure; *failure* is the document, whatever it is."""
    now = datetime.now(UTC)
    headers = more.pop("headers", {"traceparent": "00-1", "weight": 2})
    packed = headers if isinstance(headers, bytes) else ArchivedEvent.pack_headers(headers)
    row = archive_rows.make(
        state=state,
        **{
            "pk": uuid4(),
            "event_id": str(uuid4()),
            "correlation_id": "basket-5",
            "published_at": now - timedelta(hours=3),
            "first_failed_at": now - timedelta(hours=3),
            "last_failed_at": now - timedelta(hours=2),
            "mirrored_at": now - timedelta(hours=1),
            "state_since": now - timedelta(hours=1),
            "detail": "attempt 3 failed, and it was the last one",
            "exception": "billing.errors.TaxError",
            "message": "there is no tax rate for 'XX'",
            "location": "billing.tax:28 in rate",
            "attempts": 3,
            "body": b'[[], {"order_id": 7, "note": "Gr\xc3\xbc\xc3\x9fe"}, {}]',
            "headers_raw": packed,
            **more,
        },
    )
    written = document() if failure is None else failure
    archive_rows.add_failure(
        row,
        reason=row.reason,
        exception=row.exception,
        message=row.message,
        document=written if isinstance(written, str) else json.dumps(written),
    )
    return row


def grouped(*rows: ArchivedEvent) -> FailureGroup:
    """The group of events that were made without one."""
    failure_groups.rebuild()
    found = ArchivedEvent.objects.get(pk=rows[0].pk).group
    assert found is not None
    return found


def overdue(**more: Any) -> ArchivedEvent:
    """An event whose replay has not reported back for days."""
    row = make(
        State.REPLAYING, state_since=datetime.now(UTC) - timedelta(days=3), replays=1, **more
    )
    archive_rows.add_replay(row, state=Replay.State.PUBLISHED, published_at=row.state_since)
    return row


def staff(*codenames: str, name: str = "ada") -> User:
    """A staff user with only these permissions."""
    made = User.objects.create_user(name, password="secret", is_staff=True)
    made.user_permissions.set(Permission.objects.filter(codename__in=codenames))
    assert made.user_permissions.count() == len(codenames)
    return made


def user(*permissions: str, name: str = "ada", model: str = "archivedevent") -> User:
    return staff(*(f"{each}_{model}" for each in permissions), name=name)


def client_of(made: User, **options: Any) -> Client:
    found = Client(**options)
    found.force_login(made)
    return found


def url(name: str, *args: Any, site: str = "admin") -> str:
    return reverse(f"admin:django_amqp_events_archivedevent_{name}", args=args, current_app=site)


def frozen(*rows: ArchivedEvent) -> str:
    return encode_selection(archive_rows.seen(*rows))


def select(rows: Iterable[Model], action: str, **more: str) -> dict[str, Any]:
    """The form of the list as a browser posts it."""
    return {
        "action": f"{action}_selected",
        "_selected_action": [str(row.pk) for row in rows],
        "index": "0",
        "select_across": "0",
        **more,
    }


class Page(HTMLParser):
    """A page as a browser with a strict policy sees it, its input fields and links."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.violations: list[str] = []
        self.fields: dict[str, str] = {}
        self.links: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        # A name may wrap there, and is one word.
        self.feed(html.replace("<wbr>", ""))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        for name, value in attrs:
            if name == "style" or name.startswith("on"):
                self.violations.append(f"<{tag} {name}={value!r}>")
            if name in {"href", "src", "action"} and (value or "").strip().lower().startswith(
                ("javascript:", "data:", "http:", "//")
            ):
                self.violations.append(f"<{tag} {name}={value!r}>")
        if tag == "style":
            self.violations.append("<style>")
        is_inline = found.get("src") is None and found.get("type") != "application/json"
        if tag == "script" and is_inline:
            self.violations.append("<script> inline")
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        if tag == "input" and found.get("name"):
            self.fields[str(found["name"])] = found.get("value") or ""

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def page(response: Any) -> Page:
    """The page of a response, which passes a strict policy."""
    assert response.status_code == 200, response.status_code
    found = Page(response.content.decode())
    assert found.violations == []
    return found


def said(response: Any) -> list[str]:
    """The messages that the page after a redirect shows."""
    return [str(each) for each in messages.get_messages(response.wsgi_request)] or [
        str(each) for each in response.context["messages"]
    ]


def ids_in(response: Any) -> set[UUID]:
    """The rows of a list."""
    return {row.pk for row in response.context["cl"].result_list}

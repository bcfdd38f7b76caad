"""No value in a URL or form makes a page fail: each parameter and value, on each database.

URLs are those of the admin's own patterns. Parameters are the filters of a list, and whatever a
view reads, which a middleware records. A new page or filter needs no test of its own.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar
from urllib.parse import quote, urlencode

import pytest
from django.contrib import admin
from django.contrib.admin.views import main
from django.contrib.auth.models import User
from django.http import QueryDict
from django.test import Client, override_settings

from django_amqp_events.admin.action_pages import encode_selection
from django_amqp_events.models import FailureGroup, OutboxEvent, ReplayBatch
from tests.conftest import Database

from .admin_world import SETTINGS as WEB
from .admin_world import select
from .test_who_sees_what import SETTINGS, address_of, routes, world

#: As they stand in a URL or form.
VALUES = {
    "NUL": "a%00b",
    "no UTF-8, no order": "%FF%C3.999.-x.-0",
    "negative": "-1",
    "beyond 64 bits": "9" * 30,
    "too long for int()": "9" * 5_000,
    "too long for LIKE": "x" * 60_000,
    "before all times in UTC": "0001-01-01T00:00:00%2B14:00",
    "after all times in UTC": "9999-12-31T23:59:59-14:00",
    "infinity": "1e999",
    "surrogate, no UUID": "%7Burn:uuid:%ED%A0%800_%25*-%5C%27%22%3C%F3%B0%80%80%E2%80%AE%7D",
}
JSON = {
    "infinity": '{"order_id": 1e999}',
    "digits": '{"order_id": %s}' % ("9" * 5_000),
    "surrogates, NUL": r'{"order_id": "\ud800\u0000", "\udc00": 1}',
    "nesting": '{"order_id": %s' % ("[" * 100_000),
}
FORM = "application/x-www-form-urlencoded"
#: In this charset there are lone surrogates.
ESCAPES = "text/plain; charset=unicode_escape"
#: An event of a revision, as Django's own page finds it for a form.
RELATION = "app_label=django_amqp_events&model_name=revision&field_name=event"
#: Parameters that the same code reads on many pages: one has all values, each other page one.
COMMON = {
    "_changelist_filters", "pk__foo", "pk__in", "_popup", "_to_field",
    main.ALL_VAR, main.ERROR_FLAG, main.ORDER_VAR, main.PAGE_VAR,
}  # fmt: skip
#: What actions change, by model.
BEFORE: Mapping[str, dict[str, Any]] = {
    "archivedevent": {"state": "archived", "version": 0},
    "failuregroup": {"edits": 0},
    "outboxevent": {"discarded_at": None},
    "replaybatch": {"state": "draft"},
}


class Recorded(QueryDict):
    """The parameters of a request; :attr:`names` are those that its view has read."""

    names: ClassVar[set[str]] = set()

    def __getitem__(self, key: str) -> Any:
        self.names.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.names.add(str(key))
        return super().__contains__(key)

    def getlist(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return super().getlist(key, default)


def recorder(get_response: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def answer(request: Any) -> Any:
        found = Recorded(mutable=True)
        found.update(getattr(request, request.method))
        setattr(request, request.method, found)
        Recorded.names.clear()
        return get_response(request)

    return answer


class Visitor:
    """A user who tries everything; :attr:`failures` has the answers that are no page."""

    def __init__(self, rows: Mapping[str, Any]) -> None:
        self.rows = rows
        self.client = Client(raise_request_exception=False)
        self.client.force_login(User.objects.create_superuser("root"))
        self.failures: list[str] = []
        self.tried: set[tuple[str, ...]] = set()
        self.count = 0

    def ask(self, method: str, address: str, what: str, data: str = "", kind: str = FORM) -> None:
        self.count += 1
        query, form = (data, "") if method == "GET" else ("", data)
        more: Any = {"QUERY_STRING": query, "CONTENT_TYPE": kind}
        response: Any = self.client.generic(method, address, form, **more)
        if response.streaming:
            list(response)
        if response.status_code not in (200, 302, 400, 403, 404):
            error = getattr(response, "exc_info", (None, None))[1]
            self.failures.append(f"{method} {address} {what}: {error!r:.200}")

    def try_page(self, method: str, route: str) -> None:
        """Try each parameter; if another page of its model had all values, with one."""
        model = route.split("/")[3]
        row = self.rows.get(model)
        pk = str(row.pk) if row else ""
        address = address_of(route, pk)
        filters = filters_of(address) if method == "GET" else set()
        given = self.given(method, address, row)
        query = urlencode({"_changelist_filters": "", "q": "", **given}).replace("=", "=%5Cud800")
        self.ask("GET", address, "a lone surrogate", query, ESCAPES)
        self.ask(method, address, "", urlencode(given))
        done: set[str] = set()
        while left := (Recorded.names | filters) - done:
            name = min(left)
            done.add(name)
            rest = urlencode({key: value for key, value in given.items() if key != name})
            for what, value in self.values(method, model, name):
                self.ask(method, address, f"{name} = {what}", f"{rest}&{name}={value}")
                filters |= Recorded.names
                if method == "POST" and row:
                    type(row).objects.filter(pk=row.pk).update(**BEFORE[model])

    def values(self, method: str, model: str, name: str) -> list[tuple[str, str]]:
        found = [*VALUES.items()]
        if name == "payload":
            found += [(what, quote(value)) for what, value in JSON.items()]
        key = method, "" if name in COMMON else model, name
        if key in self.tried:
            found = [found[self.count % len(found)]]
        self.tried.add(key)
        return found

    def given(self, method: str, address: str, row: Any) -> dict[str, str]:
        """Return what a request needs to pass the first checks."""
        seen = encode_selection({row.pk: getattr(row, "version", 0)}) if row else ""
        if method == "GET":
            return {"seen": seen} if "/decide/" in address else {}
        given = {"seen": seen, "reason": "so", "edits": "0", "step": "review"}
        given["payload"] = json.dumps({"order_id": 8})
        if filters_of(address):
            given |= {**select([row], "discard"), "_selected_action": str(row.pk)}
        return given

    def try_path(self, route: str) -> None:
        """Try each value as an id or a number of the route."""
        pk = str(getattr(self.rows.get(route.split("/")[3]), "pk", ""))
        for what, value in VALUES.items():
            address = re.sub(r"<(?:path|int):\w+>", lambda _: value, route)  # noqa: B023
            if address != route:
                self.ask("GET", address.replace("<uuid:pk>", pk), f"path = {what}")


def filters_of(address: str) -> set[str]:
    """Return the parameters of a list that it does not read by their names."""
    for model, pages in admin.site._registry.items():
        if pages.list_filter and address.endswith(f"/{model._meta.model_name}/"):
            filters = [str(getattr(each, "parameter_name", each)) for each in pages.list_filter]
            return {main.ORDER_VAR, main.SEARCH_VAR, main.PAGE_VAR, "pk__in", "pk__foo", *filters}
    return set()


@pytest.fixture
def quiet() -> Iterator[None]:
    """Format no traceback of what is refused."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_value_gives_a_page(archive_database: Database, broker: Any, quiet: None) -> None:
    middleware = [*WEB["MIDDLEWARE"], f"{__name__}.recorder"]
    with override_settings(AMQP_EVENTS=SETTINGS, MIDDLEWARE=middleware):
        rows = {"archivedevent": world()}
        models: list[Any] = [OutboxEvent, FailureGroup, ReplayBatch]
        visitor = Visitor(rows | {each._meta.model_name: each.objects.all()[0] for each in models})
        for route in routes(admin.site):
            visitor.try_page("GET", route)
            visitor.try_page("POST", route)
            visitor.try_path(route)
        for what, value in VALUES.items():
            visitor.ask("GET", "/admin/autocomplete/", what, f"{RELATION}&term={value}")
    assert visitor.count > 1_000
    assert visitor.failures == []

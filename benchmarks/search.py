"""The search for values of payloads among a million archived events, on PostgreSQL and SQLite.

``.venv/bin/python -m benchmarks.search`` for SQLite, and with ``python scripts/postgresql.py`` in
front for PostgreSQL. Each event has an order of its own, a customer that five events share, and one
of ten countries. *selection* is :class:`~django_amqp_events.archive.selection.Selection` with the
ids of all matching events, *list* the admin's list with its filters, its count and its page: the
best of some runs, on SQLite in processor time of this process, on PostgreSQL in planning and
execution, so that other work on the machine makes less of a difference. Exits with 1 if one needs
more than 50 ms.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")

import django

django.setup()

from django.contrib import admin  # noqa: E402 - needs Django's settings
from django.contrib.auth.models import User  # noqa: E402
from django.contrib.messages.storage.fallback import FallbackStorage  # noqa: E402
from django.core.management import call_command  # noqa: E402
from django.db import connection  # noqa: E402
from django.http import HttpResponse  # noqa: E402
from django.test import RequestFactory, override_settings  # noqa: E402
from django.urls import reverse  # noqa: E402

from django_amqp_events.archive.selection import FEW_VALUES, SearchTerm, Selection, matching  # noqa: E402
from django_amqp_events.models import ArchivedEvent, SearchValue  # noqa: E402

from .pages import measured  # noqa: E402

LIMIT = 50.0
NAME = "shop.order.created"
EVENTS = {
    "SERVICE": "billing",
    "AUTODISCOVER": [],
    "EVENTS": {NAME: {"SEARCH": ["order_id", "customer.email", "country"]}},
}
#: Of a number i: a UUID without an order, a time (the first event is the oldest), a body.
SQL = {
    "postgresql": (
        "md5(i::text)::uuid",
        "now() - ({rows} - i) * interval '1 second'",
        "convert_to(repeat('x', {body}), 'UTF8')",
        "concat('user', i % ({rows} / 5), '@example.org')",
    ),
    "sqlite": (
        "printf('%08x%024x', (i * 2654435761) % 4294967296, i)",
        "datetime('now', (i - {rows}) || ' seconds')",
        "zeroblob({body})",
        "'user' || (i % ({rows} / 5)) || '@example.org'",
    ),
}
COUNTRIES = ("AT", "BE", "CH", "CZ", "DE", "DK", "ES", "FR", "IT", "NL")


def main() -> int:
    parser = argparse.ArgumentParser(description="The search for values of payloads.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--body", type=int, default=500, help="bytes of each body (500)")
    parser.add_argument("--reuse", action="store_true", help="keep the rows that are there")
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="search-") as directory:
        if connection.vendor == "sqlite":
            connection.settings_dict["NAME"] = Path(directory) / "archive.sqlite3"
        call_command("migrate", verbosity=0)
        with override_settings(AMQP_EVENTS=EVENTS, ROOT_URLCONF="tests.unit.admin.admin_world"):
            began = time.monotonic()
            if not options.reuse:
                fill(options.rows, options.body)
            seconds = time.monotonic() - began
            print(f"{connection.vendor}: {options.rows} events in {seconds:.0f} s, {sizes()}")
            failed = compare(options.rows, options.runs)
        connection.close()
    return int(failed)


def compare(rows: int, runs: int) -> bool:
    searches = {
        "an order": f"order_id={rows // 2}",
        "an order, without a path": f"{rows // 2}",
        "an order that is not there": "order_id=none",
        "a customer": "customer.email=user17@example.org",
        "the start of a customer": "customer.email=user17@*",
        "the start of ten orders": f"order_id={rows // 20}*",
        "the start of a thousand orders": f"order_id={rows // 2000}*",
        "the start of 11 111 orders": "order_id=17*",
        "a country": "country=DE",
        "a country, without a path": "DE",
        "the start of all customers": "customer.email=user*",
    }
    slow = False
    print(f"{'search':<34}{'events':>9}{'selection':>12}{'list':>10}  ms")
    for name, search in searches.items():
        many: list[bool] = []
        if (term := SearchTerm.parse_any(search)) is not None:
            matching([term], "default", too_many=partial(many.append, True))
        times = [best(partial(show, search), runs)]
        count = ""
        if "=" in search and not many:
            wanted = Selection(search=[search], state=None)
            count = str(len(ids(wanted)))
            times.insert(0, best(partial(ids, wanted), runs))
        slow = slow or max(times) > LIMIT
        written = "".join(f"{each:>11.1f}" for each in times).rjust(23)
        print(f"{name:<34}{count or f'>{FEW_VALUES}' * bool(many):>9}{written}", flush=True)
    return slow


def ids(wanted: Selection) -> list[Any]:
    return list(wanted.queryset().values_list("pk"))


def show(search: str) -> int:
    """Read what the admin's list shows of a search."""
    url = reverse("admin:django_amqp_events_archivedevent_changelist")
    request: Any = RequestFactory().get(url, {"q": search})
    request.user, request.session = _staff(), {}
    request._messages = FallbackStorage(request)  # noqa: SLF001 - as MessageMiddleware does
    found = admin.site.get_model_admin(ArchivedEvent).get_changelist_instance(request)
    return len(list(found.result_list))


def _staff() -> User:
    # Without the queries of its permissions.
    return User(username="ada", is_staff=True, is_superuser=True, is_active=True)


def best(run: Callable[[], object], runs: int) -> float:
    """Return the milliseconds of the fastest run."""
    if connection.vendor == "postgresql":

        def page() -> HttpResponse:
            run()
            return HttpResponse()

        return measured(page, runs).served
    times = []
    for _ in range(runs):
        began = time.process_time()
        run()
        times.append(time.process_time() - began)
    return min(times) * 1000


def fill(rows: int, body: int) -> None:
    """Store events and their values by SQL."""
    pk, at, content, email = (each.format(rows=rows, body=body) for each in SQL[connection.vendor])
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n WHERE i < {rows}) "  # noqa: S608
    event, value = (model._meta.db_table for model in (ArchivedEvent, SearchValue))  # noqa: SLF001
    text = "CAST(i AS varchar)"
    country = " ".join(f"WHEN {place} THEN '{code}'" for place, code in enumerate(COUNTRIES))
    false = "false" if connection.vendor == "postgresql" else "0"
    empty = "''::bytea" if connection.vendor == "postgresql" else "x''"
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {event} (id, service, handler, queue, name, event_id, source, "  # noqa: S608
            f"correlation_id, causation_id, first_failed_at, last_failed_at, mirrored_at, state, "
            f"state_since, version, reason, detail, exception, message, location, attempts, "
            f"replays, unconfirmed, error, body, body_size, headers_raw, content_type, "
            f"content_encoding) {numbers}"
            f"SELECT {pk}, 'billing', 'send_invoice', 'billing.send_invoice', '{NAME}', "
            f"'event-' || {text}, 'shop', 'basket-' || {text}, '', {at}, {at}, {at}, "
            f"CASE WHEN i % 3 = 0 THEN 'archived' ELSE 'succeeded' END, {at}, 0, 'exhausted', '', "
            f"'billing.errors.TaxError', '', '', 1, 0, {false}, '', {content}, {body}, {empty}, "
            f"'application/json', 'utf-8' FROM n"
        )
        for path, written in (
            ("order_id", text),
            ("customer.email", email),
            ("country", f"CASE (i * 7 / 3) % 10 {country} END"),
        ):
            cursor.execute(
                f"INSERT INTO {value} (event_id, path, value) {numbers}"  # noqa: S608
                f"SELECT {pk}, '{path}', {written} FROM n"
            )
        cursor.execute("VACUUM ANALYZE" if connection.vendor == "postgresql" else "ANALYZE")


def sizes() -> str:
    """Return the bytes of the search values of one event, with their indexes."""
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute(
                "SELECT SUM(pgsize) FROM dbstat WHERE name LIKE 'amqp_search%%' OR name LIKE "
                "'%%searchvalue%%'"
            )
        else:
            table = SearchValue._meta.db_table  # noqa: SLF001 - Django's public _meta
            cursor.execute("SELECT pg_total_relation_size(%s)", [table])
        size = cursor.fetchone()[0] or 0
    return f"{size / SearchValue.objects.count():.0f} bytes for each search value"


if __name__ == "__main__":
    sys.exit(main())

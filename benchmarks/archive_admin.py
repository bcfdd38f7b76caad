"""The admin's pages of the archive on PostgreSQL: queries, and time in the database.

``python scripts/postgresql.py .venv/bin/python -m benchmarks.archive_admin [--rows 100000]``: makes
archived events with bodies of 5 kB and failures with documents of 20 kB, opens each page with 10
rows and with all of them, and prints queries and milliseconds in the database side by side. Exits
with 1 where a page needs more queries with more rows, or more than 200 ms in the database.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")

import django

django.setup()

from django.contrib.auth.models import User  # noqa: E402 - needs Django's settings
from django.core.management import call_command  # noqa: E402
from django.db import connection  # noqa: E402
from django.http import HttpResponse  # noqa: E402
from django.test import Client, override_settings  # noqa: E402

from django_amqp_events.models import ArchivedEvent  # noqa: E402
from tests.unit import admin_world as world  # noqa: E402

LIMIT = 200.0
RUNS = 5

# Most of the archive is open, as after a bad night; one handler has nothing open at all.
ROWS = """
WITH pool AS MATERIALIZED (
    SELECT string_agg(decode(md5(i::text), 'hex'), '') AS noise FROM generate_series(1, 60000) i)
INSERT INTO django_amqp_events_archivedevent (
    id, service, handler, queue, name, event_id, source, correlation_id, causation_id,
    published_at, first_failed_at, last_failed_at, mirrored_at, state, state_since, version,
    reason, detail, exception, message, location, attempts, replays, unconfirmed, error, body,
    body_size, headers_raw, content_type, content_encoding)
SELECT
    md5('row' || n)::uuid, 'billing',
    CASE WHEN n %% 50 = 0 THEN 'settled' WHEN n %% 2 = 0 THEN 'send_invoice' ELSE 'book' END,
    'billing.send_invoice', 'shop.order.event' || n %% 12, md5('event' || n)::uuid::text, 'shop',
    'basket-' || n / 3, '',
    now() - n * interval '30 seconds', now() - n * interval '30 seconds',
    now() - n * interval '30 seconds', now(),
    CASE WHEN n %% 50 = 0 THEN 'discarded' WHEN n %% 20 = 1 THEN 'succeeded'
         WHEN n %% 40 = 3 THEN 'replaying' ELSE 'archived' END,
    now() - n * interval '30 seconds', 1,
    (ARRAY['exhausted', 'failed', 'malformed', 'arguments', 'poison'])[1 + n %% 5],
    'attempt 3 failed, and it was the last one',
    'billing.errors.Error' || n %% 37, 'there is no tax rate for ' || n, 'billing.tax:28 in rate',
    3, 1, false, '',
    convert_to('[[], {"note": "' ||
        encode(substring(pool.noise FROM 1 + (n * 37) %% 900000 FOR 2496), 'hex') ||
        '"}, {}]', 'UTF8'),
    5014, ''::bytea, 'application/json', 'utf-8'
FROM generate_series(%s, %s) n, pool
"""
FAILURES = """
WITH pool AS MATERIALIZED (
    SELECT string_agg(convert_to('  File \\"/srv/billing/' || md5(i::text) ||
        '.py\\", line 12, in send_invoice\\n    rate = tax.rate(country)\\n', 'UTF8'), '') AS lines
    FROM generate_series(1, 3300) i)
INSERT INTO django_amqp_events_archivedfailure (
    id, event_id, reason, exception, message, attempts, failed_at, mirrored_at, late, document)
SELECT
    md5('failure' || n)::uuid, md5('row' || n)::uuid, 'exhausted', 'billing.errors.Error',
    'there is no tax rate', 3, now(), now(), false,
    '{"history": [], "frames": [], "exception": null, "traceback": "' ||
        convert_from(substring(pool.lines FROM 1 + 117 * (n %% 3000) FOR 117 * 170), 'UTF8') || '"}'
FROM generate_series(%s, %s) n, pool
"""
REPLAYS = """
INSERT INTO django_amqp_events_replay (
    id, event_id, number, handler, outcome, requested_at, requested_by, reason, publishes, error)
SELECT md5('replay' || n)::uuid, md5('row' || n)::uuid, 1, 'book', 'failed', now(), 'ada', '', 1, ''
FROM generate_series(%s, %s) n
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="The archive's pages on PostgreSQL.")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--explain", metavar="PAGE", help="print the plans of this page's queries")
    options = parser.parse_args()
    if connection.vendor != "postgresql":
        sys.exit("Run it below scripts/postgresql.py: this database is " + connection.vendor)
    call_command("migrate", verbosity=0)
    client = Client(headers={"host": "localhost"})
    client.force_login(User.objects.create_superuser("ada"))
    with override_settings(**world.SETTINGS, ALLOWED_HOSTS=["localhost"], AMQP_EVENTS=world.EVENTS):
        fill(1, 10)
        few = measured(client)
        began = time.monotonic()
        fill(11, options.rows)
        print(f"{options.rows} rows made in {time.monotonic() - began:.0f} s, {size()} on disk\n")
        if options.explain:
            print(explain(pages(client)[options.explain]))
            return 0
        many = measured(client)
    print(f"{'':<40}{'queries with':>18}{'ms in the database':>20}{'ms waited for':>16}")
    print(f"{'page':<40}{'10':>9}{options.rows:>9}{'10':>10}{options.rows:>10}{'':>16}")
    failed = False
    for name, (queries, served, waited) in many.items():
        wrong = queries > few[name][0] or served > LIMIT
        failed = failed or wrong
        print(
            f"{name:<40}{few[name][0]:>9}{queries:>9}{few[name][1]:>10.1f}{served:>10.1f}"
            f"{waited:>16.1f}{'  <- too much' if wrong else ''}"
        )
    return int(failed)


def explain(page: Callable[[], Any]) -> str:
    """The plans of a page's queries, for whoever wants to know where the time goes."""
    plans: list[str] = []

    def explained(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.lstrip().startswith(("SELECT", "WITH")):
            with connection.connection.cursor() as cursor:
                cursor.execute("EXPLAIN (ANALYZE, BUFFERS) " + sql, params)
                plan = "\n".join(row[0] for row in cursor.fetchall())
            plans.append(f"{sql[:2000]}\n{plan}")
        return execute(sql, params, many, context)

    with connection.execute_wrapper(explained):
        page()
    return "\n\n".join(plans)


def fill(first: int, last: int) -> None:
    with connection.cursor() as cursor:
        for sql in (ROWS, FAILURES, REPLAYS):
            cursor.execute(sql, [first, last])
        cursor.execute("VACUUM ANALYZE")


def size() -> str:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_size_pretty(pg_database_size(current_database()))")
        return str(cursor.fetchone()[0])


def measured(
    client: Client, wanted: dict[str, Callable[[], Any]] | None = None
) -> dict[str, tuple[int, float, float]]:
    """Each page's queries, and the milliseconds that it waits for them: the server's, and all.

    The server's are the planning and execution times of EXPLAIN ANALYZE, the worst of some runs;
    what is waited for, the median of some runs, has the way there and whatever else the machine
    does at the moment.
    """
    found = {}
    for name, page in (wanted or pages(client)).items():
        served, waited = [], []
        queries = 0
        for _ in range(RUNS):
            watch = Watch()
            with connection.execute_wrapper(watch):
                response = page()
            if response.status_code != 200:
                sys.exit(f"{name}: {response.status_code}")
            waited.append(watch.seconds * 1000)
            queries = max(queries, watch.queries)
            served.append(sum(map(float, _TIME.findall(explain(page)))))
        found[name] = (queries, max(served), sorted(waited)[RUNS // 2])
    return found


_TIME = re.compile(r"^(?:Planning|Execution) Time: ([0-9.]+) ms$", re.MULTILINE)


class Watch:
    """Counts queries and the time until the database has answered them."""

    def __init__(self) -> None:
        self.queries = 0
        self.seconds = 0.0

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        self.queries += 1
        began = time.perf_counter()
        try:
            return execute(sql, params, many, context)
        finally:
            self.seconds += time.perf_counter() - began


def pages(client: Client) -> dict[str, Callable[[], HttpResponse]]:
    url = world.url("changelist")
    total = ArchivedEvent.objects.count()
    middle = ArchivedEvent.objects.filter(state="archived").order_by("pk")[total // 4]
    chosen = list(ArchivedEvent.objects.filter(state="archived")[:100])

    def listed(**query: str) -> Callable[[], Any]:
        return lambda: client.get(url, query)

    archived = ArchivedEvent.objects.filter(state="archived").count()
    last = str(min(100, -(-total // 50)))
    return {
        "list: open events": listed(),
        "list: all": listed(state="all"),
        "list: succeeded": listed(state="succeeded"),
        "list: on their way": listed(state="going"),
        "list: overdue": listed(state="overdue"),
        "list: event": listed(event="shop.order.event5"),
        "list: handler": listed(handler="book"),
        "list: handler with nothing open": listed(handler="settled"),
        "list: reason": listed(reason="malformed"),
        "list: exception": listed(exception="billing.errors.Error7"),
        "list: exception and handler, discarded": listed(
            exception="billing.errors.Error7", handler="book", state="discarded"
        ),
        "list: four filters": listed(
            event="shop.order.event5",
            handler="book",
            reason="malformed",
            exception="billing.errors.Error7",
        ),
        "list: last hour": listed(failed="hour"),
        "list: more than 30 days ago": listed(failed="older-month"),
        "list: oldest first": listed(o="6"),
        "list: page 50": listed(p=str(min(50, -(-archived // 50)))),
        "list: last page": listed(p=last, state="all"),
        "search: event id": listed(q=middle.event_id),
        "search: how an event id begins": listed(q=middle.event_id[:6]),
        "search: a single character": listed(q=middle.event_id[:1]),
        "search: correlation id": listed(q=middle.correlation_id),
        "search: row id": listed(q=str(middle.pk)),
        "search: nothing": listed(q="there-is-no-such-id"),
        "detail": lambda: client.get(world.url("change", middle.pk)),  # type: ignore[return-value]
        "history": lambda: client.get(world.url("history", middle.pk)),  # type: ignore[return-value]
        "confirmation of 100 selected": lambda: client.post(  # type: ignore[return-value]
            url, world.select(chosen, "replay")
        ),
        "confirmation of 100 to discard": lambda: client.post(  # type: ignore[return-value]
            url, world.select(chosen, "discard")
        ),
    }


if __name__ == "__main__":
    sys.exit(main())

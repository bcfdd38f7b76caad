"""The admin's pages on PostgreSQL with a million events: queries, time in the database, buffers.

``python scripts/postgresql.py .venv/bin/python -m benchmarks.pages [--rows 1000000] [--explain
FILE]``: bodies of 5 kB, documents of 20 kB, half of the events within the last 24 hours, thousands
of groups, an outbox, an inbox, a week of snapshots, a batch. Opens each page with 10
events and with all of them. Exits with 1 where a page needs more queries with more events, or more
than 200 ms in the database.

Times are planning and execution of EXPLAIN (ANALYZE, BUFFERS), and of writes what they took: the
best of some runs, because a machine that does other work makes any of them slower and none faster.
Buffers are pages of 8 kB that the queries looked at, wherever they were: no other work changes
those.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")

import django

django.setup()

from django.contrib.auth.models import User  # noqa: E402 - needs Django's settings
from django.core.management import call_command  # noqa: E402
from django.db import connection  # noqa: E402
from django.test import Client, override_settings  # noqa: E402
from django.urls import reverse  # noqa: E402

from django_amqp_events.archive import tables  # noqa: E402
from django_amqp_events.archive.batches import batch_states, preview  # noqa: E402
from django_amqp_events.archive.groups import group_counts  # noqa: E402
from django_amqp_events.models import (  # noqa: E402
    ArchivedEvent,
    FailureGroup,
    OutboxEvent,
    Replay,
    ReplayBatch,
)
from django_amqp_events.monitor import snapshots, statistics  # noqa: E402
from tests.unit.admin import admin_world as world  # noqa: E402

LIMIT = 200.0
RUNS = 5
#: Rows of the outbox and inbox: a share of all rows.
OUTBOX, INBOX = 0.1, 0.5

# Incompressible bodies, and realistic documents; copying them is faster than generating them.
NOISE = """
CREATE TEMP TABLE IF NOT EXISTS noise AS
SELECT i, convert_to('[[], {"note": "' || body || '"}, {}]', 'UTF8') AS body,
    '{"history": [], "frames": [], "exception": null, "traceback": "' || lines || '"}' AS document
FROM generate_series(0, 499) i
CROSS JOIN LATERAL (
    SELECT string_agg(md5(i || '-' || k), '') AS body FROM generate_series(1, 156) k) b
CROSS JOIN LATERAL (
    SELECT string_agg('  File \\"/srv/billing/' || md5(i || '/' || k) ||
        '.py\\", line 12, in send_invoice\\n    rate = tax.rate(country)\\n', '') AS lines
    FROM generate_series(1, 185) k) l
"""
# Most of the archive is open, as after a long failure. Filtered values are rarely spread evenly,
# and an index must work then too: one handler's events were all discarded; those of another, a
# fifth of all rows, have all succeeded.
ROWS = """
WITH made AS (
    SELECT n, CASE WHEN n % 50 = 0 THEN 'settled' WHEN n % 5 = 3 THEN 'import'
        WHEN n % 2 = 0 THEN 'send_invoice' ELSE 'book' END AS handler,
    CASE WHEN n % 5 = 3 THEN 'billing.errors.Import' ELSE 'billing.errors.Error' || n % 37
        END AS exception,
    'billing.tax:28 in rate' || (n / 11) % 30 AS location,
    CASE WHEN n % 50 = 0 THEN 'discarded' WHEN n % 20 = 1 OR n % 5 = 3 THEN 'succeeded'
         WHEN n % 40 = 2 THEN 'replaying' ELSE 'archived' END AS state,
    now() - CASE WHEN n <= {rows} / 2 THEN n * interval '{step} seconds'
        ELSE interval '1 day' + (n - {rows} / 2) * interval '30 seconds' END AS at
    FROM generate_series({first}, {last}) n)
INSERT INTO django_amqp_events_archivedevent (
    id, service, handler, queue, name, event_id, source, correlation_id, causation_id,
    published_at, first_failed_at, last_failed_at, mirrored_at, state, state_since, version,
    reason, detail, exception, message, location, group_id, attempts, replays, unconfirmed, error,
    body, body_size, headers_raw, content_type, content_encoding)
SELECT
    md5('row' || n)::uuid, 'billing', handler, 'billing.' || handler,
    CASE WHEN handler = 'import' THEN 'shop.import' ELSE 'shop.order.event' || n % 12 END,
    md5('event' || n)::uuid::text, 'shop', 'basket-' || n / 3, '',
    at, at, at, now(), state, at, 1,
    CASE WHEN handler = 'import' THEN 'recovered'
        ELSE (ARRAY['exhausted', 'failed', 'malformed', 'arguments', 'poison'])[1 + n / 7 % 5] END,
    'attempt 3 failed, and it was the last one', exception, 'there is no tax rate for ' || n,
    location, md5(handler || exception || location)::uuid, 3, (n % 40 = 2 OR n % 9 = 0)::int,
    false, '', body, 5014, ''::bytea, 'application/json', 'utf-8'
FROM made JOIN noise ON noise.i = n % 500
"""
FAILURES = """
INSERT INTO django_amqp_events_archivedfailure (
    id, event_id, reason, exception, message, failed_at, mirrored_at, late, document)
SELECT
    md5('failure' || n)::uuid, md5('row' || n)::uuid, 'exhausted', 'billing.errors.Error',
    'there is no tax rate', now(), now(), false, document
FROM generate_series({first}, {last}) n JOIN noise ON noise.i = n % 500
"""
REPLAYS = """
INSERT INTO django_amqp_events_replay (
    id, event_id, version, number, handler, state, requested_at, requested_by, reason, publishes,
    error, forced, superseded)
SELECT md5('replay' || n)::uuid, md5('row' || n)::uuid, 0, 1, 'book', 'failed', now(), 'ada', '', 1,
    '', false, false
FROM generate_series({first}, {last}) n WHERE n % 40 = 2 OR n % 9 = 0
"""
WAITING = """
INSERT INTO django_amqp_events_outboxevent (
    id, service, event_id, name, exchange, envelope, body, size, created_at, due_at, attempts,
    error, discarded_at, discarded_by, discard_reason)
SELECT (lpad(to_hex({rows} - n), 12, '0') || md5('waits' || n))::char(32)::uuid, 'billing',
    md5('waiting' || n)::uuid::text,
    'shop.order.event' || n % 12, 'events',
    '{{}}', decode(repeat(md5(n::text), 62), 'hex'), 992,
    now() - n * interval '1 second',
    CASE WHEN n % 3 = 0 THEN now() + interval '1 minute' ELSE now() - n * interval '1 second' END,
    CASE WHEN n % 3 = 0 THEN 4 ELSE 0 END, CASE WHEN n % 3 = 0 THEN 'RabbitMQ is away' ELSE '' END,
    CASE WHEN n / 10 % 10 = 0 THEN now() END, '', ''
FROM generate_series({first}, {last}) n WHERE n % {outbox} = 0
"""
HANDLED = """
INSERT INTO django_amqp_events_inboxentry (
    id, service, handler, source, event_id, name, handled_at, superseded)
SELECT md5('handled' || n)::uuid, 'billing', 'book', 'shop', md5('event' || n)::uuid::text,
    'shop.order.event' || n % 12, now() - n * interval '1 second', false
FROM generate_series({first}, {last}) n WHERE n % {inbox} = 0
"""
FILL = (ROWS, FAILURES, REPLAYS, WAITING, HANDLED)

GROUPS = """
INSERT INTO django_amqp_events_failuregroup (
    id, service, handler, exception, frame, reason, first_seen, note, assignee, ticket, edits)
SELECT group_id, 'billing', handler, exception, location, '', min(first_failed_at), '', '', '', 0
FROM django_amqp_events_archivedevent GROUP BY group_id, handler, exception, location
ON CONFLICT DO NOTHING
"""


@dataclass(slots=True)
class Measured:
    """What a page costs: its queries, the server's milliseconds, and buffers."""

    queries: int
    served: float
    buffers: int
    plans: list[tuple[float, str, str]] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description="The admin's pages on PostgreSQL.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument(
        "--only", metavar="WORD", default="", help="only pages whose name contains it"
    )
    parser.add_argument("--explain", metavar="FILE", help="write the plans of slow queries")
    parser.add_argument(
        "--slow", type=float, default=20.0, help="milliseconds of a slow query (20)"
    )
    parser.add_argument(
        "--runs", type=int, default=RUNS, help="runs of each page, the best counts (5)"
    )
    parser.add_argument("--reuse", action="store_true", help="keep the existing rows")
    options = parser.parse_args()
    if connection.vendor != "postgresql":
        sys.exit(
            f"This needs PostgreSQL, not {connection.vendor}. Run it with scripts/postgresql.py."
        )
    call_command("migrate", verbosity=0)
    client = Client(headers={"host": "localhost"})
    client.force_login(User.objects.get_or_create(username="ada", defaults=_STAFF)[0])
    with override_settings(**world.SETTINGS, ALLOWED_HOSTS=["localhost"], AMQP_EVENTS=world.EVENTS):
        few: dict[str, Measured] = {}
        if not options.reuse:
            week()
            fill(1, 10, options.rows)
            few = {name: measured(page, options.runs) for name, page in pages(client).items()}
            began = time.monotonic()
            fill(11, options.rows, options.rows)
            print(f"{options.rows} rows made in {time.monotonic() - began:.0f} s, {size()}\n")
            work()
        wanted = {name: page for name, page in pages(client).items() if options.only in name}
        many = {name: measured(page, options.runs) for name, page in wanted.items()}
    print(f"{'':<44}{'queries with':>16}{'ms':>10}{'buffers':>10}")
    print(f"{'page':<44}{'10':>7}{options.rows:>9}")
    failed = False
    for name, found in many.items():
        before = few.get(name, found)
        wrong = found.queries > before.queries or found.served > LIMIT
        failed = failed or wrong
        print(
            f"{name:<44}{before.queries:>7}{found.queries:>9}{found.served:>10.1f}"
            f"{found.buffers:>10}{'  <- too much' if wrong else ''}"
        )
    if options.explain:
        write(Path(options.explain), many, options.slow)
    return int(failed)


_STAFF = {"is_staff": True, "is_superuser": True}


# -- rows ----------------------------------------------------------------------------------


def fill(first: int, last: int, rows: int) -> None:
    """Create the rows from *first* to *last* of all *rows*, and what belongs to them."""
    values = {
        "first": first,
        "last": last,
        "rows": rows,
        # Slightly less than a day, so that none is older.
        "step": 2 * 86_000 / rows,
        "outbox": round(1 / OUTBOX) if last > 10 else 1,
        "inbox": round(1 / INBOX) if last > 10 else 1,
    }
    with connection.cursor() as cursor:
        # For speed, on a private server: no crash safety, and no checks of foreign keys.
        cursor.execute("SET session_replication_role = replica")
        cursor.execute("SET default_toast_compression = lz4")
        cursor.execute("SET maintenance_work_mem = '512MB'")
        cursor.execute("SET max_parallel_maintenance_workers = 0")
        _unlog(cursor)
        cursor.execute(NOISE)
        with _without_indexes(cursor):
            for sql in FILL:
                cursor.execute(sql.format(**values))
        cursor.execute(GROUPS)
        cursor.execute("SET session_replication_role = origin")
        cursor.execute("VACUUM ANALYZE")
    if last == 10:
        batch = batch_states.freeze(tables.rows(), by="ada", title="all")
        preview.preview_batch(batch)


def _unlog(cursor: Any) -> None:
    """Make our tables unlogged, starting with those that no other one refers to."""
    cursor.execute(
        "SELECT relname FROM pg_class WHERE relname LIKE 'django_amqp_events_%' "
        "AND relkind = 'r' AND relpersistence = 'p'"
    )
    left = [name for (name,) in cursor.fetchall()]
    while left:
        for name in list(left):
            cursor.execute(
                "SELECT 1 FROM pg_constraint c JOIN pg_class r ON r.oid = c.conrelid "
                "WHERE c.contype = 'f' AND c.confrelid = %s::regclass AND r.relpersistence = 'p' "
                "AND r.oid <> c.confrelid",
                [name],
            )
            if cursor.fetchone() is None:
                cursor.execute(f"ALTER TABLE {name} SET UNLOGGED")
                left.remove(name)


@contextmanager
def _without_indexes(cursor: Any) -> Iterator[None]:
    """Build the indexes of the large tables at once, not row by row."""
    cursor.execute(
        "SELECT i.indexname, i.indexdef FROM pg_indexes i "
        "LEFT JOIN pg_constraint c ON c.conname = i.indexname "
        "WHERE i.tablename IN ('django_amqp_events_archivedevent', "
        "'django_amqp_events_archivedfailure', 'django_amqp_events_inboxentry') AND c.oid IS NULL"
    )
    found = cursor.fetchall()
    for name, _ in found:
        cursor.execute(f'DROP INDEX "{name}"')
    yield
    for _, definition in found:
        cursor.execute(definition)


def week() -> None:
    """Create the snapshots of seven days, with fifty queues each."""
    queue = {"role": "handler", "state": "ok", "severity": "ok", "meaning": "empty", "ready": 0}
    document = json.dumps(
        {
            "version": snapshots.FORMAT,
            "broker": {"error": ""},
            "queues": {f"billing.handler{n}": queue for n in range(50)},
            "outbox": [],
            "mirror": {"lag": 0.0},
        }
    )
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO django_amqp_events_snapshot (at, service, seen, open, document) "
            "SELECT now() - n * %s * interval '1 second', 'billing', true, n, %s "
            "FROM generate_series(0, %s) n",
            [snapshots.SNAPSHOT_SECONDS, document, int(7 * 86_400 / snapshots.SNAPSHOT_SECONDS)],
        )


def size() -> str:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_size_pretty(pg_database_size(current_database()))")
        return str(cursor.fetchone()[0])


def work() -> None:
    """Print the cost of work that is not a page and grows with the events; it has no limit."""
    began = time.monotonic()
    batch = batch_states.freeze(
        tables.rows().filter(state="archived").order_by("-last_failed_at")[:100_000],
        by="ada",
        title="all",
    )
    frozen = time.monotonic()
    preview.preview_batch(batch)
    print(
        f"a batch of {batch.total}: frozen in {frozen - began:.1f} s, dry run in "
        f"{time.monotonic() - frozen:.1f} s"
    )
    # As its runner leaves it when events were skipped.
    states = Replay.State
    found = Replay.objects.filter(batch=batch)
    half = batch.total // 2
    found.filter(position__lte=half).update(state=states.SKIPPED, error="it is discarded")
    found.filter(position__gt=half).update(state=states.SUCCEEDED, settled_at=datetime.now(UTC))
    ReplayBatch.objects.filter(pk=batch.pk).update(state="running", started_at=datetime.now(UTC))
    began = time.monotonic()
    batch_states.count(batch.pk)
    print(f"  counted in {1000 * (time.monotonic() - began):.0f} ms")
    began = time.monotonic()
    statistics.capped(statistics.open_rows(), statistics.CAP)
    statistics.new_since(datetime.now(UTC) - statistics.HOUR, 101, service="billing")
    print(f"what a snapshot asks of the archive: {1000 * (time.monotonic() - began):.0f} ms\n")
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE django_amqp_events_replay")


# -- measuring -----------------------------------------------------------------------------


def measured(page: Callable[[], Any], times: int) -> Measured:
    """Open a page several times; the smallest figures count."""
    runs = []
    for _ in range(times):
        found = Measured(0, 0.0, 0)
        with connection.execute_wrapper(_Explainer(found)):
            response = page()
        if response.status_code not in (200, 302):
            sys.exit(f"{response.status_code} {response.content[:2000]!r}")
        runs.append(found)
    best = min(runs, key=lambda found: found.served)
    best.buffers = min(found.buffers for found in runs)
    return best


class _Explainer:
    """Runs each query again under EXPLAIN, and adds up its figures."""

    def __init__(self, found: Measured) -> None:
        self.found = found

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        self.found.queries += 1
        if sql.lstrip().startswith(("SELECT", "WITH")):
            with connection.connection.cursor() as cursor:
                cursor.execute("EXPLAIN (ANALYZE, BUFFERS) " + sql, params)
                plan = "\n".join(line for (line,) in cursor.fetchall())
            took = sum(map(float, _TIME.findall(plan)))
            if top := _BUFFERS.search(plan.partition("\nPlanning")[0]):
                self.found.buffers += sum(int(number) for number in top.groups() if number)
            self.found.plans.append((took, sql, plan))
            try:
                return execute(sql, params, many, context)
            finally:
                self.found.served += took
        began = time.perf_counter()
        try:
            return execute(sql, params, many, context)
        finally:
            self.found.served += 1000 * (time.perf_counter() - began)


_TIME = re.compile(r"^(?:Planning|Execution) Time: ([0-9.]+) ms$", re.MULTILINE)
#: The figures of the top node, which include those below it.
_BUFFERS = re.compile(r"Buffers: shared(?: hit=([0-9]+))?(?: read=([0-9]+))?")


def write(path: Path, many: dict[str, Measured], slow: float) -> None:
    """Write the plan of the slowest query of each slow page."""
    shown = []
    told: set[str] = set()
    for name, found in sorted(many.items(), key=lambda item: -item[1].served):
        if found.served < slow or not found.plans:
            continue
        took, sql, plan = max(found.plans, key=lambda plan: plan[0])
        if sql in told:
            continue
        told.add(sql)
        told_as = "\n".join(each[:300] for each in (sql, *plan.splitlines()))
        shown.append(
            f"== {name}: {found.served:.1f} ms; its slowest query {took:.1f} ms\n{told_as}"
        )
    path.write_text("\n\n".join(shown) + "\n")


# -- pages ---------------------------------------------------------------------------------


def pages(client: Client) -> dict[str, Callable[[], Any]]:
    """Every page, with every filter, by name."""

    def got(url: str, **query: str) -> Callable[[], Any]:
        return lambda: client.get(url, query)

    def posted(url: str, data: dict[str, Any] | None = None) -> Callable[[], Any]:
        return lambda: client.post(url, data)

    def address(model: str, page: str, *args: Any) -> str:
        return reverse(f"admin:django_amqp_events_{model}_{page}", args=args)

    return {
        **_of_events(got, posted),
        **_of_groups(got, address),
        **_of_the_rest(got, posted, address),
    }


def _of_events(got: Any, posted: Any) -> dict[str, Callable[[], Any]]:
    url = world.url("changelist")
    total = ArchivedEvent.objects.count()
    archived = ArchivedEvent.objects.filter(state="archived")
    middle = archived.order_by("pk")[total // 4]
    chosen = list(archived.defer("body")[:100])
    across = {**world.select(chosen, "replay"), "select_across": "1"}
    first = {"handler": "import", "state": "succeeded"}

    def listed(**query: str) -> Callable[[], Any]:
        found: Callable[[], Any] = got(url, **query)
        return found

    def page(number: int, rows: int) -> str:
        return str(max(1, min(number, -(-rows // 50))))

    pages = {
        "list: open events": listed(),
        "list: all": listed(state="all"),
        "list: succeeded": listed(state="succeeded"),
        "list: in progress": listed(state="in_progress"),
        "list: overdue": listed(state="overdue"),
        "list: event": listed(event="shop.order.event5"),
        "list: handler": listed(handler="book"),
        "list: handler with nothing open": listed(handler="settled"),
        "list: large handler with nothing open": listed(handler="import"),
        "list: large handler, all": listed(handler="import", state="all"),
        "list: large handler, succeeded": listed(**first),
        "list: event with nothing open": listed(event="shop.import"),
        "list: exception with nothing open": listed(exception="billing.errors.Import"),
        "list: reason with nothing open": listed(reason="recovered"),
        "list: handler and event, no match": listed(handler="book", event="shop.import"),
        "list: handler and event, no match, all": listed(
            handler="book", event="shop.import", state="all"
        ),
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
        "list: last hour, nothing open": listed(failed="hour", handler="import"),
        "list: oldest first": listed(o="6"),
        "list: page 50": listed(p=page(50, archived[:5000].count())),
        "list: last page": listed(p=page(100, total), state="all"),
        "search: event id": listed(q=middle.event_id),
        "search: event id prefix": listed(q=middle.event_id[:6]),
        "search: a single character": listed(q=middle.event_id[:1]),
        "search: correlation id": listed(q=middle.correlation_id),
        "search: correlation id prefix of all events": listed(q="basket-"),
        "search: all correlation ids, filtered": listed(q="basket-", **first),
        "search: row id": listed(q=str(middle.pk)),
        "search: nothing": listed(q="there-is-no-such-id"),
        "event": got(world.url("change", middle.pk)),
        "event: history": got(world.url("history", middle.pk)),
        "event: payload": got(world.url("payload", middle.pk)),
        "confirmation: replay 100": posted(url, world.select(chosen, "replay")),
        "confirmation: discard 100": posted(url, world.select(chosen, "discard")),
        "confirmation: all, above the limit": posted(url, across),
        "confirmation: all matches of a search": posted(
            f"{url}?q={middle.event_id[:2]}&handler={middle.handler}&exception={middle.exception}",
            across,
        ),
    }
    for word in ("replay", "discard"):
        few = list(archived.filter(handler="book").defer("body")[:2000])
        pages[f"confirmation: {word} {len(few) if len(few) > 99 else 2000}"] = got(
            world.url(word), seen=world.frozen(*few)
        )
    return pages


def _of_groups(got: Any, address: Any) -> dict[str, Callable[[], Any]]:
    url, events = address("failuregroup", "changelist"), world.url("changelist")
    # The largest groups with and without open events.
    groups = group_counts.with_counts(FailureGroup.objects.all()).order_by("-open", "pk")
    largest, settled = groups[0].pk, groups.filter(open=0)[0].pk

    return {
        "groups: open": got(url),
        "groups: all": got(url, state="all"),
        "groups: most open first": got(url, o="-1"),
        "groups: page 20": got(url, p="20" if FailureGroup.objects.count() > 1000 else "1"),
        "groups: came back": got(url, state="back"),
        "groups: nothing open": got(url, state="right"),
        "groups: handler": got(url, handler="book"),
        "groups: handler with nothing open": got(url, handler="import"),
        "groups: exception": got(url, exception="billing.errors.Error7"),
        "groups: assignee": got(url, assignee=""),
        "groups: search": got(url, q="Error7"),
        "group": got(address("failuregroup", "change", largest)),
        "group with nothing open": got(address("failuregroup", "change", settled)),
        "events of a group": got(events, group=str(largest)),
        "events of a group, all": got(events, group=str(largest), state="all"),
        "events of a group, succeeded": got(events, group=str(largest), state="succeeded"),
    }


def _of_the_rest(got: Any, posted: Any, address: Any) -> dict[str, Callable[[], Any]]:
    outbox = address("outboxevent", "changelist")
    waits = OutboxEvent.objects.filter(discarded_at=None).defer("body")
    waiting = waits.order_by("pk")[0]
    failed = list(waits.filter(attempts__gt=0)[:100])
    batch = ReplayBatch.objects.order_by("-total")[0]
    listed = address("replaybatch", "changelist")
    events = world.url("changelist")
    return {
        "dashboard": got(address("dashboard", "changelist")),
        "topology": got(address("dashboard", "topology")),
        "outbox: pending": got(outbox),
        "outbox: all": got(outbox, state="all"),
        "outbox: failed": got(outbox, state="failed"),
        "outbox: overdue": got(outbox, state="overdue"),
        "outbox: discarded": got(outbox, state="discarded"),
        "outbox: event": got(outbox, name="shop.order.event5"),
        "outbox: event without rows": got(outbox, name="shop.import"),
        "outbox: failed, event without rows": got(outbox, name="shop.import", state="failed"),
        "outbox: page 50": got(outbox, p="50" if waits[:2500].count() == 2500 else "1"),
        "outbox: newest first": got(outbox, o="-1"),
        "outbox: search": got(outbox, q=waiting.event_id),
        "outbox: a single character": got(outbox, q="a"),
        "outbox: event page": got(address("outboxevent", "change", waiting.pk)),
        "outbox: confirmation of 100": posted(outbox, world.select(failed, "publish")),
        "find: event id": got(address("dashboard", "find"), q=waiting.event_id),
        "batches": got(listed),
        "batches: running": got(listed, state="running"),
        "batch": got(address("replaybatch", "change", batch.pk)),
        "batch: events": got(events, state="all", batch=str(batch.pk)),
        "batch: events, succeeded": got(events, state="all", batch=f"{batch.pk}.succeeded"),
    }


if __name__ == "__main__":
    sys.exit(main())

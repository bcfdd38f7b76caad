"""The pages of failure groups on PostgreSQL: queries, and time in the database.

``python scripts/postgresql.py .venv/bin/python -m benchmarks.groups [--rows 1000000]``: makes
archived events with bodies of 5 kB and failures with documents of 20 kB, in 3,330 groups with the
tallies of 48 hours and 2,000 changes that nobody has added up yet; opens each page, prints queries
and milliseconds in the database, and the plans of the slowest page. Exits with 1 where a page
needs more than 200 ms in the database.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import archive_admin as pages_of_events  # sets Django up

from django.contrib.auth.models import User  # isort: skip
from django.core.management import call_command  # isort: skip
from django.db import connection  # isort: skip
from django.db.models import Count  # isort: skip
from django.test import Client, override_settings  # isort: skip
from django.urls import reverse  # isort: skip

from django_amqp_events import groups  # isort: skip
from django_amqp_events.models import ArchivedEvent, FailureGroup  # isort: skip
from tests.unit import admin_world as world  # isort: skip

LIMIT = 200.0

PLACE = """
UPDATE django_amqp_events_archivedevent SET
    location = 'billing.tax:28 in rate' || ('x' || left(md5(event_id), 4))::bit(16)::int %% 30
"""
GROUPS = """
INSERT INTO django_amqp_events_failuregroup (
    id, algorithm, service, handler, exception, frame, reason, first_seen, last_seen, open, again,
    going, note, assignee, ticket, edits, came_back_at, put_right_at)
SELECT md5(handler || exception || location)::uuid, 1, 'billing', handler, exception, location, '',
    min(first_failed_at), max(last_failed_at), 0, 0, 0, '', '', '', 0,
    CASE WHEN left(md5(exception), 1) = '7' THEN now() END, now()
FROM django_amqp_events_archivedevent GROUP BY handler, exception, location
"""
MEMBERS = """
UPDATE django_amqp_events_archivedevent SET group_id = md5(handler || exception || location)::uuid
"""
TALLIES = """
INSERT INTO django_amqp_events_archivetally (group_id, hour, archived, succeeded, discarded)
SELECT id, date_trunc('hour', now()) - h * interval '1 hour', 20 + h, h, 1
FROM django_amqp_events_failuregroup, generate_series(0, 47) h
"""
CHANGES = """
INSERT INTO django_amqp_events_tallychange (
    group_id, at, hour, open, again, going, archived, succeeded, discarded)
SELECT id, now(), date_trunc('hour', now()), 0, 0, 0, 1, 0, 0
FROM django_amqp_events_failuregroup LIMIT 2000
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="The pages of failure groups on PostgreSQL.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    options = parser.parse_args()
    if connection.vendor != "postgresql":
        sys.exit("Run it below scripts/postgresql.py: this database is " + connection.vendor)
    call_command("migrate", verbosity=0)
    client = Client(headers={"host": "localhost"})
    client.force_login(User.objects.create_superuser("ada"))
    with override_settings(**world.SETTINGS, ALLOWED_HOSTS=["localhost"], AMQP_EVENTS=world.EVENTS):
        began = time.monotonic()
        pages_of_events.fill(1, options.rows)
        with connection.cursor() as cursor:
            for sql in (PLACE, GROUPS, MEMBERS, TALLIES):
                cursor.execute(sql, [])
            cursor.execute("VACUUM ANALYZE")
        made = time.monotonic() - began
        began = time.monotonic()
        corrected = groups._correct()  # noqa: SLF001
        print(f"{corrected} groups counted in {time.monotonic() - began:.1f} s")
        began = time.monotonic()
        folded = groups.fold_all()
        print(f"{folded} changes added up in {time.monotonic() - began:.1f} s")
        with connection.cursor() as cursor:
            cursor.execute(CHANGES, [])
            cursor.execute("ANALYZE")
        print(
            f"{options.rows} rows in {FailureGroup.objects.count()} groups made in {made:.0f} s, "
            f"{pages_of_events.size()} on disk\n"
        )
        found = pages_of_events.measured(client, pages(client))
        print(f"{'page':<44}{'queries':>8}{'ms in the database':>20}{'ms waited for':>15}")
        for name, (queries, served, waited) in found.items():
            wrong = "  <- too much" if served > LIMIT else ""
            print(f"{name:<44}{queries:>8}{served:>20.1f}{waited:>15.1f}{wrong}")
        slowest = max(found, key=lambda name: found[name][1])
        print(f"\nThe slowest query of the slowest page, {slowest}:\n")
        plans = pages_of_events.explain(pages(client)[slowest]).split("\n\n")
        print(max(plans, key=lambda plan: sum(map(float, pages_of_events._TIME.findall(plan)))))  # noqa: SLF001
    return int(any(served > LIMIT for _, served, _ in found.values()))


def pages(client: Client) -> dict[str, Callable[[], Any]]:
    prefix = "admin:django_amqp_events_failuregroup"
    url, events = reverse(f"{prefix}_changelist"), world.url("changelist")
    largest = (
        ArchivedEvent.objects.filter(state="archived")
        .values("group")
        .annotate(count=Count("*"))
        .order_by("-count")
        .values_list("group", flat=True)[0]
    )
    settled = FailureGroup.objects.filter(handler="settled")[0].pk

    def got(address: str, **query: str) -> Callable[[], Any]:
        return lambda: client.get(address, query)

    return {
        "groups: open": got(url),
        "groups: all": got(url, state="all"),
        "groups: most open first": got(url, o="-3"),
        "groups: page 20": got(url, p="20"),
        "groups: came back": got(url, state="back"),
        "groups: nothing open": got(url, state="right"),
        "groups: handler": got(url, handler="book"),
        "groups: exception": got(url, exception="billing.errors.Error7"),
        "groups: assignee": got(url, assignee=""),
        "groups: search": got(url, q="Error7"),
        "group": got(reverse(f"{prefix}_change", args=[largest])),
        "group with nothing open": got(reverse(f"{prefix}_change", args=[settled])),
        "events of a group": got(events, group=str(largest)),
        "events of a group, all": got(events, group=str(largest), state="all"),
        "events of a group, succeeded": got(events, group=str(largest), state="succeeded"),
        "confirmation: replay all": lambda: client.post(
            reverse(f"{prefix}_replay", args=[largest])
        ),
        "confirmation: discard all": lambda: client.post(
            reverse(f"{prefix}_discard", args=[largest])
        ),
    }


if __name__ == "__main__":
    sys.exit(main())

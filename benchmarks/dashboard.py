"""The dashboard on PostgreSQL: queries, and time in the database, with many open events.

``python scripts/postgresql.py .venv/bin/python -m benchmarks.dashboard [--rows 1000000]``: half of
the events failed within the last 24 hours, and a week of snapshots is there. Opens each page with
10 events and with all of them, as ``benchmarks.archive_admin`` does, and exits with 1 as that does.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from datetime import UTC, datetime, timedelta

from benchmarks import archive_admin as archive  # sets Django up

# isort: split

from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import connection
from django.test import Client, override_settings
from django.urls import reverse

from django_amqp_events import figures, snapshots
from django_amqp_events.models import Snapshot
from tests.unit import admin_world as world


def main() -> int:
    parser = argparse.ArgumentParser(description="The dashboard on PostgreSQL.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--explain", metavar="PAGE", help="print the plans of this page's queries")
    options = parser.parse_args()
    if connection.vendor != "postgresql":
        sys.exit("Run it below scripts/postgresql.py: this database is " + connection.vendor)
    call_command("migrate", verbosity=0)
    client = Client(headers={"host": "localhost"})
    client.force_login(User.objects.create_superuser("ada"))
    pages = {
        page: reverse(f"admin:django_amqp_events_dashboard_{page}", urlconf=world.__name__)
        for page in ("changelist", "topology", "retries")
    }
    archive.pages = lambda client: {  # type: ignore[assignment]
        name: lambda url=url: client.get(url) for name, url in pages.items()
    }
    with override_settings(**world.SETTINGS, ALLOWED_HOSTS=["localhost"], AMQP_EVENTS=world.EVENTS):
        fill(1, 10, options.rows)
        week()
        few = archive.measured(client)
        began = time.monotonic()
        fill(11, options.rows, options.rows)
        print(f"{options.rows} events made in {time.monotonic() - began:.0f} s, {archive.size()}\n")
        many = archive.measured(client)
        if options.explain:
            print(archive.explain(lambda: client.get(pages[options.explain])))
        began = time.monotonic()
        figures.standing(cap=figures.CAP)
        figures.new_since(datetime.now(UTC) - figures.HOUR, figures.READ)
        took = 1000 * (time.monotonic() - began)
    failed = False
    for name, (queries, served, waited) in many.items():
        wrong = queries > few[name][0] or served > archive.LIMIT
        failed = failed or wrong
        print(
            f"{name:<12} queries {few[name][0]} and {queries}, in the database {few[name][1]:.1f} "
            f"and {served:.1f} ms, waited for {waited:.1f} ms{'  <- too much' if wrong else ''}"
        )
    print(f"what a snapshot asks of the archive: {took:.1f} ms")
    return int(failed)


def fill(first: int, last: int, rows: int) -> None:
    # Half of them within a day, the rest before.
    sql = archive.ROWS.replace(
        "n * interval '30 seconds'",
        f"(CASE WHEN n <= {rows // 2} THEN n * interval '{2 * 86_000 / rows} seconds' "
        f"ELSE n * interval '5 seconds' END)",
    )
    # No page of these reads a body: what counts is how many rows are on one of the table's pages.
    sql = re.sub(
        r"convert_to\(.*?'UTF8'\)", "decode(repeat(md5(n::text), 35), 'hex')", sql, flags=re.DOTALL
    )
    with connection.cursor() as cursor:
        cursor.execute(sql, [first, last])
        cursor.execute("VACUUM ANALYZE")


def week() -> None:
    now = datetime.now(UTC)
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
    Snapshot.objects.bulk_create(
        (
            Snapshot(
                at=now - timedelta(seconds=snapshots.EVERY * n),
                service="billing",
                seen=True,
                open=n,
                document=document,
            )
            for n in range(int(7 * 86_400 / snapshots.EVERY))
        ),
        batch_size=2000,
    )


if __name__ == "__main__":
    sys.exit(main())

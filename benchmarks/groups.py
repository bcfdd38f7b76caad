"""Failure groups counted from the index of open events, among a million events.

``.venv/bin/python -m benchmarks.groups`` for SQLite; with ``python scripts/postgresql.py`` or
``python scripts/mariadb.py`` in front for the others. It tells whether the counters of
``archive/groups/group_counts.py`` are needed: each page of the groups is read with the counters,
and by counting open events, at most 10,000 of each group. A figure is the best of some runs, of
the page's statements; on SQLite in processor time of this process.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")

import django

django.setup()

from django.core.management import call_command  # noqa: E402 - needs Django's settings
from django.db import connection  # noqa: E402

from django_amqp_events.archive.groups import failure_groups, group_counts  # noqa: E402
from django_amqp_events.models import ArchivedEvent, FailureGroup  # noqa: E402

#: Groups on a page of the admin.
PAGE: Final = 50
CAP: Final = 10_000
EVENT, GROUP = (model._meta.db_table for model in (ArchivedEvent, FailureGroup))  # noqa: SLF001
#: Of the number i: a UUID, a time in the last twelve days, empty bytes, and all numbers.
SQL: Final = {
    "postgresql": (
        "lpad(to_hex({}), 32, '0')::uuid",
        "now() - ({rows} - i) * interval '1 second'",
        "''::bytea",
        "(SELECT generate_series(1, {n}) AS i) n",
    ),
    "sqlite": (
        "printf('%032x', {})",
        "datetime('now', (i - {rows}) || ' seconds')",
        "x''",
        "(WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n WHERE i < {n}) SELECT i FROM n)",  # noqa: E501
    ),
    "mysql": (
        "CAST(CONCAT('00000000-0000-0000-0000-', LPAD(HEX({}), 12, '0')) AS UUID)",
        "DATE_SUB(UTC_TIMESTAMP(6), INTERVAL ({rows} - i) SECOND)",
        "''",
        "(SELECT seq AS i FROM seq_1_to_{n}) n",
    ),
}
EMPTY: Final = {
    "postgresql": f"TRUNCATE {EVENT}, {GROUP} CASCADE",
    "sqlite": f"DELETE FROM {EVENT}; DELETE FROM {GROUP}",  # noqa: S608
    "mysql": f"SET foreign_key_checks = 0; TRUNCATE {EVENT}; TRUNCATE {GROUP}",
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Failure groups counted from an index.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="groups-") as directory:
        if connection.vendor == "sqlite":
            connection.settings_dict["NAME"] = Path(directory) / "archive.sqlite3"
        call_command("migrate", verbosity=0)
        print(f"{connection.vendor}: {options.rows} events")
        print(f"{'groups':>7} {'open':>6}  {'page':<24}{'counters':>10}{'counted':>10}  ms")
        # Few large groups; as benchmarks.pages; many small ones with little open.
        for groups, percent in ((100, 100), (1_000, 50), (20_000, 10)):
            fill(options.rows, groups, percent)
            for name, (by_counters, by_counting) in pages().items():
                if len(by_counters()) != len(by_counting()):
                    raise AssertionError(f"{name}: the counters and the events differ")
                times = [best(run, options.runs) for run in (by_counters, by_counting)]
                written = "".join(f"{ms:>10.1f}" for ms in times)
                print(f"{groups:>7} {percent:>4} %  {name:<24}{written}", flush=True)
        connection.close()
    return 0


def pages() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Return how each page reads its groups, with counters and by counting."""
    by_last = "ORDER BY g.last_seen DESC, g.id DESC"
    is_open = f"EXISTS (SELECT 1 FROM {EVENT} e WHERE e.group_id = g.id AND e.state = 'archived')"  # noqa: S608
    return {
        "open": (counters("-last_seen", open_now__gt=0), counting(is_open, by_last)),
        "nothing open": (counters("-last_seen", open_now=0), counting(f"NOT {is_open}", by_last)),
        "most open first": (counters("-open_now", open_now__gt=0), most_open_first),
    }


def counters(order: str, **wanted: Any) -> Callable[[], Any]:
    def run() -> list[Any]:
        groups = group_counts.with_exact_counts(failure_groups.groups())
        return list(groups.filter(**wanted).order_by(order, "-pk")[:PAGE])

    return run


def counting(where: str, order: str) -> Callable[[], Any]:
    def run() -> Any:
        groups = read(f"SELECT g.id FROM {GROUP} g WHERE {where} {order} LIMIT {PAGE}")  # noqa: S608
        return capped([pk for (pk,) in groups])

    return run


def capped(groups: list[Any]) -> Any:
    """Count the open events of groups, up to the cap; one statement for all of them."""
    one = (
        f"SELECT COUNT(*) FROM (SELECT 1 FROM {EVENT} WHERE group_id = %s AND state = 'archived' "  # noqa: S608
        f"LIMIT {CAP + 1}) c{{}}"
    )
    if not groups:
        return []
    return read(" UNION ALL ".join(one.format(index) for index in range(len(groups))), groups)


def most_open_first() -> Any:
    """Count all groups, without a cap: a cap would need a statement for each group."""
    return read(
        f"SELECT group_id, COUNT(*) AS n FROM {EVENT} WHERE state = 'archived' "  # noqa: S608
        f"AND group_id IS NOT NULL GROUP BY group_id ORDER BY n DESC LIMIT {PAGE}"
    )


def read(sql: str, values: list[Any] | None = None) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        return cursor.fetchall()


def best(run: Callable[[], object], runs: int) -> float:
    """Return the milliseconds of the fastest run."""
    clock = time.process_time if connection.vendor == "sqlite" else time.perf_counter
    times = []
    for _ in range(runs):
        began = clock()
        run()
        times.append(clock() - began)
    return min(times) * 1000


def fill(rows: int, groups: int, percent: int) -> None:
    """Store groups with equal shares of the events; so many percent of each are open."""
    pk, at, empty, numbers = SQL[connection.vendor]
    at = at.format(rows=rows)
    of_event, of_group, its_group = (
        pk.format(*[number] * pk.count("{}")) for number in ("i", "i", f"((i % {groups}) + 1)")
    )
    false = "false" if connection.vendor == "postgresql" else "0"
    # Spread over each group.
    place = f"i DIV {groups}" if connection.vendor == "mysql" else f"i / {groups}"
    state = (
        f"CASE WHEN (({place}) * {percent}) % 100 < {percent} THEN 'archived' ELSE 'succeeded' END"
    )
    text = "CONCAT('{}', i)" if connection.vendor == "mysql" else "'{}' || i"
    with connection.cursor() as cursor:
        for statement in EMPTY[connection.vendor].split("; "):
            cursor.execute(statement)
        cursor.execute(
            f"INSERT INTO {GROUP} (id, service, handler, exception, frame, reason, "  # noqa: S608
            f"first_seen, last_seen, open, going, note, assignee, ticket, edits) "
            f"SELECT {of_group}, 'billing', 'send_invoice', 'billing.TaxError', "
            f"{text.format('billing in f')}, '', {at}, {at}, 0, 0, "
            f"'', '', '', 0 FROM {numbers.format(n=groups)}"
        )
        cursor.execute(
            f"INSERT INTO {EVENT} (id, service, handler, queue, name, event_id, source, "  # noqa: S608
            f"correlation_id, causation_id, first_failed_at, last_failed_at, mirrored_at, state, "
            f"state_since, version, reason, detail, exception, message, location, group_id, "
            f"attempts, replays, unconfirmed, error, body, body_size, headers_raw, content_type, "
            f"content_encoding) "
            f"SELECT {of_event}, 'billing', 'send_invoice', 'billing.send_invoice', 'shop.order', "
            f"{text.format('event-')}, 'shop', '', '', {at}, {at}, {at}, {state}, {at}, 0, "
            f"'exhausted', '', 'billing.TaxError', '', '', {its_group}, 1, 0, {false}, '', "
            f"{empty}, 0, {empty}, 'application/json', 'utf-8' FROM {numbers.format(n=rows)}"
        )
        group_counts.recount(using="default", now=datetime.now(UTC))
        failure_groups.fold_all_counts()
        analyze = {"postgresql": "VACUUM ANALYZE", "sqlite": "ANALYZE"}
        cursor.execute(analyze.get(connection.vendor, f"ANALYZE TABLE {EVENT}, {GROUP}"))


if __name__ == "__main__":
    sys.exit(main())

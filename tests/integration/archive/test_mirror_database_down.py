"""A running mirror loses its database and broker: it logs that and resumes."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from django.db import connections

from django_amqp_events.archive import mirror
from django_amqp_events.models import (
    ArchivedEvent,
    ArchivedFailure,
)
from tests.conftest import EACH, ONE, SLOW, archive_in

from ..archiving import archived, publish, received
from ..conftest import wait_until
from ..processes import mirrors

LOCKED = "paused: another process has locked the database (OperationalError: database is locked)"


def some(first: Any, last: Any) -> Any:
    return [archived(received(f"order-{n}")) for n in range(first, last)]


def stored(number: Any) -> Any:
    wait_until(lambda: ArchivedEvent.objects.count() >= number, f"{number} rows", 60)
    assert ArchivedEvent.objects.count() == ArchivedFailure.objects.count() == number


@SLOW
@pytest.mark.parametrize("private_server", ["mariadb"], indirect=True)
def test_a_message_is_larger_than_a_packet(
    billing, private_server, monkeypatch, transactional_db, django_db_blocker
):
    monkeypatch.setattr(mirror, "REREAD_SECONDS", 0.5)
    said: list[str] = []

    def allow(size: int) -> None:
        private_server.execute(f"SET GLOBAL max_allowed_packet = {size}")

    large = b"[[],{},{}]" + b" " * 1024 * 1024
    messages = [archived(received(f"order-{n}", body=large if n == 4 else None)) for n in range(10)]
    running = mirror.Mirror(
        app=billing.app,
        settings=billing.settings,
        tell=said.append,
        # After the others are stored.
        mirrored=lambda _: allow(16 * 1024 * 1024) if running.total.events == 9 else None,
        stop=lambda: running.total.events == 10,
    )
    with django_db_blocker.unblock(), archive_in("mariadb", private_server.settings()) as database:
        database.migrate()
        allow(1024 * 1024)
        publish(billing, *messages)
        running.run()
        assert ArchivedEvent.objects.get(event_id="order-4").body_size == len(large)
    assert "a message cannot be stored and stays in the archive queue" in said[0]
    assert "raise the server's max_allowed_packet" in said[0]
    assert billing.ready("billing:archive") == 0


@ONE
def test_sqlite_locked_for_longer_than_the_timeout(billing, archive_database, tmp_path):
    impatient = {**archive_database.settings, "OPTIONS": {"timeout": 0.3}}
    with mirrors(
        billing.vhost, replace(archive_database, settings=impatient), tmp_path
    ) as processes:
        with closing(sqlite3.connect(archive_database.path)) as writer:
            writer.execute("BEGIN IMMEDIATE")
            running = processes.start()
            publish(billing, *some(0, 50))
            wait_until(lambda: LOCKED in running.said, "it says so", 60)
            writer.rollback()
        stored(50)
        assert running.stop() == 0


@EACH
def test_one_missing_table_is_waited_for(billing, archive_database, tmp_path):
    """As in the middle of a migration, where it is no transaction."""
    table, away = ArchivedFailure._meta.db_table, "elsewhere"

    def rename(old: str, new: str) -> None:
        with connections["archive"].cursor() as cursor:
            cursor.execute(f"ALTER TABLE {old} RENAME TO {new}")

    rename(table, away)
    try:
        publish(billing, *some(0, 5))
        with mirrors(billing.vhost, archive_database, tmp_path) as processes:
            running = processes.start()
            wait_until(lambda: "paused: a table is missing;" in running.said, "it says so", 60)
            billing.wait_for_ready("billing:archive", 5)
            rename(away, table)
            stored(5)
            assert "cannot be stored" not in running.said
            assert running.stop() == 0
    except BaseException:
        rename(away, table)
        raise


@ONE
def test_the_archive_queue_is_deleted_and_declared_again(billing, archive_database, tmp_path):
    with mirrors(billing.vhost, archive_database, tmp_path) as processes:
        running = processes.start()
        publish(billing, *some(0, 3))
        stored(3)
        billing.channel().queue_delete("billing:archive")
        wait_until(lambda: "was it deleted?" in running.said, "it says so")
        wait_until(lambda: "run `manage.py events_declare`" in running.said, "it says so")
        billing.declare()
        publish(billing, *some(3, 6))
        stored(6)
        assert running.stop() == 0

"""``events_mirror`` in processes: what it says, how it ends, what it waits for, several at once."""

from __future__ import annotations

import random
import re
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connections

from django_amqp_events.archive import mirror
from django_amqp_events.archive import states as event_states
from django_amqp_events.message.types import Message
from django_amqp_events.models import ArchivedEvent, ArchivedFailure, Replay, State
from tests.conftest import EACH, ONE, SLOW, archive_in

from ..archiving import (
    FAILURE,
    archived,
    mirror_until_empty,
    outcome,
    publish,
    received,
    store,
    taken,
)
from ..conftest import wait_until

ARCHIVE = "billing:archive"
NOW = datetime(2026, 1, 1, tzinfo=UTC)


@ONE
def test_until_empty_reports_its_counts(billing, processes):
    assert (
        mirror_until_empty(processes).splitlines()[-1] == "events_mirror: stopped; nothing in all"
    )
    message = archived(received("1"))
    publish(billing, *(archived(received(f"{n}")) for n in range(2, 41)), message, message)
    said = mirror_until_empty(processes, "--batch-size", "7").splitlines()
    assert said[0] == f"events_mirror: mirroring {ARCHIVE}"
    assert said[-1] == "events_mirror: stopped; 40 new events, 1 known already in all"


@ONE
def test_sigterm_ends_it_with_everything_acked(billing, processes):
    """A socket that is closed with messages unread would take the last acks with it."""
    mirroring = processes.start("events_mirror", "--batch-size", "2")
    publish(billing, *(archived(received(f"{n}")) for n in range(600)))
    wait_until(lambda: ArchivedEvent.objects.count() > 100, "it is at work", 60)
    assert mirroring.stop() == 0
    stored = ArchivedEvent.objects.count()
    [total] = re.findall(r"stopped; (\d+) new events in all", mirroring.log)
    assert int(total) == stored
    wait_until(lambda: billing.ready(ARCHIVE) == 600 - stored, "what it had is acked")
    assert "known" not in mirror_until_empty(processes)


def some(first: int, last: int) -> list[Message]:
    return [archived(received(f"order-{n}")) for n in range(first, last)]


def stored(number: int) -> None:
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

    def stop() -> bool:
        if running.total.events == 9:  # the others are stored
            allow(16 * 1024 * 1024)
        return running.total.events == 10

    running = mirror.Mirror(
        app=billing.app,
        settings=billing.settings,
        tell=said.append,
        stop=stop,
    )
    with django_db_blocker.unblock(), archive_in("mariadb", private_server.settings()) as database:
        database.migrate()
        allow(1024 * 1024)
        publish(billing, *messages)
        running.run()
        assert ArchivedEvent.objects.get(event_id="order-4").body_size == len(large)
    assert "a message cannot be stored and stays in the archive queue" in said[0]
    assert billing.ready(ARCHIVE) == 0


@EACH
def test_one_missing_table_is_waited_for(billing, processes):
    """As in the middle of a migration, where it is no transaction."""
    table, away = ArchivedFailure._meta.db_table, "elsewhere"

    def rename(old: str, new: str) -> None:
        with connections["archive"].cursor() as cursor:
            cursor.execute(f"ALTER TABLE {old} RENAME TO {new}")

    rename(table, away)
    try:
        publish(billing, *some(0, 5))
        mirroring = processes.start("events_mirror")
        wait_until(lambda: "paused: a table is missing;" in mirroring.log, "it says so", 60)
        billing.wait_for_ready(ARCHIVE, 5)
        rename(away, table)
        stored(5)
        assert "cannot be stored" not in mirroring.log
        assert mirroring.stop() == 0
    except BaseException:
        rename(away, table)
        raise


@EACH
def test_concurrent_mirrors_store_each_message_once(billing, processes, archive_database):
    """The messages of one event may reach different mirrors, some twice."""
    number = 2 if archive_database.kind == "sqlite" else 4
    replayed = [received(f"replayed-{n}") for n in range(150)]
    store([taken(archived(each)) for each in replayed])
    rows = {row.event_id: row for row in ArchivedEvent.objects.all()}
    claimed = event_states.claim(
        {row.pk: row.version for row in rows.values()},
        handlers={row.pk: row.handler for row in rows.values()},
        by="ada",
        reason="",
        now=NOW,
    )
    event_states.published(claimed, now=NOW)
    replays = {each.event.event_id: str(each.pk) for each in claimed}
    messages: list[Message]
    expected: Counter[State]
    messages, expected = [], Counter[State]()
    for n, each in enumerate(replayed):
        event_id = f"replayed-{n}"
        ends = ("failed", "succeeded", "both")[n % 3]
        if ends != "succeeded":
            messages += [archived(each, attempt=2, replay_id=replays[event_id])] * 2
        if ends != "failed":
            messages += [outcome(rows[event_id], replays[event_id])] * 2
        expected[State.ARCHIVED if ends == "failed" else State.SUCCEEDED] += 1
    fresh = [received(f"fresh-{n}") for n in range(300)]
    for each in fresh:
        for attempt in (3, 4):
            at = NOW + timedelta(minutes=attempt)
            messages += [archived(each, attempt=attempt, at=at)] * 2
        expected[State.ARCHIVED] += 1
    random.Random(number).shuffle(messages)
    server = archive_database.server
    deadlocks = server.log.count("deadlock detected") if server else 0
    publish(billing, *messages)
    running = [
        processes.start("events_mirror", "--until-empty", "--batch-size", "40")
        for _ in range(number)
    ]
    assert [each.wait() for each in running] == [0] * number
    said = "".join(each.log for each in running) + mirror_until_empty(processes)
    assert "paused" not in said, said
    assert "cannot be stored" not in said
    assert (server.log.count("deadlock detected") if server else 0) == deadlocks
    states = Counter(ArchivedEvent.objects.values_list("state", flat=True))
    assert states == expected
    assert ArchivedFailure.objects.count() == 150 + 100 + 2 * 300
    assert ArchivedFailure.objects.filter(replay__isnull=False).count() == 100
    # Success, whether it was reported before the failure or after it, is final.
    assert Counter(Replay.objects.values_list("state", flat=True)) == {
        "failed": 50,
        "succeeded": 100,
    }
    again = ArchivedEvent.objects.filter(state=State.ARCHIVED, event_id__startswith="replayed")
    assert set(again.values_list("attempts", flat=True)) == {3 + 2}
    assert set(again.values_list("unconfirmed", "error")) == {(False, None)}
    once = ArchivedEvent.objects.filter(event_id__startswith="fresh")
    assert set(once.values_list("attempts", "last_failed_at")) == {(4, NOW + timedelta(minutes=4))}
    assert set(once.values_list("exception", flat=True)) == {FAILURE.exception}
    assert billing.ready(ARCHIVE) == 0

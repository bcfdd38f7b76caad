"""Storing messages of the archive: whatever they are, each is counted once and kept."""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import DataError, InterfaceError, OperationalError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from django_amqp_events import conf
from django_amqp_events.archive import row_writer, states
from django_amqp_events.archive.entries import read_entries
from django_amqp_events.archive.mirror import MAX_ASIDE, Mirror
from django_amqp_events.archive.row_writer import Counts
from django_amqp_events.message import archive_message
from django_amqp_events.message.archive_message import Archived, Outcome
from django_amqp_events.message.types import Received
from django_amqp_events.models import (
    ArchivedEvent,
    ArchivedFailure,
    Replay,
    State,
)
from tests.integration.archiving import archived, outcome, received, store, store_items, taken
from tests.unit.message.test_fuzz_messages import received as received_

NOW = datetime(2026, 1, 1, tzinfo=UTC)
EARLIER, LATER = NOW - timedelta(hours=1), NOW + timedelta(hours=1)


def keep(*messages: Any) -> Counts:
    return store([taken(message) for message in messages])


def claim(row: Any, **more: Any) -> Any:
    [claimed] = states.claim(
        {row.pk: row.version}, handlers={row.pk: row.handler}, by="ada", reason="", now=NOW, **more
    )
    return claimed


def replayed(row: Any) -> Any:
    """Replay a row; returns the replay's id."""
    row.refresh_from_db()
    claimed = claim(row)
    states.published([claimed], now=NOW)
    return str(claimed.pk)


@pytest.fixture
def row(transactional_db: Any) -> Any:
    keep(archived(received("1"), at=EARLIER))
    return ArchivedEvent.objects.get()


def failed(replay_id: Any = None, at: Any = LATER, attempt: Any = 2) -> Any:
    return archived(received("1"), replay_id=replay_id, at=at, attempt=attempt)


def state(row: Any) -> Any:
    row.refresh_from_db()
    return row.state, row.attempts


# -- what comes in which order ---------------------------------------------------------------------


def test_a_failure_after_a_discard_opens_it_again(row):
    states.discard({row.pk: row.version}, by="ada", reason="old", now=NOW)
    keep(failed(at=EARLIER + timedelta(minutes=1), attempt=4))
    assert state(row) == (State.DISCARDED, 3)
    before = row.mirrored_at
    keep(failed(at=LATER, attempt=2))
    assert state(row) == (State.ARCHIVED, 5)
    assert row.mirrored_at > before, "it may reopen its group"
    assert sorted(ArchivedFailure.objects.values_list("late", flat=True)) == [False, False, True]


def test_outcome_of_an_older_replay_is_history(row):
    first = replayed(row)
    keep(failed(first))
    second = replayed(row)
    keep(outcome(row, first), failed(first, at=LATER + timedelta(minutes=1)))
    assert state(row) == (State.REPLAYING, 5)
    assert sorted(ArchivedFailure.objects.values_list("late", flat=True)) == [False, False, True]
    assert Replay.objects.get(pk=first).state == Replay.State.SUCCEEDED
    keep(outcome(row, second))
    assert state(row) == (State.SUCCEEDED, 5)


@pytest.mark.parametrize("is_replay", [False, True])
def test_the_last_run_describes_an_event(row, is_replay):
    """A replay is the last one, also by a clock that is behind; a second copy is not."""
    replay_id = replayed(row) if is_replay else None
    at = EARLIER - timedelta(minutes=1)
    keep(archived(received("1"), replay_id=replay_id, at=at, reason="failed"))
    row.refresh_from_db()
    assert (row.reason, row.last_failed_at) == ("failed" if is_replay else "exhausted", EARLIER)


def test_failure_of_a_pruned_event_makes_a_new_row(row):
    replay_id = replayed(row)
    row.delete()
    counts = keep(failed(replay_id), outcome(row, replay_id))
    assert (counts.events, counts.foreign) == (1, 1)
    assert ArchivedFailure.objects.get().replay is None


def test_event_pruned_during_a_store(row, monkeypatch):
    """The replay is deleted before its failure is written, so it is read again."""
    replay_id = replayed(row)
    real = row_writer._find_replays
    calls: list[Any] = []

    def find(*args: Any) -> Any:
        found = real(*args)
        if not calls:
            ArchivedEvent.objects.all().delete()
        calls.append(found)
        return found

    monkeypatch.setattr(row_writer, "_find_replays", find)
    assert keep(failed(replay_id)).events == 1
    assert len(calls) == 2
    assert ArchivedFailure.objects.get().replay is None


# -- what a database or a message can do -----------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_refused_message_is_kept_as_bytes(monkeypatch, caplog):
    real = row_writer.new_row

    def row(entry: Any, *args: Any) -> Any:
        if entry.archived.event and entry.archived.event.id == "3":
            raise DataError("no such character")
        return real(entry, *args)

    monkeypatch.setattr(row_writer, "new_row", row)
    with caplog.at_level(logging.CRITICAL):
        counts = keep(*(archived(received(f"{n}")) for n in range(7)))
    assert (counts.events, counts.unreadable, counts.messages) == (7, 1, 7)
    kept = ArchivedEvent.objects.get(reason="unreadable")
    assert "no such character" in kept.detail
    assert bytes(kept.body) == received("3").body


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("error", [OperationalError, InterfaceError])
def test_unreachable_database_blames_no_message(monkeypatch, error):
    def away(*args: Any) -> Any:
        raise error("gone")

    monkeypatch.setattr(row_writer, "_store_events", away)
    with pytest.raises(error):
        keep(archived(), archived())
    assert not ArchivedEvent.objects.exists()


def batch(*messages: Any) -> Any:
    return SimpleNamespace(messages=[taken(each) for each in messages], last=len(messages))


def intake(acked: list[Any]) -> Any:
    return SimpleNamespace(ack=lambda _, places: acked.append([*places]))


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("kind", [OperationalError, DataError])
def test_unstorable_message_is_put_aside(monkeypatch, kind):
    """A statement that times out while the database is healthy, or a row that it refuses."""
    real = row_writer.new_row

    def row(entry: Any, *args: Any) -> Any:
        if entry.archived.event is None or entry.archived.event.id == "3":
            raise kind("no")
        return real(entry, *args)

    monkeypatch.setattr(row_writer, "new_row", row)
    said: list[str] = []
    acked: list[Any] = []
    mirroring = Mirror(app=None, settings=conf.get_settings(), tell=said.append)
    mirroring._mirror(intake(acked), batch(*(archived(received(f"{n}")) for n in range(7))))
    mirroring._mirror(intake(acked), batch(archived(received("7"))))
    # Not all up to the last one any more, which would ack it too.
    assert acked == [[0, 1, 2, 4, 5, 6], [0]]
    assert (mirroring.aside, ArchivedEvent.objects.count()) == (1, 7)
    assert len(said) == 1
    assert f"stays in the archive queue ({kind.__name__}: no" in said[0]


@pytest.mark.django_db(transaction=True)
def test_a_database_that_stores_nothing_is_an_error(monkeypatch):
    """As with a full disk: it answers queries, and the mirror must not be taken for healthy."""

    def row(*_: Any) -> Any:
        raise OperationalError("No space left on device")

    monkeypatch.setattr(row_writer, "new_row", row)
    acked: list[Any] = []
    mirroring = Mirror(app=None, settings=conf.get_settings())
    number = MAX_ASIDE + 1
    with pytest.raises(OperationalError, match="No space"):
        mirroring._mirror(
            intake(acked), batch(*(archived(received(f"{n}")) for n in range(number)))
        )
    assert not acked


# -- anything --------------------------------------------------------------------------------------


@pytest.mark.django_db
@settings(
    max_examples=int(os.environ.get("AMQP_EVENTS_FUZZ", "30")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(messages=st.lists(received_, min_size=1, max_size=4))
def test_any_messages_are_stored_and_counted(messages):
    counts = store(messages)
    assert counts.messages == len(messages)
    assert counts.unreadable == sum(bool(message.unreadable) for message in messages)
    for row in ArchivedEvent.objects.all():
        assert bytes(row.body) in {message.body for message in messages}
        assert isinstance(row.headers, dict)
    rows = {bytes(body) for body in ArchivedEvent.objects.values_list("body", flat=True)}
    assert {message.body for message in messages if message.body} <= rows
    items = read_entries(messages, conf.get_settings())
    store_items(items)
    again = store_items(items)
    assert again.messages == len(messages)
    assert (again.events, again.failures) == (0, 0)
    ArchivedEvent.objects.all().delete()


def test_a_worker_whose_clock_is_ahead_is_not_believed(archive_database):
    ahead = datetime.now(UTC) + timedelta(hours=2)
    keep(archived(received("1"), at=ahead))
    [row] = ArchivedEvent.objects.all()
    assert row.first_failed_at == row.last_failed_at <= row.mirrored_at < ahead
    assert row.failure_set.get().failed_at == row.last_failed_at


# -- what is read: nothing is believed to be what it should be -------------------------------------


def delivery(headers: Any, body: Any = b"x", **more: Any) -> Any:
    return Received(
        queue="billing:archive", exchange="", routing_key="a.b", body=body, headers=headers,
        properties={"content_type": "application/json"}, **more,
    )  # fmt: skip


def read(headers: Any, body: Any = b"x", **more: Any) -> Archived:
    found = archive_message.read(delivery(headers, body, **more))
    assert isinstance(found, Archived)
    return found


def identity(headers: Any, body: Any = b"x", **more: Any) -> Any:
    return read(headers, body, **more).identity("billing")


def test_counts_of_deliveries_are_in_no_identity_and_no_row():
    one = {"a": 1, "event-archive": '{"reason": "failed"}'}
    again = read({"x-delivery-count": 3, **one, "x-acquired-count": 4})
    assert again.headers == read(one).headers == {"a": 1}
    assert again.identity("billing") == identity(one) is not None
    copy = {"event-archive": '{"reason": "failed", "copy": "1"}'}
    assert len({identity(one), identity(one, b"y"), identity(copy)}) == 3


def test_events_of_one_id_are_told_apart_by_name_and_body():
    def of(message: Any) -> Any:
        return read(message.headers, message.body).identity("billing")

    created = of(archived(received("1")))
    assert of(archived(received("1"), attempt=4)) == created
    assert of(archived(received("1", name="shop.order.deleted"))) != created
    assert of(archived(received("1", payload={"order_id": 8}))) != created


@pytest.mark.parametrize("value", [7, None, [], {}, [[1]], True, 1.5])
def test_wrong_type_is_ignored(value):
    keys = ("reason", "detail", "handler", "queue", "traceback", "frames", "history", "exception")
    found = read({"event-archive": json.dumps({**dict.fromkeys(keys, value), "attempt": "x"})})
    assert (found.reason, found.detail, found.handler, found.queue) == ("unknown", "", None, "")
    assert (found.frames, found.history, found.exception) == ((), (), "")
    assert (found.attempts, found.location) == (1, "")


def test_an_outcome_has_no_body():
    header = {"event-id": "1", "event-outcome": json.dumps({"outcome": "succeeded"})}
    assert isinstance(archive_message.read(delivery(header, b"")), Outcome)
    assert read(header, b"x").reason == "unknown"


def test_too_deep_document_is_ignored():
    deep = '{"reason": "failed", "a": ' + "[" * 300 + "]" * 300 + "}"
    assert read({"event-archive": deep}).reason == "unknown"
    assert read({"event-archive": deep}).headers == {"event-archive": deep}


def test_the_failing_line_is_ours():
    message = archived(received("1"))
    found = read(dict(message.headers), message.body)
    assert found.location == "billing.tax:28 in rate"
    assert found.payload == {"order_id": 7}
    odd = json.dumps({"reason": "failed", "frames": [{"file": [], "line": {}, "module": 5}]})
    assert read({"event-archive": odd}).location == "5:? in ?"
